"""Targets are written as people write them, and what is not one is answered with those that are."""

from __future__ import annotations

import pytest

from jaxserve.capacity.targets import CHIPS, parse_target
from jaxserve.errors import ConfigError


@pytest.mark.parametrize("name, platform, devices, kind", [
    ("tpu:v5e:2x4", "tpu", 8, "TPU v5 lite"), ("tpu:v6e:1x1", "tpu", 1, "TPU v6 lite"),
    ("tpu:v5p:2x2x2", "tpu", 8, "TPU v5"), ("TPU:v5e:4x4", "tpu", 16, "TPU v5 lite"),
    ("gpu:h100x8", "gpu", 8, "NVIDIA H100 80GB HBM3"), ("gpu:a100", "gpu", 1, "NVIDIA A100-SXM4-80GB"),
    ("gpu:l4x1", "gpu", 1, "NVIDIA L4"), ("gpu:t4x2", "gpu", 2, "Tesla T4"), ("cpu", "cpu", 1, "cpu")])
def test_what_a_target_is(name, platform, devices, kind):
    target = parse_target(name)
    assert (target.platform, target.num_devices, target.kind) == (platform, devices, kind)


def test_a_chip_of_tpu7x_is_two_devices():
    target = parse_target("tpu:tpu7x:2x2x1")
    assert target.num_devices == 8
    assert target.chip is not None and 2 * target.chip.bandwidth == 7380e9  # of the chip, as its data sheet says


@pytest.mark.parametrize("name", ["", "tpu", "tpu:v5e", "tpu:v9:2x2", "tpu:h100:2x2", "tpu:v5e:0x2", "gpu:h100x0",
                                  "gpu:v5e", "gpu:h100:8", "gpu:", "cpu:2", "npu:x1"])
def test_what_is_no_target_is_answered_with_the_known_ones(name):
    with pytest.raises(ConfigError, match="v5e v6e v5p tpu7x .*h100 h200 a100 l4 t4 .*cpu") as error:
        parse_target(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("name", ["tpu:v5e:2x2x2", "tpu:v5p:2x2"])
def test_a_topology_of_the_wrong_number_of_dimensions(name):
    with pytest.raises(ConfigError, match="dimensions, for example tpu:"):
        parse_target(name)


@pytest.mark.parametrize("name, there_are", [
    ("tpu:v5e:3x5", "1x1, 2x2, 2x4, .* 16x16$"), ("tpu:v6e:32x32", "16x16$"), ("tpu:v5e:4x2", "2x4"),
    ("tpu:v5p:3x3x3", "2x4x4, and multiples of 4"), ("tpu:v5p:16x16x28", "up to 6144 chips"),
    ("tpu:tpu7x:8x4x4", "ascending order"), ("gpu:h100x99999999999", "at most 8 h100; give 1 to 8"),
    ("gpu:a100x17", "at most 16 a100")])
def test_more_than_there_is(name, there_are):
    with pytest.raises(ConfigError, match=f"target '{name}'.*{there_are}"):
        parse_target(name)


@pytest.mark.parametrize("name", ["tpu:v5p:4x4x4", "tpu:v5p:4x8x12", "tpu:v5p:16x16x24", "tpu:tpu7x:16x24x24",
                                  "tpu:v6e:16x16", "gpu:a100x16"])
def test_the_largest_that_there_are(name):
    assert parse_target(name).num_devices >= 16


def test_jax_gives_out_three_quarters_of_a_gpu_and_all_of_a_tpu():
    gpu, tpu = parse_target("gpu:h100"), parse_target("tpu:v5e:1x1")
    assert gpu.usable_bytes() == pytest.approx(0.75 * 80e9, rel=0.07)
    assert gpu.usable_bytes(0.9) == pytest.approx(1.2 * gpu.usable_bytes())
    assert tpu.usable_bytes() == tpu.usable_bytes(0.9) == 15.75 * 2**30


def test_names_of_gpu_architectures():
    assert {name: chip.cuda.arch for name, chip in CHIPS.items() if chip.cuda is not None} == {
        "h100": "sm_90a", "h200": "sm_90a", "a100": "sm_80", "l4": "sm_89", "t4": "sm_75"}
