"""Makes tests/golden/: logits, tensor names and rope frequencies as transformers computes them.

    python -m scripts.make_goldens          # from the repository root; needs torch and transformers >= 5

The weights come from numpy (tests/models/checkpoints.py), so only results are stored.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.checkpoints import random_tensor
from tests.models.golden_cases import CASES, DECODE_POSITIONS, PREFILL_POSITIONS, ROPE_CASES, Case, prompt

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"


def hf_config(config: dict) -> transformers.PreTrainedConfig:
    values = json.loads(json.dumps(config))  # transformers changes nested values in place
    architecture = values.pop("architectures")[0]
    return getattr(transformers, architecture).config_class(**values)


def hf_model(case: Case) -> torch.nn.Module:
    config = hf_config(case.config)
    config._attn_implementation = "eager"  # the only one with soft caps on the scores
    model = getattr(transformers, case.config["architectures"][0])(config).eval()
    plus_one = case.config["model_type"] == "gemma2"
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied ones appear once
            parameter.copy_(torch.from_numpy(random_tensor(name, tuple(parameter.shape), 0, plus_one)))
    return model


@torch.no_grad()
def logits(case: Case, model: torch.nn.Module) -> tuple[np.ndarray, np.ndarray]:
    ids = torch.from_numpy(prompt(case.config).astype(np.int64))[None]
    prefill = model(ids, use_cache=False).logits[0, list(PREFILL_POSITIONS)].numpy()
    first = DECODE_POSITIONS[0]
    cache = transformers.DynamicCache(config=model.config)
    model(ids[:, :first], cache=cache, use_cache=True)
    decode = [model(ids[:, p:p + 1], cache=cache, use_cache=True).logits[0, 0].numpy() for p in DECODE_POSITIONS]
    return prefill, np.stack(decode)


def rope(config: dict, seq_len: int) -> tuple[np.ndarray, float]:
    hf = transformers.LlamaConfig(**json.loads(json.dumps(config)))
    if hf.rope_parameters["rope_type"] == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
        inv_freq, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(hf)
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[hf.rope_parameters["rope_type"]](hf, "cpu", seq_len=seq_len)
    return inv_freq.numpy(), factor


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    tensors: dict[str, dict[str, list[int]]] = {}
    for name, case in CASES.items():
        model = hf_model(case)
        arrays[f"{name}/prefill"], arrays[f"{name}/decode"] = logits(case, model)
        tied = case.config["tie_word_embeddings"]
        tensors[name] = {key: list(value.shape) for key, value in model.state_dict().items()
                         if not (tied and key == "lm_head.weight")}
    np.savez_compressed(GOLDEN / "model_logits.npz", **arrays)
    lines = [f"{json.dumps(name)}: {json.dumps(shapes)}" for name, shapes in tensors.items()]
    (GOLDEN / "model_tensors.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")

    arrays = {}
    for name, (config, seq_len) in ROPE_CASES.items():
        inv_freq, factor = rope(config, seq_len)
        arrays[f"{name}/inv_freq"], arrays[f"{name}/attention_factor"] = inv_freq, np.float64(factor)
    np.savez_compressed(GOLDEN / "rope.npz", **arrays)
    print(f"{len(CASES)} models and {len(ROPE_CASES)} rope configs, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
