"""Makes tests/golden/demo_greedy.json: what transformers (float32) generates greedily with the demo model.

    python -m scripts.make_demo_golden      # from the repository root; needs torch and transformers >= 5

transformers reads the GGUF with its own reader, tokenizer and chat template included, so nothing of ours is
involved but the download.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from jaxserve.weights.demo import demo_model_path

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "demo_greedy.json"
NUM_TOKENS = 64
# Two ids whose logits are closer than this may change places by rounding alone; such a prompt proves nothing.
MIN_MARGIN = 1e-3

PROMPTS = [
    "The lighthouse keeper climbed the stairs every evening and",
    "Photosynthesis is the process by which plants",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "In the summer of 1969 the whole world watched as",
]
QUESTIONS = [
    "What is the difference between weather and climate?",
    "Give me three tips for learning a new language.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
]


@torch.no_grad()
def generate(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    """NUM_TOKENS ids, EOS ignored, and the smallest distance between the best two logits on the way."""
    cache = transformers.DynamicCache(config=model.config)
    ids, given, margin = [], prompt, float("inf")
    for _ in range(NUM_TOKENS):
        logits = model(torch.tensor([given]), cache=cache, use_cache=True).logits[0, -1]
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        given = [int(best.indices[0])]
        ids += given
    return ids, margin


def main() -> None:
    path = demo_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    cases = [{"prompt": text, "prompt_token_ids": tokenizer(text)["input_ids"]} for text in PROMPTS]
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        cases.append({"messages": messages, "prompt_token_ids": ids})
    for case in cases:
        case["token_ids"], margin = generate(model.eval(), case["prompt_token_ids"])
        print(f"margin {margin:.4f}: {tokenizer.decode(case['token_ids'])!r}")
        assert margin > MIN_MARGIN, "choose another prompt"
    lines = ",\n".join(json.dumps(case) for case in cases)
    GOLDEN.write_text(f'{{"transformers": "{transformers.__version__}", "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
