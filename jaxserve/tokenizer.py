"""Text to token ids and back, and chat messages to token ids.

A thin wrapper over a `tokenizers.Tokenizer` (no torch; transformers is imported only to render a chat
template or to convert a `tokenizer.model`). Where it came from does not matter to the engine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError, RequestError
from jaxserve.json_files import read_json_object, read_text
from jaxserve.models.hf_config import get_token_ids
from jaxserve.text_length import token_bound

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja",
    "chat_template.json", "vocab.json", "merges.txt", "added_tokens.json",
)
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RESERVED = frozenset({"messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt",
                       "continue_final_message", "return_assistant_tokens_mask"})
_EOS_IDS_KEY = "eos_token_ids"  # our own entry in tokenizer_config.json: there can be several

_LONG = 1000  # ids; they take some tenths of a millisecond

Message = Mapping[str, Any]


class Tokenizer:
    """One model's tokenizer.

    Attributes:
        vocab_size: number of ids, added tokens included: the largest id plus one.
        eos_ids: ids that end a generation, as far as the tokenizer knows (the checkpoint's generation_config
            may add more).
        special_ids: ids that `skip_special_tokens` leaves out.
        special_tokens: by role, e.g. {"bos_token": "<s>"}; chat templates see them under these names.
        chat_templates: Jinja sources by name; the main one is "default".
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        # A role's token counts as special even if the vocabulary does not mark it; one that the vocabulary
        # lacks is left alone, because a new id would have no embedding.
        known = {role: token for role, token in self.special_tokens.items() if backend.token_to_id(token) is not None}
        marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        backend.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in known.values() if t not in marked])
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        eos = backend.token_to_id(known["eos_token"]) if "eos_token" in known else None
        self.eos_ids: frozenset[int] = frozenset(eos_ids) | (frozenset() if eos is None else {eos})
        self._bound = token_bound(backend)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """From a Hugging Face directory: its tokenizer.json, or else what transformers makes of its
        SentencePiece `tokenizer.model` (or vocab.json and merges.txt).

        Raises:
            CheckpointError: there is no tokenizer, or it cannot be read.
        """
        config = _read_json(directory / "tokenizer_config.json")
        fallback = _read_json(directory / "special_tokens_map.json")
        special_tokens = {}
        for role in _ROLES:
            token = config.get(role) or fallback.get(role)
            if token:
                special_tokens[role] = _content(token, f"{directory}: {role}")
        if (directory / "tokenizer.json").is_file():
            backend = _read_backend(directory / "tokenizer.json")
            _set_bos_eos(backend, config, special_tokens)
        else:
            backend, special_tokens = _convert(directory)
        return cls(backend, special_tokens=special_tokens, chat_templates=_read_chat_templates(directory, config),
                   eos_ids=get_token_ids(config, _EOS_IDS_KEY, "tokenizer_config"))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file (`weights.gguf.open_gguf(path).metadata`). A file without a chat
        template gives a tokenizer without one; none is made up."""
        from jaxserve.weights.gguf_tokenizer import read_gguf_tokenizer

        found = read_gguf_tokenizer(metadata)
        return cls(found.backend, special_tokens=found.special_tokens, eos_ids=found.eos_ids,
                   chat_templates=found.chat_templates)

    def save(self, directory: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, from which `from_directory` makes an equal tokenizer."""
        self._backend.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = {**self.special_tokens, _EOS_IDS_KEY: sorted(self.eos_ids)}
        if self.chat_templates:
            config["chat_template"] = [{"name": n, "template": t} for n, t in self.chat_templates.items()]
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    @property
    def chars_per_token(self) -> int:
        """Most characters of a text that one token stands for."""
        return self._bound.chars_per_token

    def least_tokens(self, text: str) -> int:
        """`encode` gives no fewer ids than this. Cheap for any length."""
        return self._bound.least_tokens(text)

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Ids of a text. `add_special_tokens`: put in what the model expects around a text, mostly a BOS.

        Raises:
            RequestError: the text is no valid Unicode (it has a lone surrogate); it names `param`.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise RequestError(
                f"the text has a lone surrogate (U+{ord(text[e.start]):04X} at character {e.start}), which no UTF-8 "
                "text can hold; remove or replace it", param) from None
        # The batch call lets go of the interpreter lock, encode holds it: a long text would stop every other thread.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True,
               spaces_between_special_tokens: bool = True) -> str:
        """Text of ids. Ids that are no token (padding rows of the embedding) give nothing.

        Args:
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: if they are shown, put a space between two that are adjacent.
        """
        if skip_special_tokens or not spaces_between_special_tokens:
            return self._decode(ids, skip_special_tokens)
        special = self.special_ids
        cuts = [i for i in range(1, len(ids)) if ids[i] in special and ids[i - 1] in special]
        bounds = [0, *cuts, len(ids)]
        return " ".join(self._decode(ids[start:stop], False) for start, stop in zip(bounds, bounds[1:]))

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(ids) > _LONG:  # lets go of the interpreter lock, see `encode`
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of one id (not text: a space may be written as a letter)."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        return [self._backend.id_to_token(i) for i in ids]

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """A conversation as the model's prompt text, rendered in transformers' sandbox.

        Args:
            messages: each has a "role" and a "content" that is text or a list of text parts
                (`{"type": "text", "text": ...}`, joined by newlines).
            add_generation_prompt: open the assistant's turn. Default: yes, unless continue_final_message.
            continue_final_message: end the prompt inside the last message, to have the model go on with it.
            tools: JSON schemas of functions, for templates that know them.
            chat_template: Jinja source, or the name of one of the model's own; default the model's.
            template_kwargs: further variables for the template, such as enable_thinking.

        Raises:
            RequestError: there is no template, the messages are malformed, or the template refuses them.
        """
        template = self._template(chat_template, bool(tools))
        if add_generation_prompt and continue_final_message:
            raise RequestError("add_generation_prompt and continue_final_message exclude each other; set one of them",
                               param="continue_final_message")
        reserved = sorted(_RESERVED & template_kwargs.keys())
        if reserved:
            raise RequestError(f"{', '.join(reserved)} cannot be given as variables of the chat template",
                               param="chat_template_kwargs")
        conversation = _check_messages(messages)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        render = _renderer()
        try:
            rendered, _ = render(
                conversations=[conversation], tools=list(tools) if tools else None, chat_template=template,
                continue_final_message=continue_final_message, add_generation_prompt=add_generation_prompt,
                **(self.special_tokens | template_kwargs))
        except Exception as e:  # a template is a program: it can fail in any way, and by raise_exception on purpose
            raise RequestError(f"the chat template does not accept these messages: {e}", param="messages") from e
        return rendered[0]

    def _template(self, given: str | None, has_tools: bool) -> str:
        if given is not None:
            return self.chat_templates.get(given, given)
        if has_tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        if "default" not in self.chat_templates:
            raise RequestError("the model has no chat template: pass chat_template=, or give a plain prompt",
                               param="messages")
        return self.chat_templates["default"]


