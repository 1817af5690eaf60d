"""Options of a server, beside the engine's."""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.serving.logs import LogFormat

_INTEGERS = {"port": (0, 65535), "grpc_port": (0, 65535), "max_body_bytes": (1, 2**63),
             "max_waiting_tokens": (1, 2**63), "max_connections": (1, 2**31), "grpc_max_message_bytes": (1, 2**31 - 1)}
_SECONDS = {"drain_seconds": 0.0, "idle_seconds": 1.0, "grpc_keepalive_seconds": 1.0}  # the least of each
_TEXTS = ("host", "served_model_name", "ssl_certfile", "ssl_keyfile", "ssl_client_ca", "otlp_endpoint")
_LISTS = ("api_key", "cors_allow_origins")
_FLAGS = ("chat_page", "grpc_reflection", "grpc_channelz", "trust_request_chat_template", "access_log", "log_prompts")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of `jaxserve serve`.

    Attributes:
        host: address to listen on; the default is this machine only, 0.0.0.0 is every network.
        port: of the HTTP server. 0 turns it off.
        grpc_port: of the gRPC server. 0 turns it off.
        served_model_name: what clients call the model. Default MODEL as given.
        api_key: a key that clients must send, as "Authorization: Bearer KEY", to everything but health
            checks and the chat page itself. Other users of the machine can read a command line: put keys into
            the config file.
        ssl_certfile: certificate chain for TLS, with ssl_keyfile. Renewed files are read while the server runs.
        ssl_keyfile: key of the certificate, not encrypted.
        ssl_client_ca: certificates that clients' own certificates must be signed by; then everybody needs
            one, health checks too.
        cors_allow_origins: web origin whose pages may call the HTTP server; "*" is every one.
        chat_page: answer "/" with a page to chat with the model in a browser.
        max_body_bytes: largest HTTP body that is read. Of bodies that are not small as many bytes as four of
            these are held at a time; more are refused (HTTP 429).
        max_connections: most HTTP connections at a time, those within a TLS handshake too; more are closed at
            once.
        idle_seconds: an HTTP connection without a request is closed after so long. Longer than what load
            balancers keep idle connections for, which is often 60.
        grpc_max_message_bytes: largest gRPC message that is taken, and sent.
        grpc_keepalive_seconds: how often a silent gRPC connection is asked whether it is still there.
        grpc_reflection: tell gRPC clients the protocols.
        grpc_channelz: serve gRPC's own debugging data; needs grpcio-channelz.
        max_waiting_tokens: most prompt tokens of all requests that wait for their first token; more are
            refused (HTTP 429). One request alone may have more.
        trust_request_chat_template: take chat templates from requests. A template is a program and can
            use up a processor.
        drain_seconds: after SIGTERM requests may go on for so long before they are aborted.
        log_format: of the log on stderr; json is one object a line.
        access_log: a line for each call, with status, times and numbers of tokens.
        log_prompts: with the texts of prompts and answers.
        otlp_endpoint: send a trace of each request there by OTLP over gRPC, such as http://localhost:4317;
            needs jaxserve[otel]. Traces have no texts in them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50051
    served_model_name: str | None = None
    api_key: Sequence[str] = field(default=(), repr=False)
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_client_ca: str | None = None
    cors_allow_origins: Sequence[str] = ()
    chat_page: bool = True
    max_body_bytes: int = 16 << 20
    max_connections: int = 4096
    idle_seconds: float = 75.0
    grpc_max_message_bytes: int = 64 << 20
    grpc_keepalive_seconds: float = 60.0
    grpc_reflection: bool = True
    grpc_channelz: bool = False
    max_waiting_tokens: int = 1 << 20
    trust_request_chat_template: bool = False
    drain_seconds: float = 30.0
    log_format: LogFormat = "text"
    access_log: bool = True
    log_prompts: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")
        for name, least in _SECONDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e6:
                raise ConfigError(f"{name} must be a number of at least {least:g}, got {value!r}")
        for name in _LISTS:
            value = getattr(self, name)
            if value == []:
                raise ConfigError(f"{name} is an empty list; leave it out for none")
            items = tuple(value) if isinstance(value, list | tuple) else (value,)
            if not all(isinstance(item, str) and item for item in items):
                raise ConfigError(f"{name} must be a text or a list of texts, none of them empty")
            object.__setattr__(self, name, items)
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be a text, got {value!r}")
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {value!r}")
        if self.log_format not in (formats := typing.get_args(LogFormat)):
            raise ConfigError(f"log_format must be {' or '.join(formats)}, got {self.log_format!r}")
        self._check_together()

    def _check_together(self) -> None:
        if not all(key.isascii() and key.isprintable() and " " not in key for key in self.api_key):
            raise ConfigError("api_key must be of printable ASCII characters without spaces, which headers can carry")
        if not self.port and not self.grpc_port:
            raise ConfigError("port and grpc_port are both 0, so there would be no server")
        if self.port == self.grpc_port:
            raise ConfigError(f"port and grpc_port are both {self.port}; they must differ")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile go together")
        if self.ssl_client_ca is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_client_ca needs ssl_certfile and ssl_keyfile")
        for path in (self.ssl_certfile, self.ssl_keyfile, self.ssl_client_ca):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"there is no file {path}")
        if self.log_prompts and not self.access_log:
            raise ConfigError("log_prompts needs access_log: the texts are in its lines")
        if self.otlp_endpoint is not None:
            url = urlsplit(self.otlp_endpoint)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ConfigError(f"otlp_endpoint must be a URL such as http://localhost:4317, got "
                                  f"{self.otlp_endpoint!r}")


def read_config_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a YAML file: those of EngineConfig and those of ServeConfig, by their names there.

    An empty file gives none.

    Raises:
        ConfigError: it is no YAML mapping, gives an option twice, or has names of neither.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        loaded, root = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if loaded is None:
        return {}, {}
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path} must hold a mapping of options, such as port: 8000")
    # What was loaded has only the last of two equal keys, and would not show that there are two.
    assert isinstance(root, yaml.MappingNode)
    names = [str(key.value).replace("-", "_") for key, _ in root.value]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"{path} gives {', '.join(twice)} more than once; keep one of each")
    content = {str(name).replace("-", "_"): value for name, value in loaded.items()}
    engine, serve = ({field.name for field in dataclasses.fields(cls)} for cls in (EngineConfig, ServeConfig))
    unknown = sorted(content.keys() - engine - serve)
    if unknown:
        raise ConfigError(f"{path} has unknown option(s) {', '.join(unknown)}; known: "
                          f"{', '.join(sorted(engine | serve))}")
    return ({name: value for name, value in content.items() if name in engine},
            {name: value for name, value in content.items() if name in serve})
