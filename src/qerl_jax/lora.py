"""LoRA: what is trained, as a pytree apart from the frozen weights and never merged into them."""

import math
import typing
import zlib
from collections.abc import Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from qerl_jax.protocols import Params

BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")


@typing.no_type_check
@flax.struct.dataclass
class LoraAdapter:
    """Low-rank updates of projections: y = x W^T + scale (x A) B."""

    pairs: dict[str, dict[str, Array]]  # name -> {"a": [layers, k, rank], "b": [layers, rank, n]}
    scale: float = flax.struct.field(pytree_node=False)  # alpha / rank


@typing.no_type_check
@flax.struct.dataclass
class Trainable:
    """Everything the optimizer updates."""

    adapter: LoraAdapter
    norm_scales: dict[str, Float[Array, "layers embed"]] | None  # None: norms stay frozen


def lora_targets(params: Params) -> tuple[str, ...]:
    """List the projections of a model that can carry an adapter."""
    layers = params["layers"].items()
    return tuple(name for name, leaf in layers if isinstance(leaf, Mapping) and "weight" in leaf)


def check_lora(params: Params, *, targets: Sequence[str], rank: int) -> None:
    """Check an adapter against the shapes of a model; `params` may be abstract.

    Raises:
        ValueError: for an unknown, repeated or absent target, or a rank that does not fit.
    """
    known = lora_targets(params)
    if not targets:
        raise ValueError(f"lora.targets: is empty; choose from {', '.join(known)}")
    for name in targets:
        if name not in known:
            raise ValueError(f"lora.targets: {name!r} is not one of {', '.join(known)}")
        if list(targets).count(name) > 1:
            raise ValueError(f"lora.targets: {name!r} is listed twice")
    if rank < 1:
        raise ValueError(f"lora.rank: {rank} is less than 1")
    for name in targets:
        smaller = min(params["layers"][name]["weight"].shape[-2:])
        if rank > smaller:
            raise ValueError(f"lora.rank: {rank} exceeds {smaller}, the smaller side of {name}")


def init_lora(
    key: Key[Array, ""],
    params: Params,
    *,
    targets: Sequence[str],
    rank: int,
    alpha: float,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> LoraAdapter:
    """Draw an adapter that leaves the model as it is: A uniform, B zero.

    A ~ U(-1/sqrt(k), 1/sqrt(k)), PEFT's Kaiming-uniform with a = sqrt(5). The draw for a target
    depends on its name alone, not on the other targets.

    Raises:
        ValueError: if `targets` or `rank` do not fit the model.

    Reference: Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1.
    """
    check_lora(params, targets=targets, rank=rank)
    pairs = {}
    for name in targets:
        layers, n, k = params["layers"][name]["weight"].shape
        name_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        bound = 1 / math.sqrt(k)
        a = jax.random.uniform(name_key, (layers, k, rank), jnp.float32, -bound, bound)
        pairs[name] = {"a": a.astype(dtype), "b": jnp.zeros((layers, rank, n), dtype)}
    return LoraAdapter(pairs=pairs, scale=alpha / rank)


def lora_delta(
    x: Float[Array, "*batch k"], pair: Mapping[str, Array], *, scale: float
) -> Float[Array, "*batch n"]:
    """Compute the low-rank update of one layer, scale (x A) B, as float32.

    `pair` is {"a": [k, rank], "b": [rank, n]}. Its float32 masters are cast to the dtype of `x`
    for the products, which accumulate in float32.
    """
    # GPUs round float32 inputs to TF32 unless told not to.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide = {"precision": precision, "preferred_element_type": jnp.float32}
    a, b = pair["a"].astype(x.dtype), pair["b"].astype(x.dtype)
    hidden = jnp.einsum("...k,kr->...r", x, a, **wide).astype(x.dtype)
    return jnp.einsum("...r,rn->...n", hidden, b, **wide) * scale


def init_trainable(
    key: Key[Array, ""],
    params: Params,
    *,
    targets: Sequence[str],
    rank: int,
    alpha: float,
    train_norms: bool,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Trainable:
    """Draw an adapter and, with `train_norms`, start the block norm scales from the model's.

    Raises:
        ValueError: if `targets` or `rank` do not fit the model.
    """
    adapter = init_lora(key, params, targets=targets, rank=rank, alpha=alpha, dtype=dtype)
    if not train_norms:
        return Trainable(adapter=adapter, norm_scales=None)
    # Copies: the training step donates its state, and must not free the frozen weights with it.
    scales = {name: jnp.array(params["layers"][name], jnp.float32) for name in BLOCK_NORMS}
    return Trainable(adapter=adapter, norm_scales=scales)


def overlay_norms(params: Params, trainable: Trainable) -> Params:
    """Put the trained norm scales over the frozen ones; a new tree, `params` stay as they are."""
    if trainable.norm_scales is None:
        return params
    return {**params, "layers": {**params["layers"], **trainable.norm_scales}}
