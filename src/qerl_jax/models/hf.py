"""Hugging Face folder -> parameters: dense, quantized on the way in, or already NVFP4."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.format import BLOCK_SIZE
from qerl_jax.hf_files import CONFIG_FILE, TensorEntry, find_tensors, read_config, read_tensor
from qerl_jax.models.config import DecoderConfig
from qerl_jax.models.hf_keys import (
    EMBEDDING,
    LM_HEAD,
    NVFP4_FORMAT,
    Part,
    Slot,
    check_entries,
    check_input_size,
    is_linear_weight,
    key_table,
)
from qerl_jax.models.hf_save import save_dense, save_nvfp4
from qerl_jax.protocols import Params
from qerl_jax.quant.nvfp4 import NvFp4Tensor, global_scale_from_amax, validate, weight_amax
from qerl_jax.quant.nvfp4 import quantize as quantize_weight
from qerl_jax.quant.policy import FUSED_GROUPS
from qerl_jax.tree import unflatten_weights

__all__ = ["find_params", "load_params", "read_config", "save_dense", "save_nvfp4"]

# Tensors of one parameter, by part, in layer order.
_Sources = dict[Part, list[TensorEntry]]


def load_params(
    folder: str | os.PathLike,
    config: DecoderConfig,
    *,
    quantize: bool,
    round_to: jax.typing.DTypeLike = jnp.float32,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> Params:
    """Load the weights of a model folder, one tensor at a time.

    With `quantize`, projections become NVFP4 as they are read, with the arithmetic of `round_to`
    (see quant/nvfp4.py) and one global scale a layer over q/k/v and over gate/up: memory holds
    the packed model and one tensor, never the 16-bit model. Embedding, head and, without
    `quantize`, projections are cast to `dtype`; norm scales and biases to float32.

    A compressed-tensors checkpoint in the NVFP4 format loads as it is, bit for bit, whatever
    `quantize` says: there are no 16-bit weights to give.

    Raises:
        ValueError: if a file is damaged; a tensor unknown, missing, stored twice, of another
            shape or not finite; an input size not a multiple of 16; or the checkpoint is
            quantized in another format. The message names the file and the tensor.
    """
    sources = find_params(folder, config, quantize=quantize)
    scales = {}
    if quantize and not _is_nvfp4(Path(folder)):
        scales = _shared_scales(sources, round_to)
    load = partial(_load, quantize_to=round_to if quantize else None, dtype=dtype, scales=scales)
    return unflatten_weights({path: load(path, source) for path, source in sources.items()})


def find_params(
    folder: str | os.PathLike, config: DecoderConfig, *, quantize: bool
) -> dict[str, _Sources]:
    """Find the tensors of each parameter and check all that file headers tell of them.

    Raises:
        ValueError: as `load_params`, but for the values.
    """
    folder = Path(folder)
    nvfp4 = _is_nvfp4(folder)
    table = key_table(config, nvfp4=nvfp4)
    entries = find_tensors(folder)
    check_entries(folder, entries, table, tied=config.tied)
    if config.tied and LM_HEAD in entries:
        _check_tied(entries)
    sources = _group(entries, table)
    if quantize and not nvfp4:
        for path in filter(is_linear_weight, sources):
            first = sources[path]["array"][0]
            check_input_size(first.place, first.shape[-1])
    return sources


def _is_nvfp4(folder: Path) -> bool:
    """Tell an NVFP4 checkpoint from a 16-bit one; refuse any other quantization by its name."""
    settings = read_config(folder).get("quantization_config")
    if settings is None:
        return False
    if not isinstance(settings, dict):
        raise ValueError(f"{folder / CONFIG_FILE}: quantization_config is no object")
    method = settings.get("quant_method")
    kind = settings.get("format") if method == "compressed-tensors" else None
    if kind == NVFP4_FORMAT:
        return True
    found = f"{method} ({kind})" if kind else method
    raise ValueError(
        f"{folder / CONFIG_FILE}: quantization_config: {found} is not supported; only "
        f"compressed-tensors ({NVFP4_FORMAT}) is"
    )


def _check_tied(entries: Mapping[str, TensorEntry]) -> None:
    head, table = entries[LM_HEAD], entries[EMBEDDING]
    if head.shape != table.shape or not np.array_equal(read_tensor(head), read_tensor(table)):
        raise ValueError(
            f"{head.place}: differs from {EMBEDDING}, so the model is not tied: "
            "tie_word_embeddings in config.json has to be false"
        )


def _group(entries: Mapping[str, TensorEntry], table: Mapping[str, Slot]) -> dict[str, _Sources]:
    grouped: dict[str, _Sources] = {}
    for key, slot in table.items():
        grouped.setdefault(slot.path, {}).setdefault(slot.part, []).append(entries[key])
    return grouped


def _load(
    path: str,
    source: _Sources,
    *,
    quantize_to: jax.typing.DTypeLike | None,
    dtype: jax.typing.DTypeLike,
    scales: Mapping[str, Float[Array, " layers"]],
) -> Array | NvFp4Tensor:
    """Load one parameter of the tree."""
    if "packed" in source:
        return _load_nvfp4(path, source)
    entries = source["array"]
    if not path.startswith("layers/"):
        wide = jnp.float32 if path == "norm" else dtype
        return _read_finite(entries[0], wide)
    if not is_linear_weight(path):
        return _stack(entries, jnp.float32)
    if quantize_to is None:
        return _stack(entries, dtype)
    return _quantize_stack(entries, scales.get(path), quantize_to)


def _read_finite(entry: TensorEntry, dtype: jax.typing.DTypeLike | None = None) -> Array:
    """Read a tensor onto the device, refusing NaN, infinity and what is infinite in `dtype`."""
    stored = read_tensor(entry)
    array = jnp.asarray(stored, dtype)
    if array.dtype.itemsize > 1 and not _all_finite(array):
        beyond = f"numbers beyond {array.dtype}" if _all_finite(stored) else "NaN or infinity"
        raise ValueError(f"{entry.place}: holds {beyond}")
    return array


_amax = jax.jit(weight_amax)


@jax.jit
def _all_finite(array: Float[Array, "..."]) -> Bool[Array, ""]:
    return jnp.isfinite(array).all()  # one fused loop: an embedding is too large for copies


@partial(jax.jit, donate_argnums=0)
def _put(stack: Array, layer: Int[Array, ""] | int, value: Array) -> Array:
    """Write one layer in place."""
    return stack.at[layer].set(value.astype(stack.dtype))


def _stack(entries: Sequence[TensorEntry], dtype: jax.typing.DTypeLike) -> Array:
    """Read one tensor a layer into an array [layers, ...]."""
    stack = jnp.zeros((len(entries), *entries[0].shape), dtype)
    for layer, entry in enumerate(entries):
        # Waiting keeps the host from reading tensors faster than they are written.
        stack = jax.block_until_ready(_put(stack, layer, _read_finite(entry, dtype)))
    return stack


def _load_nvfp4(path: str, source: _Sources) -> NvFp4Tensor:
    tensor = NvFp4Tensor(
        packed=_stack(source["packed"], jnp.uint8),
        block_scales=_stack(source["block_scales"], jnp.float8_e4m3fn),
        global_scale=_stack(source["global_scale"], jnp.float32)[:, 0],
    )
    validate(tensor, f"{source['packed'][0].path}: {path}")
    return tensor


def _shared_scales(
    sources: Mapping[str, _Sources], round_to: jax.typing.DTypeLike
) -> dict[str, Float[Array, " layers"]]:
    """Compute the global scale of each layer of the fused groups, from a first pass over them."""
    shared = {}
    for group in FUSED_GROUPS:
        paths = [f"layers/{name}/weight" for name in group]
        layers = zip(*(sources[path]["array"] for path in paths), strict=True)
        largest = [max(_amax(_read_finite(entry)) for entry in layer) for layer in layers]
        scales = global_scale_from_amax(jnp.stack(largest), round_to=round_to)
        shared |= dict.fromkeys(paths, scales)
    return shared


def _quantize_stack(
    entries: Sequence[TensorEntry],
    scales: Float[Array, " layers"] | None,
    round_to: jax.typing.DTypeLike,
) -> NvFp4Tensor:
    """Quantize one tensor a layer into a stack; without `scales`, each by its own."""
    n, k = entries[0].shape
    layers = len(entries)
    stack = NvFp4Tensor(
        packed=jnp.zeros((layers, n, k // 2), jnp.uint8),
        block_scales=jnp.zeros((layers, n, k // BLOCK_SIZE), jnp.float8_e4m3fn),
        global_scale=jnp.zeros(layers, jnp.float32),
    )
    for layer, entry in enumerate(entries):
        weight = _read_finite(entry)
        if scales is None:
            scale = global_scale_from_amax(_amax(weight), round_to=round_to)
        else:
            scale = scales[layer]
        stack = jax.block_until_ready(_quantize_into(stack, layer, weight, scale, round_to))
    return stack


@partial(jax.jit, donate_argnums=0, static_argnums=4)
def _quantize_into(
    stack: NvFp4Tensor,
    layer: Int[Array, ""] | int,
    weight: Float[Array, "n k"],
    scale: Float[Array, ""],
    round_to: jax.typing.DTypeLike,
) -> NvFp4Tensor:
    """Quantize a weight and write it to one layer of the stack, in place."""
    quantized = quantize_weight(weight, global_scale=scale, round_to=round_to)
    return jax.tree.map(lambda whole, part: whole.at[layer].set(part), stack, quantized)
