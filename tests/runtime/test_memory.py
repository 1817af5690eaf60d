from __future__ import annotations

import os
import types

import jax
import pytest

from jaxserve.config import CPU_POOL_LIMIT_BYTES, EngineConfig
from jaxserve.errors import ConfigError, OutOfMemoryError
from jaxserve.runtime import memory
from jaxserve.runtime.memory import available_ram, memory_errors, size_pool

GIB, MIB = 1 << 30, 1 << 20
CPU = types.SimpleNamespace(platform="cpu")


def gpu(**stats: int):
    return types.SimpleNamespace(platform="gpu", device_kind="Fake GPU", memory_stats=lambda: stats or None)


def size(device=CPU, weights_bytes: int = 0, slots_bytes: int = 0, temp: int = 0, max_num_seqs: int = 1000, **options):
    """Pages of 16 tokens and 1 MiB; one sequence of 160 tokens needs 10."""
    return size_pool(EngineConfig(**options), page_bytes=MIB, page_size=16, max_model_len=160,
                     max_num_seqs=max_num_seqs, device=device, weights_bytes=weights_bytes,
                     slots_bytes=slots_bytes, step_temp_bytes=lambda: temp)


@pytest.fixture
def free_ram(monkeypatch):
    def set_to(num_bytes: int) -> None:
        monkeypatch.setattr(memory, "available_ram", lambda: num_bytes)
    return set_to


# -- CPU


def test_a_share_of_the_free_ram(free_ram):
    free_ram(1000 * MIB)
    assert size(kv_cache_memory_fraction=0.25).num_pages == 250
    assert size(kv_cache_memory_fraction=0.25).reason == "25% of 0.98 GiB free RAM, at most 2.00 GiB"


def test_weights_that_are_yet_to_be_loaded_are_not_free(free_ram):
    free_ram(1000 * MIB)
    size_ = size(kv_cache_memory_fraction=0.25, weights_bytes=200 * MIB)
    assert size_.num_pages == 200
    assert "less 0.20 GiB of weights" in size_.reason


def test_never_more_than_the_limit_for_cpus(free_ram):
    free_ram(1000 * GIB)
    assert size().num_pages == CPU_POOL_LIMIT_BYTES // MIB


def test_never_more_than_all_sequences_can_use(free_ram):
    free_ram(1000 * GIB)
    for device in (CPU, gpu(bytes_limit=80 * GIB)):
        assert size(device, max_num_seqs=3).num_pages == 3 * 10 + 1
        assert size(device, max_num_seqs=3).reason == "all that 3 sequences of 160 tokens can use"


def test_unless_more_is_asked_for(free_ram):
    """A prefix cache outlives the sequences."""
    free_ram(1000 * GIB)
    for device in (CPU, gpu(bytes_limit=80 * GIB)):
        size_ = size(device, max_num_seqs=3, kv_cache_memory_bytes=500 * MIB)
        assert (size_.num_pages, size_.reason) == (500, "set by kv_cache_memory_bytes")


def test_too_little_for_one_sequence_says_the_numbers(free_ram):
    free_ram(20 * MIB)
    with pytest.raises(OutOfMemoryError) as error:
        size(kv_cache_memory_fraction=0.5)
    for part in ("10 pages of 16 tokens", "50% of 0.02 GiB free RAM", "max_model_len=160", "needs 10", "11 MiB",
                 "lower max_model_len", "kv_cache_memory_bytes"):
        assert part in str(error.value)
    free_ram(22 * MIB)
    assert size(kv_cache_memory_fraction=0.5).num_pages == 11


def test_sequences_and_steps_take_memory_too(free_ram):
    free_ram(1000 * MIB)
    size_ = size(kv_cache_memory_fraction=0.5, slots_bytes=300 * MIB, temp=100 * MIB)
    assert size_.num_pages == 300
    assert size_.reason == ("50% of 0.98 GiB free RAM less 0.29 GiB for the sequences' ids and options, 0.10 GiB for "
                            "the largest step, at most 2.00 GiB")


