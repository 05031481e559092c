"""Adapters as PEFT writes them: adapter_model.safetensors and adapter_config.json."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.hf_files import (
    BLOCK_NORM_MODULES,
    LINEAR_MODULES,
    TensorEntry,
    list_tensors,
    new_folder,
    read_json,
    read_tensor,
    write_json,
    write_tensors,
)
from qerl_jax.lora import LoraAdapter, Trainable, lora_targets
from qerl_jax.protocols import Params

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model.model.layers."
_PARTS = {"a": "lora_A.weight", "b": "lora_B.weight"}
# Settings that change what an adapter computes, and the values under which it is plain LoRA.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": ([], None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
    "exclude_modules": ([], "", None),
    "alora_invocation_tokens": ([], None),
    "arrow_config": ({}, None),
    "kasa_config": ({}, None),
    "monteclora_config": ({}, None),
    "use_bdlora": ({}, False, None),
    "velora_config": ({}, None),
    # Others (pissa, olora, loftq, corda, ...) take a part out of the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
_KINDS = {
    "use_rslora": bool | None,
    "target_modules": list | str | None,  # a string is a pattern
    "modules_to_save": list | None,
}
_DTYPES = ("float32", "float16", "bfloat16")


def export_adapter(
    folder: str | os.PathLike,
    trainable: Trainable,
    *,
    base_model: str | None = None,
    replace: bool = False,
) -> None:
    """Write an adapter, and the norm scales trained with it, as a PEFT folder in float32.

    `base_model` is the name or path that PEFT records. Trained norm scales become
    `modules_to_save`, which PEFT puts in place of the base model's. With `replace`, an older
    `folder` goes once the new one is complete.

    Raises:
        ValueError: if `folder` exists and `replace` is off, or it cannot be created.
    """
    tensors = {}
    for name, pair in trainable.adapter.pairs.items():
        for part, matrix in pair.items():
            # PEFT stores both matrices as [out, in], the transpose of ours.
            for layer, value in enumerate(np.asarray(matrix, np.float32).swapaxes(1, 2)):
                tensors[_lora_key(name, layer, part)] = value
    for name, scales in (trainable.norm_scales or {}).items():
        for layer, value in enumerate(np.asarray(scales, np.float32)):
            tensors[_norm_key(name, layer)] = value
    with new_folder(folder, replace=replace) as temporary:
        write_tensors(temporary / WEIGHTS_FILE, tensors)
        write_json(temporary / CONFIG_FILE, _adapter_config(trainable, base_model))


def import_adapter(
    folder: str | os.PathLike,
    params: Params,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    field: str = "adapter",
) -> Trainable:
    """Read a PEFT folder as what is trained over the model `params`, which may be abstract.

    `field` is what named the folder, for the message that there is none.

    Raises:
        ValueError: if a file is missing or damaged; the adapter is not plain LoRA of one rank on
            projections (and the two block norms); or a tensor is unknown, missing, not finite or
            of a shape that the model does not have.
    """
    folder = Path(os.path.expanduser(folder))
    if not folder.is_dir():
        raise ValueError(f"{field}: {folder}: no such adapter folder")
    config = _read_plain_config(folder)
    rank = config["r"]
    entries = list_tensors(folder / WEIGHTS_FILE)
    targets, norms = _modules(folder, config, entries, params)
    layers = {name: params["layers"][name] for name in (*targets, *norms)}
    expected = _expected_shapes(layers, targets, norms, rank)
    _check_entries(folder, entries, expected)

    def stack(keys: Sequence[str]) -> np.ndarray:
        return np.stack([_read_finite(entries[key]) for key in keys])

    pairs = {}
    for name in targets:
        depth = range(layers[name]["weight"].shape[0])
        pairs[name] = {
            part: jnp.asarray(
                stack([_lora_key(name, i, part) for i in depth]).swapaxes(1, 2), dtype
            )
            for part in _PARTS
        }
    scales = {
        name: jnp.asarray(
            stack([_norm_key(name, i) for i in range(layers[name].shape[0])]), jnp.float32
        )
        for name in norms
    }
    adapter = LoraAdapter(pairs=pairs, scale=_scale(config))
    return Trainable(adapter=adapter, norm_scales=scales or None)


def _lora_key(name: str, layer: int, part: str) -> str:
    return f"{_PREFIX}{layer}.{LINEAR_MODULES[name]}.{_PARTS[part]}"


def _norm_key(name: str, layer: int) -> str:
    return f"{_PREFIX}{layer}.{BLOCK_NORM_MODULES[name]}.weight"


def _rank(adapter: LoraAdapter) -> int:
    return next(iter(adapter.pairs.values()))["a"].shape[-1]


def _adapter_config(trainable: Trainable, base_model: str | None) -> dict[str, Any]:
    adapter, rank = trainable.adapter, _rank(trainable.adapter)
    # alpha as it was written, if that is what gives back the scale exactly.
    alpha = round(adapter.scale * rank, 6)
    if alpha / rank != adapter.scale:
        alpha = adapter.scale * rank
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": sorted(trainable.norm_scales) if trainable.norm_scales else None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(adapter.pairs),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _read_plain_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json, refusing what plain LoRA would compute otherwise."""
    path = folder / CONFIG_FILE
    config = read_json(path)
    for name, plain in _PLAIN.items():
        if config.get(name) not in plain:
            raise ValueError(f"{path}: {name}: {config.get(name)!r} is not supported")
    for name, kinds in _KINDS.items():
        if not isinstance(config.get(name), kinds):
            raise ValueError(f"{path}: {name}: {config.get(name)!r} is not supported")
    if type(config.get("r")) is not int or config["r"] < 1:
        raise ValueError(f"{path}: r: {config.get('r')!r} is not a positive integer")
    alpha = config.get("lora_alpha")
    if type(alpha) not in (int, float) or not 0 < alpha < 1e30:
        raise ValueError(f"{path}: lora_alpha: {alpha!r} is not a positive number")
    return config


