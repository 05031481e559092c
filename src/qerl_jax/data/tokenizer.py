"""What is needed of a Hugging Face tokenizer."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from qerl_jax.data.messages import first_line
from qerl_jax.hf_files import read_json


def load_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer of a local folder; never asks the network.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: no tokenizer in it that transformers can read.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder")
    # Without torch, transformers would say on standard error that it has no models.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        tokenizer("1")  # a setting of the wrong type is met only here
        return tokenizer
    except Exception as error:  # from the file system, JSON, or the Rust library
        raise ValueError(f"{folder}: no tokenizer can be read ({first_line(error)})") from error


def end_token_ids(tokenizer: Any, source: str | Path | Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the tokens that end a completion; several are allowed.

    Args:
        tokenizer: the last resort, its `eos_token_id`.
        source: see `configured_end_ids`.

    Raises:
        ValueError: an id that is no token id, or none in any of the three.
    """
    found = configured_end_ids(source) or _token_ids(tokenizer.eos_token_id, "")
    if not found:
        given = "the settings" if isinstance(source, Mapping) else source
        raise ValueError(
            f"eos_token_id: none in {given} or the tokenizer, so no completion can end"
        )
    return found


def configured_end_ids(source: str | Path | Mapping[str, Any]) -> tuple[int, ...]:
    """Return the `eos_token_id` of a model's configuration, () if it has none.

    Args:
        source: a model folder, whose generation_config.json goes before its config.json; or such
            a mapping itself.

    Raises:
        ValueError: an id that is no token id.
    """
    configs = {"": source} if isinstance(source, Mapping) else _configs(Path(source))
    found = (_token_ids(config.get("eos_token_id"), place) for place, config in configs.items())
    return next(filter(None, found), ())


def _token_ids(ids: Any, place: str) -> tuple[int, ...]:
    listed = ids if isinstance(ids, list | tuple) else [ids]
    found = [token for token in listed if token is not None]
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"{place}eos_token_id: {ids} is not a token id or a list of them")
    return tuple(dict.fromkeys(found))


def _configs(folder: Path) -> dict[str, Mapping[str, Any]]:
    paths = (folder / "generation_config.json", folder / "config.json")
    return {f"{path}: ": read_json(path) for path in paths if path.is_file()}


def decode_completion(tokenizer: Any, ids: Iterable[int] | Int[np.ndarray, " completion"]) -> str:
    """Return the text of completion ids, already cut at their length, without special tokens."""
    plain = [int(token) for token in ids]
    return tokenizer.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False)
