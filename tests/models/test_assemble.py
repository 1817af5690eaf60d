"""Every parameter is filled from the checkpoint, exactly once; what does not fit is an error."""

from operator import attrgetter

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models import registry
from jaxserve.models.assemble import assemble
from jaxserve.models.params import abstract_params
from tests.models.checkpoints import random_checkpoint
from tests.models.golden_cases import CASES, llama


def resolved(config):
    spec = registry.resolve(config, None)
    return spec, registry.name_map(config, spec)


@pytest.mark.parametrize("name", CASES)
def test_placements_cover_each_element_of_the_parameters_exactly_once(name):
    spec, names = resolved(CASES[name].config)
    filled = jax.tree.map(lambda leaf: np.zeros(leaf.shape, int), abstract_params(spec, "float32"))
    for placements in names.values():
        for placement in placements:
            region = attrgetter(placement.leaf)(filled)[placement.index]
            assert placement.to_leaf(np.empty(placement.shape)).shape == region.shape
            attrgetter(placement.leaf)(filled)[placement.index] += 1
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(filled))


@pytest.mark.parametrize("name", CASES)
def test_placements_are_views_that_use_each_element_of_the_checkpoint_exactly_once(name):
    _, names = resolved(CASES[name].config)
    for placements in names.values():
        tensor = np.zeros(placements[0].shape, int)
        for placement in placements:
            view = placement.to_leaf(tensor)
            assert np.shares_memory(view, tensor)
            view += 1
        assert (tensor == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_have_the_asked_dtype(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    spec, names = resolved(llama())
    params = assemble(spec, names, random_checkpoint(llama()), dtype)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract_params(spec, dtype))


def test_missing_unknown_and_misshapen_tensors_are_named():
    spec, names = resolved(llama())
    tensors = random_checkpoint(llama())
    with pytest.raises(CheckpointError, match=r"lacks 1 of 21 tensors: model\.norm\.weight"):
        assemble(spec, names, {k: v for k, v in tensors.items() if k != "model.norm.weight"}, "float32")
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) that llama models do not have: model\.extra"):
        assemble(spec, names, {**tensors, "model.extra": np.zeros(1)}, "float32")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[47\]; the config asks for \[48\]"):
        assemble(spec, names, {**tensors, "model.norm.weight": np.zeros(47)}, "float32")


def test_a_repeated_embedding_and_rope_buffers_are_left_unread():
    config = llama(tie_word_embeddings=True)
    spec, names = resolved(config)
    tensors = random_checkpoint(config)
    extra = {"lm_head.weight": np.zeros(1), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(1)}
    assert assemble(spec, names, {**tensors, **extra}, "float32").lm_head is None
