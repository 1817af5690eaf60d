"""Name maps fill every parameter, and use every element of the checkpoint, exactly once."""

from operator import attrgetter

import jax
import numpy as np
import pytest

from jaxserve.models import registry
from jaxserve.models.params import abstract_params
from tests.models.golden_cases import CASES


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