def _check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages must be a non-empty list of messages, got {messages!r}", param="messages")
    return [_check_message(i, message) for i, message in enumerate(messages)]


def _check_message(i: int, message: Message) -> dict[str, Any]:
    def wrong(what: str) -> RequestError:
        return RequestError(f"messages[{i}]{what}", param=f"messages[{i}]")

    if not isinstance(message, Mapping):
        raise wrong(f" must be an object with role and content, got {message!r}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise wrong(f".role must be a text such as \"user\", got {role!r}")
    checked = {key: value for key, value in message.items() if value is not None}
    if isinstance(content, list | tuple):
        texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
                 for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise wrong(".content may list only parts of the form {\"type\": \"text\", \"text\": ...}")
        checked["content"] = "\n".join(texts)  # type: ignore[arg-type]
    elif content is None:
        if not message.get("tool_calls"):
            raise wrong(".content is missing; only a message with tool_calls may have none")
    elif not isinstance(content, str):
        raise wrong(f".content must be a text or a list of text parts, got {type(content).__name__}")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
            raise wrong(f".tool_calls must be a list of objects, got {calls!r}")
        checked["tool_calls"] = [_parse_arguments(call, wrong) for call in calls]
    return checked


def _parse_arguments(call: Mapping[str, Any], wrong: Callable[[str], RequestError]) -> Any:
    """Templates want a call's arguments as an object; the OpenAI API has them as JSON text."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise wrong(f".tool_calls has arguments that are not JSON: {arguments!r}") from None
    return {**call, "function": {**function, "arguments": parsed}}


def _renderer() -> Callable[..., Any]:
    _import_transformers()
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _import_transformers() -> None:
    """Imports transformers without its advice to install PyTorch, which we neither need nor want."""
    logging.getLogger("transformers").addFilter(_is_no_advice)  # no effect if it is there already
    import transformers  # noqa: F401


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {e}") from None


def _set_bos_eos(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where tokenizer_config.json has them, overrule tokenizer.json."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    around = [special_tokens.get(role) if config.get(f"add_{role}") else None for role in ("bos_token", "eos_token")]
    bos, eos = (token if token is not None and backend.token_to_id(token) is not None else None for token in around)
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, backend.token_to_id(token)) for token in (bos, eos) if token])


def _convert(directory: Path) -> tuple[Backend, dict[str, str]]:
    if not any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise CheckpointError(f"{directory} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    _import_transformers()
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        backend = converted.backend_tokenizer
    except Exception as e:  # conversion fails in many ways, by file and by tokenizer class
        raise CheckpointError(f"the tokenizer of {directory} cannot be converted: {e}") from e
    return backend, {role: token for role, token in converted.special_tokens_map.items() if role in _ROLES}


def _read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. A file of its own wins over the entry in tokenizer_config.json, as in transformers."""
    stored = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    try:
        templates = {entry["name"]: entry["template"] for entry in stored} if isinstance(stored, list) else (
            {"default": stored} if stored else {})
        plain = all(isinstance(text, str) for pair in templates.items() for text in pair)
    except (TypeError, KeyError):
        plain = False
    if not plain:
        raise CheckpointError(f"{directory}: chat_template must be a text or a list of objects with the texts "
                              f"\"name\" and \"template\", got {stored!r:.80}")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = read_text(directory / "chat_template.jinja")
    return templates


def _content(token: Any, where: str) -> str:
    """A special token is written as text or as an object with its properties."""
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str):
        raise CheckpointError(f"{where} must be a text or an object with a text \"content\", got {token!r:.80}")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
