"""The demo model says what transformers says (float32, 64 tokens), from every source and in every batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from jaxserve import LLM, SamplingParams
from jaxserve.weights.source import open_model

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
OPTIONS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def cases() -> list[dict]:
    """See scripts/make_demo_golden.py."""
    golden = Path(__file__).resolve().parent.parent / "golden" / "demo_greedy.json"
    return json.loads(golden.read_text())["cases"]


@pytest.fixture(scope="module")
def demo():
    with LLM("demo", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def safetensors_directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    source = open_model("demo")
    save_file({name: tensor.read() for name, tensor in source.tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(source.config))
    source.tokenizer.save(directory)
    return directory


def check(outputs, cases) -> None:
    assert [output.prompt_token_ids for output in outputs] == [case["prompt_token_ids"] for case in cases]
    assert [output.outputs[0].token_ids for output in outputs] == [case["token_ids"] for case in cases]


def run(llm, cases) -> list:
    """Texts and conversations, as a user gives them."""
    texts = [case["prompt"] for case in cases if "prompt" in case]
    chats = [case["messages"] for case in cases if "messages" in case]
    outputs = llm.generate(texts, GREEDY, use_tqdm=False)
    return outputs + llm.chat(chats, GREEDY, use_tqdm=False) if chats else outputs


def test_alone(demo, cases):
    for case in cases:
        check(run(demo, [case]), [case])


def test_batched(demo, cases):
    check(run(demo, cases), cases)
    prompts = [case["prompt_token_ids"] for case in cases]
    check(demo.generate(prompts, GREEDY, use_tqdm=False), cases)


def test_from_a_safetensors_directory(safetensors_directory, cases):
    with LLM(safetensors_directory, **OPTIONS) as llm:
        check(run(llm, cases), cases)


@pytest.mark.parametrize("options", [{"decode_steps": 4}, {"deterministic": True}, {"max_num_batched_tokens": 32},
                                     {"page_size": 16, "num_pages": 40}], ids=str)
def test_with_other_options(cases, options):
    with LLM("demo", **OPTIONS, **options) as llm:
        check(run(llm, cases), cases)
