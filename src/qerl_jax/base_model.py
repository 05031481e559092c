"""A base model from its folder: frozen parameters, tokenizer, end tokens."""

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from qerl_jax.data import configured_end_ids, end_token_ids, load_tokenizer
from qerl_jax.hf_files import find_tensors
from qerl_jax.models import DecoderConfig, decoder_config_from_hf
from qerl_jax.models.hf import find_params, load_params, read_config
from qerl_jax.protocols import Params

TINY = "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """What is known of a model before its weights are read."""

    path: Path
    config: DecoderConfig
    tokenizer: Any = None  # a Hugging Face tokenizer; None: opened without it
    end_ids: tuple[int, ...] = ()
    pad_id: int = 0


def model_path(name: str) -> Path:
    """Return the folder of a model: "tiny" is the one inside the package."""
    if name == TINY:
        return Path(str(resources.files("qerl_jax"))) / "tiny_model"
    return Path(os.path.expanduser(name))


def open_model(
    name: str,
    *,
    dtype: str,
    remat: bool = True,
    logits_chunk: int = 1024,
    text: bool = True,
    quantize: bool = False,
    field: str = "--model",
) -> ModelFolder:
    """Read everything of a model but its weights, whose names and shapes are checked.

    Without `text`, no tokenizer is needed; with `quantize`, sizes that NVFP4 cannot store are
    refused. `field` is what named the model, for the message that there is none.
    Raises ValueError naming the folder or the file at fault.
    """
    path = model_path(name)
    if not path.is_dir():
        hub = " (hub models are not downloaded; hf download NAME --local-dir FOLDER does)"
        hint = hub if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""
        raise ValueError(f"{field}: {path}: no such model folder{hint}")
    hf_config = read_config(path)
    try:
        shape = decoder_config_from_hf(hf_config)
    except ValueError as error:  # begins with the file's name
        raise ValueError(f"{path}/{error}") from error
    config = dataclasses.replace(
        shape,
        dtype=dtype,
        remat=remat,
        logits_chunk=logits_chunk,
    )
    find_params(path, config, quantize=quantize)
    if not text:
        return ModelFolder(path=path, config=config)
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        # transformers would make an empty tokenizer out of config.json.
        raise ValueError(f"{path}: holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    # Before transformers reads the same file, and warns of what is refused here.
    _check_end_ids(configured_end_ids(path), path, config)
    tokenizer = load_tokenizer(path)
    end_ids = end_token_ids(tokenizer, path)
    _check_end_ids(end_ids, path, config)
    pad_id = tokenizer.pad_token_id
    usable = pad_id is not None and pad_id < config.vocab_size
    return ModelFolder(
        path=path,
        config=config,
        tokenizer=tokenizer,
        end_ids=end_ids,
        pad_id=pad_id if usable else end_ids[0],
    )


def _check_end_ids(ids: Sequence[int], path: Path, config: DecoderConfig) -> None:
    for token in ids:
        if token >= config.vocab_size:
            raise ValueError(
                f"{path}: eos_token_id {token} is not one of 0 to {config.vocab_size - 1}"
            )


def check_ids(ids: Sequence[int], folder: ModelFolder, place: str) -> None:
    """Refuse tokens beyond the embedding: looked up there, they would pass for its last row.

    Raises ValueError.
    """
    vocab = folder.config.vocab_size
    for token in ids:
        if not 0 <= token < vocab:
            raise ValueError(f"{place}: token id {token} is not one of 0 to {vocab - 1}")


def load_weights(folder: ModelFolder, *, quantize: bool, scale_rounding: str) -> Params:
    """Read, and if asked quantize to NVFP4, the weights; tensor by tensor.

    Weights that stay dense take 16 bits, unless they are computed with in float32 and the files
    hold more than bfloat16 can.
    """
    exact = not quantize and folder.config.dtype == "float32" and _holds_wide_weights(folder.path)
    return load_params(
        folder.path,
        folder.config,
        quantize=quantize,
        round_to=jnp.dtype(scale_rounding),
        dtype=jnp.float32 if exact else jnp.bfloat16,
    )


def _holds_wide_weights(path: Path) -> bool:
    wide = ("float16", "float32")
    return any(e.dtype.name in wide and len(e.shape) == 2 for e in find_tensors(path).values())