@pytest.mark.parametrize("options", [{}, {"num_pages": 2}, {"kv_cache_memory_bytes": 11 * MIB}])
@pytest.mark.parametrize("parts, remedy", [
    ({"weights_bytes": 2 * GIB}, "2.00 GiB of weights to come are 1.00 GiB too little; a smaller model"),
    ({"slots_bytes": 2 * GIB}, "2.00 GiB for the sequences' ids and options are 1.00 GiB too little; lower max_"),
    ({"temp": 2 * GIB}, "2.00 GiB for the largest step are 1.00 GiB too little; lower max_num_seqs"),
])
def test_what_an_engine_needs_beside_its_pool_must_fit(free_ram, options, parts, remedy):
    free_ram(1 * GIB)
    with pytest.raises(OutOfMemoryError, match=f"even without a KV pool: 1.00 GiB free RAM less {remedy}"):
        size(**parts, **options)


# -- by hand


@pytest.mark.parametrize("options", [{"num_pages": 2000}, {"kv_cache_memory_bytes": 2000 * MIB, "max_num_seqs": 3}])
def test_a_hand_set_pool_larger_than_the_free_ram_is_refused(free_ram, options):
    free_ram(1000 * MIB)
    with pytest.raises(OutOfMemoryError, match="pool would take 1.95 GiB .*there are 0.98 GiB free RAM;"):
        size(**options)


def test_set_by_pages_or_bytes():
    assert size(num_pages=5).num_pages == 5  # less than a full sequence: admission refuses what cannot fit
    assert size(kv_cache_memory_bytes=20 * MIB + 5).num_pages == 20
    assert size(gpu(), num_pages=5).reason == "set by num_pages"
    with pytest.raises(OutOfMemoryError, match="3 pages.*set by kv_cache_memory_bytes"):
        size(kv_cache_memory_bytes=3 * MIB)


# -- accelerators


def test_what_is_left_beside_weights_step_and_margin():
    size_ = size(gpu(bytes_limit=1000 * MIB, bytes_in_use=100 * MIB), weights_bytes=300 * MIB, temp=70 * MIB)
    assert size_.num_pages == 970 - 100 - 300 - 70
    for part in ("0.98 GiB less a margin of 3% and 0.10 GiB in use", "0.29 GiB of weights to come",
                 "0.07 GiB for the largest step"):
        assert part in size_.reason


def test_an_accelerator_that_is_full():
    with pytest.raises(OutOfMemoryError, match="even without a KV pool: device limit.*0.02 GiB too little"):
        size(gpu(bytes_limit=1000 * MIB, bytes_in_use=990 * MIB))


def test_a_pool_set_by_hand_is_compared_with_an_accelerator_s_memory():
    with pytest.raises(OutOfMemoryError, match="pool would take 0.98 GiB .*there are device limit"):
        size(gpu(bytes_limit=1000 * MIB), num_pages=1000)


def test_an_accelerator_without_statistics_wants_a_number():
    with pytest.raises(ConfigError, match="Fake GPU does not say.*num_pages"):
        size(gpu())


def test_no_step_is_compiled_for_a_pool_that_is_set():
    def compile_step() -> int:
        raise AssertionError("compiled")

    for options in ({"num_pages": 3}, {"kv_cache_memory_bytes": 3 * MIB}):
        size_pool(EngineConfig(**options), page_bytes=MIB, page_size=16, max_model_len=16, max_num_seqs=1,
                  device=gpu(bytes_limit=GIB), weights_bytes=0, slots_bytes=0, step_temp_bytes=compile_step)


# -- free RAM


