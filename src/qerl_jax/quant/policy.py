"""Which weights of a model become NVFP4, and which of them share a global scale."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from qerl_jax import tree
from qerl_jax.protocols import Params
from qerl_jax.quant.nvfp4 import (
    NvFp4Tensor,
    check_weight,
    global_scale_from_amax,
    quantize,
    weight_amax,
)

# Inference servers fuse these and then keep one global scale for all of a group.
FUSED_GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)
LINEAR_WEIGHTS: tuple[str, ...] = tuple(
    f"layers/{module}/weight"
    for module in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)


def quantize_params(
    params: Params,
    *,
    include: Sequence[str] = LINEAR_WEIGHTS,
    round_to: DTypeLike = jnp.float32,
) -> dict[str, Any]:
    """Return the parameters with the chosen weights in NVFP4; all others are the same objects.

    The weights of a fused group share one global scale in each layer, that of their largest
    amax. Weights that are NVFP4 already stay as they are.

    Raises:
        ValueError: a pattern fits no weight, an input size is not a multiple of 16, or a weight
            is not finite; the message names it.
    """
    weights = tree.flatten_weights(params)
    chosen = [
        name for name in tree.select(params, include) if not isinstance(weights[name], NvFp4Tensor)
    ]
    for name in chosen:
        check_weight(weights[name], name)
    amaxes: dict[tuple[str, ...], Any] = {}
    for name in chosen:
        amax, group = weight_amax(weights[name]), fused_group(name)
        amaxes[group] = jnp.maximum(amaxes[group], amax) if group in amaxes else amax
    scales = {
        group: global_scale_from_amax(amax, round_to=round_to) for group, amax in amaxes.items()
    }
    for name in chosen:
        scale = scales[fused_group(name)]
        weights[name] = quantize(weights[name], global_scale=scale, round_to=round_to)
    return tree.unflatten_weights(weights)


def fused_group(name: str) -> tuple[str, ...]:
    """Return the names that share a global scale with a weight, itself among them.

    >>> fused_group("layers/up_proj/weight")
    ('layers/gate_proj/weight', 'layers/up_proj/weight')
    """
    *path, module, leaf = name.split("/")
    for group in FUSED_GROUPS:
        if module in group:
            return tuple("/".join((*path, member, leaf)) for member in group)
    return (name,)
