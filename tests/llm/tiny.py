"""Very small models for tests of the whole engine: random ones, and parrots, which say what they are told to.

All have one architecture and one shape, so that engines with equal options share their compiled programs
through the cache on disk, whatever the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import attrgetter

import jax
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.models import registry
from jaxserve.models.params import DecoderParams, abstract_params
from jaxserve.tokenizer import Tokenizer
from tests.models.checkpoints import random_checkpoint

BOS, EOS, END_OF_TURN = 256, 257, 258
EXAGGERATED = 259  # " exaggerated", found in text before its bytes are
# Ids that no text is encoded to; they let a parrot say the same byte twice with another byte after it, and split
# characters at odd places.
FIRST_EXTRA = 260
EXTRA_ENTRIES = (b"\xb9\xec", b"\x82\xb4", b", beta gamma delta")
VOCAB = 272  # the rows beyond the tokenizer's ids are padding

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": EOS,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% if not loop.last or add_generation_prompt %}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}")

# Three sequences at a time; 27 usable pages of 8 tokens, so three long ones do not fit together.
ENGINE = {
    "max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 64, "page_size": 8, "num_pages": 28,
    "dtype": "float32", "seed": 7,
}


def tokenizer() -> Tokenizer:
    """Id = byte; then <s>, </s>, <|end|>, " exaggerated" and EXTRA_ENTRIES."""
    stand_ins = _byte_stand_ins()
    entries = ["".join(stand_ins[byte] for byte in entry) for entry in EXTRA_ENTRIES]
    vocabulary = {char: byte for byte, char in enumerate(stand_ins)}
    vocabulary |= {"<s>": BOS, "</s>": EOS, "<|end|>": END_OF_TURN, " exaggerated": EXAGGERATED}
    vocabulary |= {entry: FIRST_EXTRA + i for i, entry in enumerate(entries)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    backend.add_tokens([" exaggerated"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, eos_ids=[END_OF_TURN],
                     chat_templates={"default": CHAT_TEMPLATE})


def _byte_stand_ins() -> list[str]:
    """GPT-2's printable character for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def random_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights with Hugging Face names whose logits spread by about two."""
    tensors = random_checkpoint(CONFIG, seed)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * np.float32(2)
    return tensors


def parrot_tensors(*chains: Sequence[int]) -> dict[str, np.ndarray]:
    """A model whose greedy answer to a prompt that ends in the first id of a chain is the rest of the chain.

    Layers add nothing to the residual stream, embeddings are random directions, and row j of the output head is
    the embedding of j's predecessor. No id may have two successors, or two predecessors.
    """
    successors: dict[int, int] = {}
    for chain in chains:
        for before, after in itertools.pairwise(chain):
            assert successors.setdefault(before, after) == after, f"{before} has two successors"
    assert len(set(successors.values())) == len(successors), "an id has two predecessors"
    tensors = random_checkpoint(CONFIG)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    tensors["model.norm.weight"] = np.ones_like(tensors["model.norm.weight"])
    embed = np.random.default_rng(0).standard_normal(tensors["model.embed_tokens.weight"].shape).astype(np.float32)
    head = np.zeros_like(embed)
    for before, after in successors.items():
        head[after] = embed[before] / np.linalg.norm(embed[before])
    return tensors | {"model.embed_tokens.weight": embed, "lm_head.weight": head}


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """Random ids of text; those of two seeds differ from the first on."""
    return np.random.default_rng([seed, 1]).integers(0, 256, length).tolist()


def decoder_params(seed: int = 0) -> DecoderParams:
    """`random_tensors` as the engine's own pytree, of numpy arrays."""
    spec = registry.resolve(CONFIG, None)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(spec, np.float32))
    for name, tensor in random_tensors(seed).items():
        for placement in registry.name_map(CONFIG, spec)[name]:
            attrgetter(placement.leaf)(params)[placement.index] = placement.to_leaf(tensor)
    return params
