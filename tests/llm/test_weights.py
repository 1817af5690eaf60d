"""Weights in memory, swapped while the engine lives, and saved."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve import LLM, CheckpointError, ConfigError, SamplingParams
from jaxserve.runtime.executables import compilations
from tests.llm import tiny
from tests.llm.dense import DenseLlama
from tests.llm.tiny import prompt_ids

PROMPT = prompt_ids(30)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def ids(llm) -> list[int]:
    return llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def other(dense) -> list[int]:
    """What the model with seed 1 says."""
    return DenseLlama(tiny.CONFIG, tiny.random_tensors(seed=1), dense.valid_vocab).greedy(PROMPT, 6)


@pytest.fixture
def swapped(llm, dense):
    """The shared engine; its own weights come back after the test."""
    assert ids(llm) == dense.greedy(PROMPT, 6)
    yield llm
    llm.update_params(tiny.random_tensors())


class Model(nnx.Module):
    """Weights as a Flax user has them: Linear kernels `[in, out]`."""

    def __init__(self, tensors):
        self.embed = nnx.Param(jax.numpy.asarray(tensors["model.embed_tokens.weight"]))
        self.rest = nnx.Dict({name.replace(".", "_"): nnx.Param(jax.numpy.asarray(value.T))
                              for name, value in tensors.items() if name != "model.embed_tokens.weight"})


def nnx_names() -> dict:
    names = {"embed": "model.embed_tokens.weight"}
    for name in tiny.random_tensors():
        if name != "model.embed_tokens.weight":
            names[f"rest.{name.replace('.', '_')}"] = (name, lambda array: array.T)
    return names


@pytest.mark.parametrize("form", ["by name", "bfloat16 by name", "pytree of numpy", "pytree of jax", "module", "state"])
def test_update(swapped, other, form):
    tensors, name_map = tiny.random_tensors(seed=1), None
    if form == "by name":
        params = tensors
    elif form == "bfloat16 by name":
        params = {name: jax.numpy.asarray(tensor).astype("bfloat16") for name, tensor in tensors.items()}
        rounded = {name: np.asarray(tensor.astype("float32")) for name, tensor in params.items()}
        other = DenseLlama(tiny.CONFIG, rounded, tiny.tokenizer().vocab_size).greedy(PROMPT, 6)
    elif form == "pytree of numpy":
        params = tiny.decoder_params(seed=1)
    elif form == "pytree of jax":
        params = jax.tree.map(jax.numpy.asarray, tiny.decoder_params(seed=1))
    else:
        model = Model(tensors)
        params, name_map = model if form == "module" else nnx.state(model), nnx_names()
    swapped.update_params(params, name_map)
    [output] = swapped.generate(PROMPT, PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids == other
    assert output.num_cached_tokens == 0  # what the old weights computed is forgotten


def test_update_in_bfloat16(make_llm):
    options = {"dtype": "bfloat16", "deterministic": True, "max_num_batched_tokens": 128}
    with make_llm(params=tiny.random_tensors(seed=1), **options) as llm:
        expected = ids(llm)
    with make_llm(**options) as llm:
        assert ids(llm) != expected
        for params in (tiny.random_tensors(seed=1),
                       jax.tree.map(lambda leaf: jax.numpy.asarray(leaf, "bfloat16"), tiny.decoder_params(seed=1))):
            before = compilations()
            llm.update_params(params)
            assert ids(llm) == expected
            assert compilations() == before


def test_update_between_two_steps_of_a_request(swapped):
    new = jax.tree.map(jax.numpy.asarray, tiny.decoder_params(seed=1))
    prompt = prompt_ids(25)
    stream = swapped.stream(prompt, PARAMS.clone(max_tokens=60))
    next(stream)
    swapped.update_params(new)
    assert swapped.generate(prompt, PARAMS, use_tqdm=False)[0].num_cached_tokens == 0
    ids = list(stream)[-1].output.outputs[0].token_ids
    assert len(ids) == 60
    # What it computed with both is not offered to others: only the prompt's pages are, made by the request after it.
    assert swapped.generate(prompt + ids, PARAMS, use_tqdm=False)[0].num_cached_tokens == 24


def test_update_refuses_what_does_not_fit(llm, dense):
    tensors, params = tiny.random_tensors(seed=1), tiny.decoder_params(seed=1)
    name = "model.layers.0.self_attn.q_proj.weight"
    wrong = [
        ({k: v for k, v in tensors.items() if k != name}, CheckpointError, name),
        (tensors | {name: tensors[name][:-1]}, CheckpointError, "wrong shape"),
        (tensors | {"extra": np.zeros(3)}, CheckpointError, "extra"),
        (params.replace(lm_head=None), CheckpointError, "lm_head is missing"),
        (params.replace(embed=params.embed[:-1]), CheckpointError, "embed is"),
        (params.replace(embed=params.embed.astype("float16")), ConfigError, "float16"),
        ([1, 2], ConfigError, "list"),
    ]
    for given, error, message in wrong:
        with pytest.raises(error, match=message):
            llm.update_params(given)
    assert ids(llm) == dense.greedy(PROMPT, 6)


def test_engine_of_an_nnx_module(make_llm, dense):
    with make_llm(params=Model(tiny.random_tensors()), name_map=nnx_names()) as llm:
        assert ids(llm) == dense.greedy(PROMPT, 6)


def test_a_saved_checkpoint_needs_no_source(make_llm, tmp_path, xla_cache, dense, other):
    with make_llm() as llm:
        llm.update_params(tiny.random_tensors(seed=1))
        llm.save_checkpoint(tmp_path / "saved")
        with pytest.raises(CheckpointError, match="not empty"):
            llm.save_checkpoint(tmp_path / "saved")
    with LLM(tmp_path / "saved", compilation_cache_dir=xla_cache, **tiny.ENGINE) as llm:
        assert ids(llm) == other
        assert llm.generate("a", PARAMS, use_tqdm=False)[0].prompt_token_ids == [ord("a")]
        assert llm.chat([{"role": "user", "content": "hi"}], PARAMS, use_tqdm=False)[0].error is None
