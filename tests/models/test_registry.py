"""From a config.json to a spec and a name map."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models import registry
from tests.models.golden_cases import CASES, gemma2, llama, mistral, phi3, qwen2, qwen3, smollm3

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("name", CASES)
def test_name_map_has_exactly_the_tensors_of_transformers(name):
    config = CASES[name].config
    names = registry.name_map(config, registry.resolve(config, None))
    want = {key: tuple(shape) for key, shape in json.loads((GOLDEN / "model_tensors.json").read_text())[name].items()}
    assert {key: placements[0].shape for key, placements in names.items()} == want


def test_every_family_has_a_golden_model():
    assert {case.config["architectures"][0] for case in CASES.values()} == {
        family.architecture for family in registry.FAMILIES}


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedModelError, match="FooForCausalLM is not supported.*LlamaForCausalLM.*Phi3ForCaus"):
        registry.resolve({**llama(), "architectures": ["FooForCausalLM"]}, None)
    with pytest.raises(UnsupportedModelError, match="model_type foo is not supported"):
        registry.resolve({"model_type": "foo"}, None)
    with pytest.raises(CheckpointError, match="architectures is missing"):
        registry.resolve({"hidden_size": 4}, None)


def test_the_model_type_stands_in_for_a_missing_architecture():
    config = qwen3()
    del config["architectures"]
    assert registry.resolve(config, None) == registry.resolve(qwen3(), None)


def test_quantized_checkpoints_are_refused():
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        registry.resolve(llama(quantization_config={"quant_method": "gptq"}), None)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                                 "vocab_size", "max_position_embeddings", "rms_norm_eps", "num_key_value_heads"])
def test_a_missing_key_is_named(key):
    config = mistral()
    del config[key]
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        registry.resolve(config, None)


@pytest.mark.parametrize("changes, message", [
    ({"num_attention_heads": 5}, r"num_attention_heads \(5\) must be a multiple of num_key_value_heads \(2\)"),
    ({"hidden_size": "48"}, "hidden_size must be a positive integer, got '48'"),
    ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers must be at most 10000, got 1000000"),
    ({"rms_norm_eps": 1e300}, "rms_norm_eps must be from .* as float32 has them, got 1e.300"),
    ({"hidden_act": ["silu"]}, r"hidden_act must be a text, got \['silu'\]"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of texts, got 'LlamaForCausalLM'"),
    ({"architectures": [None]}, r"architectures must be a list of texts, got \[None\]"),
    ({"partial_rotary_factor": float("inf")}, "partial_rotary_factor must be from .* got inf"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type must be a text, got \['yarn'\]"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1}, "frequencies that are not numbers"),
])
def test_malformed_values_are_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        registry.resolve(llama(**changes), None)


ODD_VALUES = [None, True, -1, 0, 1, 1.5, 10**30, 10**400, float("inf"), float("nan"), 1e-300, "", "x", [], [None],
              ["a"], [[1]], {}, {"a": 1}, {"rope_type": "yarn"}]
ROPE_KEYS = ["rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
             "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", "short_factor",
             "long_factor", "rope_theta", "partial_rotary_factor"]
OPTIONAL_KEYS = ["head_dim", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers",
                 "no_rope_layers", "no_rope_layer_interval", "rope_scaling", "rope_parameters", "attention_bias",
                 "mlp_bias", "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping"]


@pytest.mark.parametrize("family", [llama, mistral, smollm3, qwen2, qwen3, gemma2, phi3])
def test_whatever_one_entry_holds_the_config_is_read_or_refused(family):
    config = family()
    scaling = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    changes = [{key: value} for key in [*config, *OPTIONAL_KEYS, *ROPE_KEYS] for value in ODD_VALUES]
    changes += [{"rope_scaling": {"rope_type": kind, **scaling, key: value}}
                for kind in ("linear", "dynamic", "llama3", "yarn", "longrope") for key in ROPE_KEYS
                for value in ODD_VALUES]
    refused = 0
    for change in changes:
        try:
            registry.resolve(config | change, None)
        except CheckpointError:
            refused += 1
    assert 0 < refused < len(changes)


def test_unknown_activations_and_odd_heads_are_refused():
    with pytest.raises(UnsupportedModelError, match="activation 'relu2'"):
        registry.resolve(llama(hidden_act="relu2"), None)
    with pytest.raises(UnsupportedModelError, match="in pairs"):
        registry.resolve(llama(head_dim=13), None)


def test_absent_values_default_as_in_the_familys_config_class():
    def without(config, *keys):
        return registry.resolve({key: value for key, value in config.items() if key not in keys}, None)

    assert without(llama(), "num_key_value_heads").num_kv_heads == 4
    assert registry.resolve(mistral(num_key_value_heads=None), None).num_kv_heads == 4
    assert without(llama()).head_dim == 12
    assert without(qwen3(), "head_dim").head_dim == 128
    assert without(gemma2(), "head_dim").head_dim == 256
    assert not without(llama(), "tie_word_embeddings").tie_embeddings
    assert without(gemma2(), "tie_word_embeddings").tie_embeddings
    assert without(smollm3(), "tie_word_embeddings").tie_embeddings
    assert without(gemma2()).attn_softcap == 50.0 and without(gemma2()).final_softcap == 30.0
    assert without(gemma2()).attn_scale == 256 ** -0.5


@pytest.mark.parametrize("config, windows", [
    (llama(), [None, None]),
    (mistral(), [4096, 4096]),
    (mistral(sliding_window=None), [None, None]),
    (mistral(sliding_window=9), [9, 9]),
    (phi3(), [None, None]),
    (phi3(sliding_window=2047), [2047, 2047]),
    (qwen2(sliding_window=9, max_window_layers=1), [None, None]),  # use_sliding_window is off by default
    (qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=1), [None, 9]),
    (qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=0), [9, 9]),
    (qwen2(use_sliding_window=True, sliding_window=9), [None, None]),  # max_window_layers is 28
    (qwen3(use_sliding_window=True, sliding_window=9, layer_types=["sliding_attention", "full_attention"]), [9, None]),
    (gemma2(), [4096, None]),
    (gemma2(sliding_window=9, layer_types=["full_attention", "full_attention"]), [None, None]),
    (smollm3(use_sliding_window=True, sliding_window=9), [None, None, None, 9]),  # layers without rope slide
    (smollm3(sliding_window=9), [None] * 4),
])
def test_windows(config, windows):
    assert list(registry.resolve(config, None).layer_windows) == windows


@pytest.mark.parametrize("config, error, message", [
    (qwen2(layer_types=["full_attention"]), CheckpointError, "1 entries for 2 layers"),
    (qwen2(layer_types=["full_attention", "chunked_attention"]), UnsupportedModelError, "chunked_attention"),
    (qwen2(layer_types=["full_attention", "sliding_attention"]), CheckpointError, "sliding_window is not set"),
    (gemma2(use_bidirectional_attention=True), UnsupportedModelError, "causal"),
])
def test_odd_attention_layers_are_refused(config, error, message):
    with pytest.raises(error, match=message):
        registry.resolve(config, None)


def test_smollm3_leaves_rope_out_of_every_fourth_layer_or_as_listed():
    assert registry.resolve(smollm3(), None).layer_uses_rope == (True, True, True, False)
    assert registry.resolve(smollm3(no_rope_layer_interval=2), None).layer_uses_rope == (True, False, True, False)
    assert registry.resolve(smollm3(no_rope_layers=[0, 1, 1, 1]), None).layer_uses_rope == (False, True, True, True)
    with pytest.raises(CheckpointError, match="no_rope_layers"):
        registry.resolve(smollm3(no_rope_layers=[1]), None)


def test_only_repeated_or_derived_tensors_may_be_ignored():
    tied, untied = (registry.resolve(llama(tie_word_embeddings=tie), None) for tie in (True, False))
    assert registry.ignorable("lm_head.weight", tied) and not registry.ignorable("lm_head.weight", untied)
    assert registry.ignorable("model.layers.0.self_attn.rotary_emb.inv_freq", untied)
    assert not registry.ignorable("model.layers.0.self_attn.q_proj.bias", untied)


def test_models_import_neither_torch_nor_transformers():
    code = ("import sys, jaxserve.models.decoder, jaxserve.models.registry\n"
            "print(sorted({'torch', 'transformers'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]"
