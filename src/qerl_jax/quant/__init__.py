"""NVFP4 weights: the container, the quantizer, and which weights of a model it is applied to."""

from qerl_jax.quant.nvfp4 import (
    NvFp4Tensor,
    block_scales_of,
    check_weight,
    dequantize,
    encode,
    global_scale_from_amax,
    global_scale_of,
    quantize,
    validate,
    weight_amax,
)
from qerl_jax.quant.policy import FUSED_GROUPS, LINEAR_WEIGHTS, fused_group, quantize_params

__all__ = [
    "FUSED_GROUPS",
    "LINEAR_WEIGHTS",
    "NvFp4Tensor",
    "block_scales_of",
    "check_weight",
    "dequantize",
    "encode",
    "fused_group",
    "global_scale_from_amax",
    "global_scale_of",
    "quantize",
    "quantize_params",
    "validate",
    "weight_amax",
]