def _scale(config: Mapping[str, Any]) -> float:
    """alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA (arXiv 2312.03732)."""
    divisor = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    return config["lora_alpha"] / divisor


def _modules(
    folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry], params: Params
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (projections, norms) that the adapter has, in the model's and our order.

    A list in the config says so; a pattern, as PEFT also allows, is taken from the tensors.
    """
    path, known = folder / CONFIG_FILE, lora_targets(params)
    named = config.get("target_modules")
    if not isinstance(named, list):
        named = [n for n in known if _has_module(entries, LINEAR_MODULES[n])]
    saved = config.get("modules_to_save") or []
    for field, names, allowed in (
        ("target_modules", named, known),
        ("modules_to_save", saved, tuple(BLOCK_NORM_MODULES)),
    ):
        for name in names:
            if name not in allowed:
                raise ValueError(f"{path}: {field}: {name!r} is not one of {', '.join(allowed)}")
    if not named:
        raise ValueError(f"{path}: target_modules: fits none of {', '.join(known)}")
    return tuple(filter(named.__contains__, known)), tuple(filter(saved.__contains__, allowed))


def _has_module(entries: Mapping[str, TensorEntry], module: str) -> bool:
    pattern = re.compile(rf"{re.escape(_PREFIX)}\d+\.{re.escape(module)}\.")
    return any(pattern.match(key) for key in entries)


def _expected_shapes(
    layers: Mapping[str, Any], targets: Sequence[str], norms: Sequence[str], rank: int
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in targets:
        depth, n, k = layers[name]["weight"].shape
        for i in range(depth):
            shapes[_lora_key(name, i, "a")] = (rank, k)
            shapes[_lora_key(name, i, "b")] = (n, rank)
    for name in norms:
        depth, embed = layers[name].shape
        shapes |= {_norm_key(name, i): (embed,) for i in range(depth)}
    return shapes


def _check_entries(
    folder: Path, entries: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for key, entry in entries.items():
        if key not in expected:
            raise ValueError(f"{entry.place}: this tensor has no place in the adapter")
        if entry.dtype.name not in _DTYPES:
            raise ValueError(f"{entry.place}: dtype {entry.dtype.name} is not one of {_DTYPES}")
        if entry.shape != expected[key]:
            raise ValueError(
                f"{entry.place}: shape {list(entry.shape)}, but the model and r in "
                f"{CONFIG_FILE} ask for {list(expected[key])}"
            )
    missing = [key for key in expected if key not in entries]
    if missing:
        raise ValueError(
            f"{folder / WEIGHTS_FILE}: tensor {missing[0]} is missing ({len(missing)} missing)"
        )


def _read_finite(entry: TensorEntry) -> np.ndarray:
    value = read_tensor(entry).astype(np.float32)
    if not np.isfinite(value).all():
        raise ValueError(f"{entry.place}: holds NaN or infinity")
    return value