@pytest.fixture
def system(tmp_path):
    """A Linux of files: 1000 MiB available, `group` sets a control group's limits."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable:   {1000 * 1024} kB\n")

    class System:
        def ram(self) -> int:
            return available_ram(proc, cgroups) // MIB

        def process_has(self, pages: int) -> None:
            (proc / "self/statm").write_text(f"{pages} 1 1 1 0 1 0\n")

        def process_is_in(self, group: str) -> None:
            (proc / "self/cgroup").write_text(f"1:name=systemd:/x\n0::{group}\n")

        def group(self, name: str, limit: str, used: int = 0, cached: int = 0) -> None:
            directory = cgroups / name.lstrip("/")
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "memory.max").write_text(f"{limit}\n")
            (directory / "memory.current").write_text(f"{used * MIB}\n")
            (directory / "memory.stat").write_text(f"anon 5\ninactive_file {cached * MIB}\nactive_file 7\n")

        def process_is_in_v1(self, group: str) -> None:
            (proc / "self/cgroup").write_text(f"5:devices:/else\n4:hugetlb,memory:{group}\n0::/\n")

        def group_v1(self, name: str, limit: int, used: int = 0, cached: int = 0) -> None:
            directory = cgroups / "memory" / name.lstrip("/")
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
            (directory / "memory.usage_in_bytes").write_text(f"{used * MIB}\n")
            (directory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cached * MIB}\n")

        def remove_meminfo(self) -> None:
            (proc / "meminfo").unlink()

    return System()


def test_without_control_groups_all_available_ram_counts(system):
    assert system.ram() == 1000


def test_a_container_s_limit_counts(system):
    system.process_is_in("/")
    system.group("/", str(600 * MIB), used=200)
    assert system.ram() == 400


def test_files_in_the_page_cache_are_not_used_up(system):
    """Reading 350 MiB of weights must not look like 350 MiB of memory gone."""
    system.process_is_in("/")
    system.group("/", str(600 * MIB), used=500, cached=350)
    assert system.ram() == 450


def test_the_tightest_of_the_groups_around_the_process_counts(system):
    system.process_is_in("/slice/job")
    system.group("/slice/job", "max")
    system.group("/slice", str(300 * MIB), used=100)
    system.group("/", "max")
    assert system.ram() == 200
    system.group("/slice/job", str(150 * MIB), used=20)
    assert system.ram() == 130


def test_groups_beside_the_process_do_not_count(system):
    system.process_is_in("/mine")
    system.group("/other", str(10 * MIB))
    assert system.ram() == 1000


def test_the_limits_of_version_1_count_as_well(system):
    system.process_is_in_v1("/slice/job")
    system.group_v1("/slice/job", 0x7FFFFFFFFFFFF000)  # what version 1 has for "no limit"
    assert system.ram() == 1000
    system.group_v1("/slice", 300 * MIB, used=200, cached=50)
    assert system.ram() == 150
    system.group_v1("/other", 10 * MIB)
    assert system.ram() == 150


def test_a_container_of_version_1_sees_its_group_as_the_root(system):
    system.process_is_in_v1("/docker/0123")  # the path outside, which does not exist inside
    system.group_v1("/", 600 * MIB, used=200)
    assert system.ram() == 400


def test_an_unlimited_group_and_one_above_its_limit(system):
    system.process_is_in("/")
    system.group("/", "max")
    assert system.ram() == 1000
    system.group("/", str(10 * MIB), used=11)
    assert system.ram() == 0


def test_systems_without_proc_give_half_of_all_ram(system, monkeypatch):
    system.remove_meminfo()
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 8 * GIB // 4096, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert system.ram() == 4096


def test_systems_that_say_nothing_are_taken_for_small_ones(system, monkeypatch):
    system.remove_meminfo()
    monkeypatch.delattr(os, "sysconf")
    assert system.ram() == 2048


def test_this_system_has_some():
    assert 0 < available_ram() < 1 << 50


def test_a_limit_of_the_address_space_counts(system, monkeypatch):
    """ulimit -v: blocks beyond it are refused, whatever RAM there is."""
    resource = pytest.importorskip("resource")
    system.process_has(100 * MIB // resource.getpagesize())
    monkeypatch.setattr(resource, "getrlimit", lambda which: (500 * MIB, 500 * MIB))
    assert system.ram() == 400
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert system.ram() == 1000


@pytest.mark.parametrize("error", [
    MemoryError("Unable to allocate 3.00 GiB for an array"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 GiB"),
    jax.errors.JaxRuntimeError("INTERNAL: std::bad_alloc")])
def test_running_out_of_memory_is_said_in_our_words(error):
    with (pytest.raises(OutOfMemoryError, match="memory ran out while loading the weights .*; lower max_num") as found,
          memory_errors("loading the weights")):
        raise error
    assert found.value.__cause__ is error


@pytest.mark.parametrize("error", [ValueError("x"), jax.errors.JaxRuntimeError("INTERNAL: x"), OutOfMemoryError("x")])
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as found, memory_errors("compiling"):
        raise error
    assert found.value is error
