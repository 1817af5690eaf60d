"""A Hugging Face directory with a very small random model and a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models.checkpoints import random_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "eos_token_id": 257,
}
CHAT_TEMPLATE = ("{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
                 "{% if add_generation_prompt %}<s>assistant: {% endif %}")


def write_tiny_model(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_checkpoint(CONFIG), directory / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}))
