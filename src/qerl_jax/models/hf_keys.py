"""The one table between the tensors of a Hugging Face checkpoint and the parameter tree."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kernels_pallas.format import BLOCK_SIZE
from qerl_jax.hf_files import BLOCK_NORM_MODULES, LINEAR_MODULES, TensorEntry
from qerl_jax.models.config import DecoderConfig
from qerl_jax.models.init import abstract_params
from qerl_jax.tree import flatten_weights

NVFP4_FORMAT = "nvfp4-pack-quantized"  # compressed-tensors's name
LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_MODULES = {
    **LINEAR_MODULES,
    **BLOCK_NORM_MODULES,
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
_TOP = {"embed_tokens": EMBEDDING, "norm": "model.norm.weight", "lm_head": LM_HEAD}
# Written by old exporters or for 4-bit activations; the model is whole without them.
_IGNORED = (".rotary_emb.inv_freq", ".input_global_scale")

Part = Literal["array", "packed", "block_scales", "global_scale"]
_PART_DTYPES: dict[Part, tuple[str, ...]] = {
    "array": ("bfloat16", "float16", "float32"),
    "packed": ("uint8",),
    "block_scales": ("float8_e4m3fn",),
    "global_scale": ("float32",),
}


@dataclass(frozen=True)
class Slot:
    """Where one tensor of a checkpoint belongs."""

    path: str  # "layers/q_proj/weight"
    layer: int | None  # index in the stack; None: not stacked
    part: Part  # of an NVFP4 weight; "array": the tensor is the weight
    shape: tuple[int, ...]  # in the checkpoint


def is_linear_weight(path: str) -> bool:
    """Tell whether a parameter is the weight of a projection, which NVFP4 applies to."""
    return path.startswith("layers/") and path.endswith("/weight")


def key_table(config: DecoderConfig, *, nvfp4: bool) -> dict[str, Slot]:
    """List every tensor of a checkpoint of this decoder, key -> slot, layers in order.

    With `nvfp4`, projections are stored as compressed-tensors does, in three tensors each.

    Raises:
        ValueError: if `nvfp4` and the input size of a projection is not a multiple of 16.
    """
    table = {}
    for path, leaf in flatten_weights(abstract_params(config)).items():
        if not path.startswith("layers/"):
            table[_TOP[path]] = Slot(path, None, "array", tuple(leaf.shape))
            continue
        for layer in range(leaf.shape[0]):
            key = _layer_key(path, layer)
            shape = tuple(leaf.shape[1:])
            if nvfp4 and is_linear_weight(path):
                table |= _nvfp4_slots(key, path, layer, shape)
            else:
                table[key] = Slot(path, layer, "array", shape)
    return table


def check_input_size(place: str, k: int) -> None:
    """Refuse a weight that does not divide into blocks."""
    if k % BLOCK_SIZE:
        raise ValueError(f"{place}: input size {k} is not a multiple of {BLOCK_SIZE}")


def check_entries(
    folder: Path, entries: Mapping[str, TensorEntry], table: Mapping[str, Slot], *, tied: bool
) -> None:
    """Check that a checkpoint holds exactly the tensors of the table, in their shapes and dtypes.

    Raises:
        ValueError: naming the tensor that is unknown, missing or unfit, and both shapes.
    """
    spare = {LM_HEAD} if tied else set()
    for key, entry in entries.items():
        if key in table:
            _check_entry(entry, table[key])
        elif key not in spare and not key.endswith(_IGNORED):
            raise ValueError(f"{entry.place}: this tensor has no place in the model")
    missing = [key for key in table if key not in entries]
    if missing:
        raise ValueError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} missing)")


def _layer_key(path: str, layer: int) -> str:
    _, name, *leaf = path.split("/")
    return f"model.layers.{layer}.{_MODULES[name]}.{leaf[0] if leaf else 'weight'}"


def _nvfp4_slots(key: str, path: str, layer: int, shape: tuple[int, ...]) -> dict[str, Slot]:
    n, k = shape
    check_input_size(key, k)
    return {
        f"{key}_packed": Slot(path, layer, "packed", (n, k // 2)),
        f"{key}_scale": Slot(path, layer, "block_scales", (n, k // BLOCK_SIZE)),
        f"{key}_global_scale": Slot(path, layer, "global_scale", (1,)),
    }


def _check_entry(entry: TensorEntry, slot: Slot) -> None:
    if entry.shape != slot.shape:
        raise ValueError(
            f"{entry.place}: shape {list(entry.shape)}, but config.json asks for {list(slot.shape)}"
        )
    if entry.dtype.name not in _PART_DTYPES[slot.part]:
        allowed = ", ".join(_PART_DTYPES[slot.part])
        raise ValueError(f"{entry.place}: dtype {entry.dtype.name} is not one of {allowed}")
