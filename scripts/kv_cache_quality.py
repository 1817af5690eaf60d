"""What a KV pool in fewer bits costs the demo model: `python -m scripts.kv_cache_quality`, about five minutes.

Against a float32 pool: the share of greedy tokens that are equal up to the first difference, and the change of the
mean log-probability of text that was given (the beginnings of this repository's documents).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxserve import LLM, SamplingParams

PROMPTS = [
    "Once upon a time, in a small village at the edge of a great forest,",
    "The history of the steam engine begins in the seventeenth century, when",
    "In order to bake a good loaf of bread, you first need to",
    "The capital of France is", "Water boils at a lower temperature on a mountain because",
    "def fibonacci(n):\n", "The three most important inventions of the twentieth century are",
    "Dear Sir or Madam,\n\nI am writing to", "A neural network is", "The moon causes tides on earth by",
    "List five fruits:\n1.", "To be a good friend means to",
]
NEW_TOKENS, TEXT_TOKENS = 64, 500
ROOT = Path(__file__).parent.parent


def measure(kv_cache_dtype: str) -> tuple[list[list[int]], np.ndarray]:
    """(greedy ids of each prompt, log-probabilities of all given tokens)."""
    with LLM("demo", dtype="float32", kv_cache_dtype=kv_cache_dtype, max_model_len=1024, max_num_seqs=8,
             num_pages=200, attention_backend="xla") as llm:
        greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
        texts = [llm.tokenizer.encode(path.read_text())[:TEXT_TOKENS]
                 for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]]
        scored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    logprobs = [entry[token].logprob for ids, output in zip(texts, scored)
                for token, entry in zip(ids[1:], output.prompt_logprobs[1:])]
    return [output.outputs[0].token_ids for output in greedy], np.array(logprobs)


def main() -> None:
    ids, logprobs = measure("float32")
    print(f"float32: mean log-probability {logprobs.mean():.4f} of {len(logprobs)} tokens")
    for dtype in ("bfloat16", "int8", "fp8"):
        other_ids, other_logprobs = measure(dtype)
        equal = [next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), NEW_TOKENS)
                 for a, b in zip(ids, other_ids)]
        change = other_logprobs - logprobs
        print(f"{dtype}: {sum(equal) / (len(ids) * NEW_TOKENS):.0%} of greedy tokens before the first difference, "
              f"{equal.count(NEW_TOKENS)} of {len(ids)} answers whole; log-probability {change.mean():+.4f} in the "
              f"mean, {np.abs(change).mean():.4f} by magnitude")


if __name__ == "__main__":
    main()
