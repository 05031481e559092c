"""The shape of a decoder, read from a Hugging Face config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_MODEL_TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in ARCHITECTURES}
_NUMBER = (float, int)


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling, named as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # tokens


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything static about a decoder; hashable, so it can be a static argument of jit."""

    vocab_size: int
    embed: int
    ffn: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    tied: bool  # the head is the embedding
    rms_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_positions: int  # tokens
    # How it is computed:
    dtype: Literal["float32", "bfloat16"] = "float32"  # activations and matmuls
    remat: bool = True  # recompute each layer in the backward pass
    logits_chunk: int = 1024  # rows of [rows, vocab] logits alive at once


def decoder_config_from_hf(hf_config: Mapping[str, Any]) -> DecoderConfig:
    """Read a decoder's shape from the contents of config.json.

    Raises ValueError, naming the key, for another architecture or a variant not implemented.
    """
    architecture = _architecture(hf_config)
    _refuse_variants(hf_config, architecture)
    heads = _need(hf_config, "num_attention_heads")
    embed = _need(hf_config, "hidden_size")
    theta, scaling = _rope(hf_config)
    config = DecoderConfig(
        vocab_size=_need(hf_config, "vocab_size"),
        embed=embed,
        ffn=_need(hf_config, "intermediate_size"),
        num_layers=_need(hf_config, "num_hidden_layers"),
        num_q_heads=heads,
        num_kv_heads=_need(hf_config, "num_key_value_heads", default=heads),
        head_dim=_need(hf_config, "head_dim", default=embed // heads),
        qkv_bias=architecture == "Qwen2ForCausalLM",  # always, in config.json or not
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied=_flag(hf_config, "tie_word_embeddings"),
        rms_eps=float(_need(hf_config, "rms_norm_eps", _NUMBER)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=_need(hf_config, "max_position_embeddings", default=2048),
    )
    if config.num_q_heads % config.num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"config.json: head_dim {config.head_dim} is odd; rotary halves need even")
    return config


def _flag(hf_config: Mapping[str, Any], key: str) -> bool:
    value = hf_config.get(key)
    if not isinstance(value, bool | None):
        raise ValueError(f"config.json: {key}: expected true or false, got {value!r}")
    return bool(value)


def _need(
    hf_config: Mapping[str, Any], key: str, kinds: tuple[type, ...] = (int,), default: Any = None
) -> Any:
    value = hf_config.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: {key} is missing")
    if type(value) not in kinds or not 0 < value < math.inf:
        raise ValueError(
            f"config.json: {key}: expected a positive {kinds[0].__name__}, got {value!r}"
        )
    return value


def _architecture(hf_config: Mapping[str, Any]) -> str:
    kind = hf_config.get("model_type")
    named = hf_config.get("architectures") or [_MODEL_TYPES.get(kind if type(kind) is str else "")]
    if not isinstance(named, list) or not all(isinstance(n, str | None) for n in named):
        raise ValueError(f"config.json: architectures: expected a list of names, got {named!r}")
    if named[0] not in ARCHITECTURES:
        found = named[0] or kind
        raise ValueError(
            f"config.json: architecture {found!r} is not one of {', '.join(ARCHITECTURES)}"
        )
    return named[0]


def _refuse_variants(hf_config: Mapping[str, Any], architecture: str) -> None:
    """Refuse settings that would silently compute another model."""
    if hf_config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {hf_config['hidden_act']!r} is not 'silu'")
    for key in ("use_sliding_window", "mlp_bias"):
        if _flag(hf_config, key):
            raise ValueError(f"config.json: {key} true is not supported")
    layers = hf_config.get("layer_types") or []
    if not isinstance(layers, list) or set(map(str, layers)) - {"full_attention"}:
        raise ValueError(f"config.json: layer_types {layers!r} has more than full_attention")
    if _flag(hf_config, "attention_bias") and architecture != "Qwen2ForCausalLM":
        raise ValueError("config.json: attention_bias true (a bias on o_proj) is not supported")


def _rope(hf_config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Read theta and scaling from the old keys or from transformers 5's rope_parameters."""
    parameters = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: rope_parameters: expected an object, got {parameters!r}")
    merged = {**hf_config, **parameters}
    if merged.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"config.json: partial_rotary_factor {merged['partial_rotary_factor']!r} is not 1"
        )
    theta = _need(merged, "rope_theta", _NUMBER, default=10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise ValueError(f"config.json: rope scaling {kind!r} is not one of default, llama3")
    scaling = Llama3RopeScaling(
        factor=float(_need(parameters, "factor", _NUMBER)),
        low_freq_factor=float(_need(parameters, "low_freq_factor", _NUMBER)),
        high_freq_factor=float(_need(parameters, "high_freq_factor", _NUMBER)),
        original_max_position_embeddings=_need(parameters, "original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError(
            f"config.json: low_freq_factor {scaling.low_freq_factor} is not below "
            f"high_freq_factor, {scaling.high_freq_factor}"
        )
    return float(theta), scaling
