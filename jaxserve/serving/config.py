"""Options of a server, beside the engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of `jaxserve serve`.

    Attributes:
        host: address to listen on; the default is this machine only, 0.0.0.0 is every network.
        port: of the HTTP server. 0 turns it off.
        grpc_port: of the gRPC server. 0 turns it off.
        served_model_name: what clients call the model. Default MODEL as given.
        api_key: a key that clients must send, as "Authorization: Bearer KEY", to everything but health
            checks. Other users of the machine can read a command line: put keys into the config file.
        ssl_certfile: certificate for TLS, with ssl_keyfile.
        ssl_keyfile: key of the certificate.
        cors_allow_origins: web origin whose pages may call the HTTP server; "*" is every one.
        max_body_bytes: largest HTTP body that is read.
        max_waiting_tokens: most prompt tokens of all requests that wait for their first token; more are
            refused (HTTP 429). One request alone may have more.
        trust_request_chat_template: take chat templates from requests. A template is a program and can
            use up a processor.
        drain_seconds: after SIGTERM requests may go on for so long before they are aborted.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50051
    served_model_name: str | None = None
    api_key: Sequence[str] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    cors_allow_origins: Sequence[str] = ()
    max_body_bytes: int = 16 << 20
    max_waiting_tokens: int = 1 << 20
    trust_request_chat_template: bool = False
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("port", "grpc_port"):
            self._integer(name, 0, 65535)
        for name in ("max_body_bytes", "max_waiting_tokens"):
            self._integer(name, 1, 2**63)
        for name in ("api_key", "cors_allow_origins"):
            value = getattr(self, name)
            items = tuple(value) if isinstance(value, list | tuple) else (value,)
            if not all(isinstance(item, str) and item for item in items):
                raise ConfigError(f"{name} must be a text or a list of texts, none of them empty")
            object.__setattr__(self, name, items)
        for name in ("host", "served_model_name", "ssl_certfile", "ssl_keyfile"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be a text, got {value!r}")
        if not isinstance(self.trust_request_chat_template, bool):
            raise ConfigError(f"trust_request_chat_template must be true or false, got "
                              f"{self.trust_request_chat_template!r}")
        seconds = self.drain_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e6:
            raise ConfigError(f"drain_seconds must be a number of at least 0, got {seconds!r}")
        if not self.port and not self.grpc_port:
            raise ConfigError("port and grpc_port are both 0, so there would be no server")
        if self.port == self.grpc_port:
            raise ConfigError(f"port and grpc_port are both {self.port}; they must differ")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile go together")
        for path in (self.ssl_certfile, self.ssl_keyfile):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"there is no file {path}")

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def read_config_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a YAML file: those of EngineConfig and those of ServeConfig, by their names there.

    Raises:
        ConfigError: it is no YAML mapping, or has names of neither.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} must hold a mapping of options, such as port: 8000")
    content = {str(name).replace("-", "_"): value for name, value in content.items()}
    engine, serve = ({field.name for field in dataclasses.fields(cls)} for cls in (EngineConfig, ServeConfig))
    unknown = sorted(content.keys() - engine - serve)
    if unknown:
        raise ConfigError(f"{path} has unknown option(s) {', '.join(unknown)}; known: "
                          f"{', '.join(sorted(engine | serve))}")
    return ({name: value for name, value in content.items() if name in engine},
            {name: value for name, value in content.items() if name in serve})
