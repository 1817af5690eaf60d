"""Very small tokenizers, made without downloads."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from jaxserve.tokenizer import Tokenizer

TEMPLATE = ("{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level_backend(bos: bool = False, corpus: tuple[str, ...] = ()) -> Backend:
    """Byte-level BPE: one token per byte and, with a corpus, some merges; then <s>, </s> and two added tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=256 + 40, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    backend.add_special_tokens(["<s>", "</s>", AddedToken("<|tool|>", special=True)])
    backend.add_tokens(["<think>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    return backend


def byte_level(bos: bool = False, templates: Mapping[str, str] | None = None) -> Tokenizer:
    return Tokenizer(byte_level_backend(bos), special_tokens=SPECIAL,
                     chat_templates={"default": TEMPLATE} if templates is None else templates)
