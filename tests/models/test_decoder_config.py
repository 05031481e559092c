"""Reading config.json: both spellings of rope, and refusals of what would compute another model."""

import pytest

from qerl_jax.models import decoder_config_from_hf

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}


ONE_FACTOR = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def test_rope_is_read_from_old_and_new_keys():
    old = decoder_config_from_hf(BASE | {"rope_theta": 5e5})
    new = decoder_config_from_hf(
        BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    )
    assert old == new
    assert old.rope_theta == 5e5


def test_llama3_scaling_is_read_from_old_and_new_keys():
    numbers = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = BASE | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **numbers}}
    new = BASE | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **numbers}}
    assert decoder_config_from_hf(old) == decoder_config_from_hf(new)
    assert decoder_config_from_hf(old).rope_scaling.factor == 8.0


def test_architecture_decides_bias_and_norms():
    qwen2 = decoder_config_from_hf(BASE | {"architectures": ["Qwen2ForCausalLM"]})
    qwen3 = decoder_config_from_hf(BASE | {"architectures": ["Qwen3ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architecture 'MistralForCausalLM' is not"),
        ({"architectures": None, "model_type": "gemma"}, "architecture 'gemma' is not"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size: expected a positive int, got '64'"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a positive int, got 0"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: expected true or false, got 'fal"),
        ({"head_dim": 16.0}, "head_dim: expected a positive int, got 16.0"),
        ({"rms_norm_eps": True}, "rms_norm_eps: expected a positive float, got True"),
        ({"rope_theta": "1e4"}, "rope_theta: expected a positive float, got '1e4'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a positive float, got nan"),
        ({"architectures": 5}, "architectures: expected a list of names, got 5"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list of names, got"),
        ({"rope_parameters": "x"}, "rope_parameters: expected an object, got 'x'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not 1"),
        ({"layer_types": ["sliding_attention"]}, "layer_types .* has more than full_attention"),
        ({"rope_scaling": ONE_FACTOR}, "low_freq_factor 1.0 is not below high_freq_factor, 1.0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window true is not supported"),
        ({"mlp_bias": True}, "mlp_bias true is not supported"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
    ],
)
def test_refusals_name_the_key(change, message):
    with pytest.raises(ValueError, match=f"^config.json: {message}"):
        decoder_config_from_hf(BASE | change)
