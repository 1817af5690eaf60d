"""The arithmetic of plans, against numbers worked out by hand from the published shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.capacity.footprint import share_of, streamed_weights, tensor_degrees, weights_bytes
from jaxserve.capacity.known_models import KNOWN_MODELS
from jaxserve.capacity.models import find_model
from jaxserve.capacity.planner import Capacity, plan_capacity
from jaxserve.capacity.roofline import decode_floor
from jaxserve.capacity.targets import CHIPS, parse_target
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, OutOfMemoryError

LLAMA = find_model("llama-3-8b")


def capacity(target: str, model: str = "llama-3-8b", gpu_fraction: float = 0.75, **options: Any) -> Capacity:
    return plan_capacity(find_model(model), parse_target(target), EngineConfig(**options), programs="none",
                         gpu_fraction=gpu_fraction)


# -- weights and KV

# Llama-3-8B: 8,030,261,248 parameters; 2 * 128256 * 4096 of them embedding and head, (2 * 32 + 1) * 4096 norms.
PARAMETERS, EMBEDDING, NORMS = 8_030_261_248, 128256 * 4096, 65 * 4096


def test_weights_of_llama_3_8b_are_16_06_gb():
    assert weights_bytes(LLAMA.spec, "bfloat16") == 2 * PARAMETERS == pytest.approx(16.06e9, rel=1e-4)
    assert weights_bytes(LLAMA.spec, "float32") == 4 * PARAMETERS


@pytest.mark.parametrize("name, billions", [("llama-3-70b", 70.55), ("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19),
                                            ("gemma-2-9b", 9.24),
                                            ("llama-3.2-1b", 1.236)])
def test_sizes_of_the_known_models_are_the_published_ones(name, billions):
    assert weights_bytes(find_model(name).spec, "bfloat16") / 2e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_device_holds_its_part_of_every_matrix_and_all_norms(degree):
    assert weights_bytes(LLAMA.spec, "bfloat16", degree) == 2 * ((PARAMETERS - NORMS) // degree + NORMS)


def test_a_step_reads_all_weights_but_the_rows_of_an_embedding_of_its_own():
    assert streamed_weights(LLAMA.spec, "bfloat16") == (PARAMETERS - EMBEDDING, 2 * (PARAMETERS - EMBEDDING))
    tied = find_model("qwen3-0.6b").spec
    assert streamed_weights(tied, "bfloat16")[1] == weights_bytes(tied, "bfloat16")


def test_a_token_of_llama_3_8b_takes_128_kib():
    assert capacity("gpu:h100").kv_bytes_per_token == 128 << 10     # 2 * 32 layers * 8 heads * 128 * 2 bytes
    assert capacity("gpu:h100", dtype="float32").kv_bytes_per_token == 256 << 10


@pytest.mark.parametrize("devices, degrees", [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (16, (1, 2, 4, 8)), (3, (1,)),
                                              (12, (1, 2, 4))])
def test_degrees_divide_devices_and_kv_heads(devices, degrees):
    assert tensor_degrees(LLAMA.spec, devices) == degrees


def test_a_share_has_whole_groups_of_heads():
    share = share_of(LLAMA.spec, 4)
    assert (share.num_heads, share.num_kv_heads, share.mlp_size) == (8, 2, 3584)
    assert share.heads_per_kv == LLAMA.spec.heads_per_kv


# -- the pool


def test_the_pool_is_what_weights_and_temporaries_leave():
    plan = capacity("gpu:h100", max_num_seqs=128)
    share, page = plan.share, 16 * (128 << 10)
    left = int(share.limit_bytes * 0.97) - share.weights_bytes - share.slots_bytes - share.temp_bytes
    assert share.num_pages == left // page
    assert share.pool_bytes == share.num_pages * page
    assert share.num_tokens == (share.num_pages - 1) * 16          # page 0 is the dummy
    assert plan.full_length_sequences == (share.num_pages - 1) // 512
    assert plan.engine.pool_bytes == share.pool_bytes


def test_the_pool_is_no_larger_than_can_be_used():
    plan = capacity("gpu:h200", max_num_seqs=4)
    assert plan.share.num_pages == 4 * 512 + 1
    assert plan.full_length_sequences == 4


def test_a_tpu_keeps_more_arrays_of_logits_than_a_gpu():
    """As its compiler says of the programs in docs/kernels.md, where neither is asked."""
    on_tpu, on_gpu = (capacity(target, max_num_seqs=256).share.temp_bytes for target in ("tpu:v6e:1x1", "gpu:h100"))
    assert on_tpu - on_gpu == 5 * 4 * 320 * LLAMA.spec.vocab_size


def test_a_larger_share_of_a_gpu_gives_a_larger_pool():
    less, more = (capacity("gpu:h100", gpu_fraction=fraction).share for fraction in (0.75, 0.9))
    assert more.pool_bytes - less.pool_bytes == pytest.approx(0.15 * 0.97 * 84_942_979_072, rel=1e-3)


# -- how many devices


def test_the_least_degree_that_fits_is_suggested():
    plan = capacity("tpu:v5e:2x4")
    assert [share.fits for share in plan.shares] == [False, True, True, True]
    assert plan.shares[0].short_bytes > 1e9  # 16.06 GB of weights leave too little of 15.75 GiB
    assert (plan.share.degree, plan.replicas) == (2, 4)
    assert plan.share.weights_bytes == weights_bytes(LLAMA.spec, "bfloat16", 2)
    assert plan.kv_bytes_per_token == 64 << 10                     # on each of the two
    assert (capacity("tpu:v6e:2x4").share.degree, capacity("gpu:h100x8").share.degree) == (1, 1)


def test_a_model_that_cannot_fit_says_by_how_much():
    with pytest.raises(OutOfMemoryError, match=r"each of 4 devices of tpu:v5e:2x2 would hold 32\.\d+ GiB of weights.*"
                                               r"15\.75 GiB can be used, \d+\.\d+ GiB too little; lower max_model_len"):
        capacity("tpu:v5e:2x2", "llama-3-70b")


def test_a_pool_set_by_hand_must_fit_too():
    assert capacity("tpu:v5e:1x1", "qwen3-0.6b", kv_cache_memory_bytes=8 << 30).share.pool_bytes <= 8 << 30
    with pytest.raises(OutOfMemoryError, match="too little"):
        capacity("tpu:v5e:1x1", "qwen3-0.6b", kv_cache_memory_bytes=20 << 30, max_num_seqs=1024)


def test_wrong_options_are_the_engine_s_own_errors():
    with pytest.raises(ConfigError, match="max_model_len=9000, but llama has 8192 positions"):
        capacity("gpu:h100", max_model_len=9000)


def test_this_machine_s_cpu_is_a_target():
    plan = capacity("cpu", "qwen3-0.6b", max_num_seqs=2, max_model_len=256)
    assert plan.replicas == 1 and plan.floors == () and plan.compiler_missing is None
    assert plan.engine.config.page_size == 64                      # the engine's own default on CPUs


# -- the least time of a step


def test_a_decode_step_of_one_sequence_reads_the_weights():
    h100 = CHIPS["h100"]
    floor = decode_floor(LLAMA.spec, "bfloat16", h100, batch=1, context=1000, kv_row_bytes=4096)
    assert floor.weights_bytes == 2 * (PARAMETERS - EMBEDDING)
    assert floor.kv_bytes == 32 * 1000 * 4096
    assert floor.flops == 2 * (PARAMETERS - EMBEDDING) + 4 * 1000 * 32 * 32 * 128
    assert floor.bound == "memory"
    assert floor.seconds == pytest.approx((15.01e9 + 0.131e9) / 3.35e12, rel=1e-3)
    assert floor.tokens_per_second == pytest.approx(1 / floor.seconds)


def test_large_batches_are_bound_by_the_peak_rate():
    floor = decode_floor(LLAMA.spec, "bfloat16", CHIPS["h100"], batch=1024, context=16, kv_row_bytes=4096)
    assert floor.bound == "compute"
    assert floor.seconds == pytest.approx(1024 * 15.01e9 / 989e12, rel=0.02)


def test_a_window_bounds_what_its_layers_read():
    gemma = find_model("gemma-2-9b").spec
    floors = [decode_floor(gemma, "bfloat16", CHIPS["v6e"], batch=1, context=context, kv_row_bytes=8192).kv_bytes
              for context in (4096, 8192)]
    assert floors == [42 * 4096 * 8192, 21 * (4096 + 8192) * 8192]  # every other layer sees 4096 tokens


def test_devices_of_a_split_share_the_work():
    one, two = (decode_floor(LLAMA.spec, "bfloat16", CHIPS["v5e"], batch=8, context=1024, kv_row_bytes=4096 / degree,
                             degree=degree) for degree in (1, 2))
    assert two.kv_bytes == one.kv_bytes // 2
    assert two.seconds == pytest.approx(one.seconds / 2, rel=1e-3)


# -- models


def test_known_models_are_known_by_any_case():
    assert set(KNOWN_MODELS) >= {"llama-3-8b", "qwen3-0.6b", "gemma-2-9b"}
    assert dataclasses.asdict(find_model("Llama-3-8B").spec) == dataclasses.asdict(LLAMA.spec)


def test_a_config_alone_is_a_model(tiny_model, tmp_path):
    config = tmp_path / "config.json"
    config.write_text((tiny_model / "config.json").read_text())
    for model in (config, tmp_path, str(config)):
        assert find_model(model).spec == find_model(tiny_model).spec
