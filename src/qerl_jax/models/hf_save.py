"""Parameters -> Hugging Face folder: dense, or NVFP4 in the compressed-tensors format."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.hf_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    new_folder,
    read_config,
    write_json,
    write_tensors,
)
from qerl_jax.models.config import DecoderConfig
from qerl_jax.models.hf_keys import NVFP4_FORMAT, Slot, is_linear_weight, key_table
from qerl_jax.protocols import Params
from qerl_jax.quant.nvfp4 import NvFp4Tensor
from qerl_jax.tree import flatten_weights

# What goes along with the weights of a model, where a folder has it.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "NOTICE",
)


def save_nvfp4(
    folder_out: str | os.PathLike,
    folder_in: str | os.PathLike,
    params: Params,
    config: DecoderConfig,
) -> None:
    """Write quantized parameters as a compressed-tensors `nvfp4-pack-quantized` folder.

    config.json, tokenizer and licence come from `folder_in`, the folder that the parameters were
    loaded from. Codes and scales are written bit for bit, norm scales and biases in float32.

    Raises:
        ValueError: if a projection is not NVFP4, or `folder_out` exists or cannot be created.
    """
    hf_config = {**read_config(folder_in), "quantization_config": quantization_config()}
    weights = flatten_weights(params)
    for path, weight in weights.items():
        if is_linear_weight(path) and not isinstance(weight, NvFp4Tensor):
            raise ValueError(f"{path}: is not quantized")
    table = key_table(config, nvfp4=True)
    _save(folder_out, hf_config, {k: _slice(weights, s) for k, s in table.items()}, folder_in)


def save_dense(
    folder_out: str | os.PathLike,
    params: Params,
    config: DecoderConfig,
    *,
    hf_config: Mapping[str, Any],
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    companions_from: str | os.PathLike | None = None,
) -> None:
    """Write dense parameters as a folder of one dtype, bfloat16 or float32.

    `hf_config` becomes config.json; `companions_from` is a folder to copy the tokenizer from.

    Raises:
        ValueError: if a projection is NVFP4, or `folder_out` exists or cannot be created.
    """
    weights = flatten_weights(params)
    for path, weight in weights.items():
        if isinstance(weight, NvFp4Tensor):
            raise ValueError(f"{path}: is NVFP4; there are no dense weights to write")
    dtype = np.dtype(jnp.dtype(dtype))
    table = key_table(config, nvfp4=False)
    tensors = {key: _slice(weights, slot).astype(dtype) for key, slot in table.items()}
    _save(folder_out, {**hf_config, "dtype": dtype.name}, tensors, companions_from)


def quantization_config() -> dict[str, Any]:
    """Describe weight-only NVFP4 as llm-compressor's scheme NVFP4A16 does."""
    weights = {
        "dynamic": False,
        "group_size": 16,
        "num_bits": 4,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.float8_e4m3fn",
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
    }
    group = {
        "format": NVFP4_FORMAT,
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": NVFP4_FORMAT,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _slice(weights: Mapping[str, Any], slot: Slot) -> np.ndarray:
    """Take the tensor of a slot out of its stack, in the shape of the file."""
    leaf = weights[slot.path]
    leaf = leaf if slot.part == "array" else getattr(leaf, slot.part)
    leaf = leaf if slot.layer is None else leaf[slot.layer]
    return np.asarray(leaf).reshape(slot.shape)


def _save(
    folder_out: str | os.PathLike,
    hf_config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    companions_from: str | os.PathLike | None,
) -> None:
    with new_folder(folder_out) as folder:
        write_json(folder / CONFIG_FILE, hf_config)
        write_tensors(folder / WEIGHTS_FILE, tensors)
        for name in COMPANIONS if companions_from is not None else ():
            source = Path(companions_from) / name
            if source.is_file():
                shutil.copyfile(source, folder / name)
