"""GGUF models: every family and quantisation against the Hugging Face tensors they came from."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.registry import ignorable, name_map, resolve
from jaxserve.weights.gguf import open_gguf
from jaxserve.weights.gguf_file import read_gguf_file
from jaxserve.weights.load import check_tensors
from tests.models.checkpoints import random_checkpoint
from tests.weights.tiny import FAMILIES, LLAMA, add_value, finish, write_gguf


@pytest.mark.parametrize("family", FAMILIES)
def test_config_and_tensors_equal_the_hugging_face_checkpoint(family, tmp_path):
    config = FAMILIES[family]
    tensors = random_checkpoint(config)
    model = open_gguf(write_gguf(tmp_path / "m.gguf", config, tensors))
    spec = resolve(model.config, None)
    assert spec == resolve(config, None)
    check_tensors(spec, name_map(model.config, spec), model.tensors, ignorable)
    for name, tensor in tensors.items():
        read = model.tensors[name].read()
        if family == "gemma2" and name.endswith("norm.weight"):  # the file holds them with 1 added, in float32
            np.testing.assert_allclose(read, tensor, atol=1.2e-7)
        else:
            np.testing.assert_array_equal(read, tensor)
    assert model.generation_config == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("qtype", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1], ids=lambda q: q.name)
def test_matrices_of_each_type_equal_their_dequantised_values(qtype, tmp_path):
    tensors = random_checkpoint(LLAMA)
    model = open_gguf(write_gguf(tmp_path / "m.gguf", LLAMA, tensors, qtype))
    for name, tensor in tensors.items():
        read = model.tensors[name].read()
        assert read.dtype == model.tensors[name].dtype and read.shape == tensor.shape
        if tensor.ndim == 2:
            # Quantisation is by row, so what was done to whole rows (the order of q and k) does not matter to it.
            tensor = gguf.quants.dequantize(gguf.quants.quantize(tensor, qtype), qtype)
        np.testing.assert_array_equal(read.astype(np.float32), tensor)
    assert model.dtype == {Q.F32: "float32", Q.F16: "float16", Q.BF16: "bfloat16"}.get(qtype)


# The formats of the K-quants as ggml describes them (block_q4_K and so on), value by value.

def half(data: bytes) -> np.float32:
    return np.frombuffer(data, "<f2")[0].astype(np.float32)


def scale_and_min(packed: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4


def q4_k(block: bytes) -> list[np.float32]:
    d, dmin, scales, qs = half(block[:2]), half(block[2:4]), block[4:16], block[16:144]
    values = []
    for j in range(8):
        scale, low = scale_and_min(scales, j)
        chunk = qs[j // 2 * 32:j // 2 * 32 + 32]
        for q in chunk:
            four_bits = q >> 4 if j % 2 else q & 15
            values.append(d * np.float32(scale) * np.float32(four_bits) - dmin * np.float32(low))
    return values


def q5_k(block: bytes) -> list[np.float32]:
    d, dmin, scales, high, qs = half(block[:2]), half(block[2:4]), block[4:16], block[16:48], block[48:176]
    values = []
    for j in range(8):
        scale, low = scale_and_min(scales, j)
        for i, q in enumerate(qs[j // 2 * 32:j // 2 * 32 + 32]):
            five_bits = (q >> 4 if j % 2 else q & 15) + 16 * (high[i] >> j & 1)
            values.append(d * np.float32(scale) * np.float32(five_bits) - dmin * np.float32(low))
    return values


def q6_k(block: bytes) -> list[np.float32]:
    low, high, scales, d = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8), half(block[208:])
    values = []
    for i in range(256):
        part, place = divmod(i, 128)     # 128 values at a time
        row, column = divmod(place, 32)  # four rows of 32
        nibbles = low[64 * part + 32 * (row % 2) + column]
        top = high[32 * part + column] >> 2 * row & 3
        q = (nibbles >> 4 if row >= 2 else nibbles & 15) + 16 * top - 32
        values.append(d * np.float32(scales[i // 16]) * np.float32(q))
    return values


@pytest.mark.parametrize(("qtype", "reference"), [(Q.Q4_K, q4_k), (Q.Q5_K, q5_k), (Q.Q6_K, q6_k)],
                         ids=["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_equal_the_description_of_the_format(qtype, reference, tmp_path):
    rows, blocks = 3, 2
    block_bytes = GGML_QUANT_SIZES[qtype][1]
    data = np.random.default_rng(0).integers(0, 256, (rows, blocks * block_bytes), np.uint8)
    for block in data.reshape(-1, block_bytes):  # plausible scales: random bits would include inf and nan
        for at in ((208,) if qtype == Q.Q6_K else (0, 2)):
            block[at:at + 2] = np.frombuffer(np.float16(0.01 + block[at] / 1000).tobytes(), np.uint8)
    path = write_gguf(tmp_path / "m.gguf", LLAMA, {})
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in read_gguf_file(path).metadata.items():
        if key.startswith("llama."):
            add_value(writer, key, value)
    writer.add_tensor("token_embd.weight", data, raw_dtype=qtype)
    finish(writer)
    tensor = open_gguf(path).tensors["model.embed_tokens.weight"]
    assert tensor.shape == (rows, 256 * blocks)
    expected = [value for block in data.reshape(-1, block_bytes) for value in reference(block.tobytes())]
    np.testing.assert_allclose(tensor.read().reshape(-1), expected, rtol=1e-6, atol=1e-7)


def test_unsupported_quantisation_names_type_and_tensor(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 84), np.uint8), raw_dtype=Q.Q2_K)
    finish(writer)
    with pytest.raises(UnsupportedModelError, match="tensor blk.0.attn_q.weight is quantised as Q2_K; supported: F32"):
        open_gguf(path)


def test_unsupported_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    finish(writer)
    with pytest.raises(UnsupportedModelError, match="architecture 'mamba'; supported in GGUF: llama"):
        open_gguf(tmp_path / "m.gguf")


def test_mixture_of_experts_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_checkpoint(LLAMA), metadata={"llama.expert_count": 8})
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        open_gguf(path)


def test_unknown_tensors_reach_the_loader_under_their_own_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_checkpoint(LLAMA),
                      extra_tensors={"blk.0.attn_sinks.weight": np.zeros(3, np.float32)})
    assert "blk.0.attn_sinks.weight" in open_gguf(path).tensors


def test_a_file_without_output_matrix_has_tied_embeddings(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    model = open_gguf(write_gguf(tmp_path / "m.gguf", config, random_checkpoint(config)))
    assert model.config["tie_word_embeddings"] is True


def test_llama3_rope_factors_divide_the_frequencies(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_checkpoint(LLAMA),
                      extra_tensors={"rope_freqs.weight": factors})
    plain = resolve(LLAMA, None).rope
    scaled = resolve(open_gguf(path).config, None).rope
    np.testing.assert_allclose(scaled.inv_freq, np.asarray(plain.inv_freq, np.float32) / factors, rtol=1e-6)
    assert scaled.attention_factor == 1.0


@pytest.mark.parametrize(("metadata", "scaling"), [
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
      "llama.rope.scaling.original_context_length": 32},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
    ({"llama.rope.scaling.type": "none"}, None),
])
def test_rope_scaling_from_metadata(metadata, scaling, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_checkpoint(LLAMA), metadata=metadata)
    assert open_gguf(path).config.get("rope_scaling") == scaling


def test_phi3_long_and_short_factors(tmp_path):
    config = FAMILIES["phi3"]
    short, long = np.full(8, 1.5, np.float32), np.full(8, 4.0, np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", config, random_checkpoint(config),
        metadata={"phi3.rope.scaling.original_context_length": 32, "phi3.rope.scaling.attn_factor": 1.25},
        extra_tensors={"rope_factors_short.weight": short, "rope_factors_long.weight": long})
    loaded = open_gguf(path).config
    base = np.asarray(resolve(config, None).rope.inv_freq)
    for max_model_len, factor in ((32, 1.5), (128, 4.0)):
        rope = resolve(loaded, max_model_len).rope
        np.testing.assert_allclose(rope.inv_freq, base / factor, rtol=1e-6)
        assert rope.attention_factor == 1.25


def test_unknown_rope_scaling_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_checkpoint(LLAMA),
                      metadata={"llama.rope.scaling.type": "spiral"})
    with pytest.raises(UnsupportedModelError, match="rope scaling 'spiral'"):
        open_gguf(path)


def test_float32_metadata_gives_back_the_decimal_it_came_from(tmp_path):
    model = open_gguf(write_gguf(tmp_path / "m.gguf", LLAMA, random_checkpoint(LLAMA)))
    assert model.config["rms_norm_eps"] == 1e-5 and model.config["rope_theta"] == 100000.0


def test_end_of_turn_tokens_end_a_generation(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_checkpoint(LLAMA),
                      metadata={"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2})
    assert open_gguf(path).generation_config["eos_token_id"] == [2, 5]


def split_gguf(directory, count):
    tensors = random_checkpoint(LLAMA)
    whole = read_gguf_file(write_gguf(directory / "whole.gguf", LLAMA, tensors))
    names = list(whole.tensors)
    for i in range(count):
        writer = gguf.GGUFWriter(directory / f"m-{i + 1:05d}-of-{count:05d}.gguf", "llama")
        if i == 0:
            for key, value in whole.metadata.items():
                if key.startswith("llama."):
                    add_value(writer, key, value)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        for name in names[i::count]:
            t = whole.tensors[name]
            writer.add_tensor(name, t.read_bytes().view(np.float32).reshape(t.shape))
        finish(writer)
    return tensors


def test_a_model_split_over_files_reads_as_one(tmp_path):
    """Whichever part is given."""
    tensors = split_gguf(tmp_path, 3)
    file = read_gguf_file(tmp_path / "m-00002-of-00003.gguf")
    assert file.metadata["llama.block_count"] == 2
    model = open_gguf(tmp_path / "m-00001-of-00003.gguf")
    assert model.tensors.keys() == tensors.keys() and len(file.tensors) == len(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(model.tensors[name].read(), tensor)


def test_an_absent_part_is_named(tmp_path):
    split_gguf(tmp_path, 3)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match="split into 3 parts; absent: m-00002-of-00003.gguf"):
        open_gguf(tmp_path / "m-00001-of-00003.gguf")


def test_a_part_under_another_name_is_explained(tmp_path):
    split_gguf(tmp_path, 2)
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="one of 2 parts"):
        open_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(("content", "error", "message"), [
    (b"", CheckpointError, "not a GGUF file"),
    (b"GGUF", CheckpointError, "not a GGUF file"),
    (b"PK\3\4" + b"\0" * 40, CheckpointError, "not a GGUF file"),
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), UnsupportedModelError, "version 1"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModelError, "big endian"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), CheckpointError, "its header needs"),
    (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), CheckpointError, "its header needs"),
    (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), CheckpointError, "does not fit"),
    (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**60), CheckpointError, "its header needs"),
    (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 77), CheckpointError, "unknown type 77"),
])
def test_damaged_headers(content, error, message, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(error, match=message):
        open_gguf(tmp_path / "m.gguf")


def test_truncated_data_is_found_before_loading(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_checkpoint(LLAMA))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="is truncated: tensor"):
        open_gguf(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(at=st.integers(0, 2400), byte=st.integers(0, 255))
def test_damage_gives_a_checkpoint_error_or_a_model(tmp_path, at, byte):
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_gguf(path, LLAMA, {"model.embed_tokens.weight": np.zeros((70, 64), np.float32)},
                   metadata={"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1, 2]})
    data = bytearray(path.read_bytes())
    if at < len(data):
        data[at] = byte
    (tmp_path / "damaged.gguf").write_bytes(data)
    try:
        model = open_gguf(tmp_path / "damaged.gguf")
    except CheckpointError:
        return
    for tensor in model.tensors.values():
        tensor.read()
