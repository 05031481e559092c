"""Hugging Face folders on disk: module names, safetensors files, folders created in one move."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# parameter name -> module inside "model.layers.<i>."
LINEAR_MODULES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
BLOCK_NORM_MODULES = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in a safetensors file."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def place(self) -> str:
        return f"{self.path}: {self.name}"


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """Read the config.json of a model folder.

    Raises:
        ValueError: if the folder or the file is missing, or is not valid JSON.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such model folder")
    return read_json(Path(folder) / CONFIG_FILE)


def list_tensors(path: str | os.PathLike) -> dict[str, TensorEntry]:
    """List the tensors of a safetensors file without reading their data.

    Raises:
        ValueError: if the file is missing, truncated or not safetensors, or holds an unknown dtype.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, framework="np"):  # checks that the header fits the file exactly
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a complete safetensors file ({error})") from error
    # The library's numpy reader knows neither bfloat16 nor float8: the offsets are used here.
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: _entry(path, name, item, 8 + size) for name, item in header.items()}


def _entry(path: Path, name: str, item: Mapping[str, Any], data_start: int) -> TensorEntry:
    if item["dtype"] not in _DTYPES:
        raise ValueError(f"{path}: {name}: dtype {item['dtype']} is not one of {list(_DTYPES)}")
    dtype = np.dtype(_DTYPES[item["dtype"]])
    return TensorEntry(
        path, name, dtype, tuple(item["shape"]), data_start + item["data_offsets"][0]
    )


def find_tensors(folder: str | os.PathLike) -> dict[str, TensorEntry]:
    """List the tensors of a model folder: model.safetensors, or the shards of its index.

    Raises:
        ValueError: if there are none, a shard is missing or damaged, or a tensor is in two shards.
    """
    folder = Path(folder)
    if (folder / WEIGHTS_FILE).is_file():
        return list_tensors(folder / WEIGHTS_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise ValueError(f"{folder}: holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    shards = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise ValueError(f"{folder / INDEX_FILE}: weight_map is not a table of file names")
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(shards.values())):
        for key, entry in list_tensors(folder / shard).items():
            if key in entries:
                raise ValueError(f"{entry.place}: is also in {entries[key].path.name}")
            entries[key] = entry
    for key, shard in shards.items():
        if key not in entries or entries[key].path != folder / shard:
            raise ValueError(f"{folder / INDEX_FILE}: {key} is not in {shard}")
    return entries


def read_tensor(entry: TensorEntry) -> np.ndarray:
    """Read one tensor into memory of its own."""
    count = int(np.prod(entry.shape, dtype=np.int64)) * entry.dtype.itemsize
    data = np.fromfile(entry.path, dtype=np.uint8, count=count, offset=entry.offset)
    return data.view(entry.dtype).reshape(entry.shape)


def write_tensors(path: str | os.PathLike, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file that transformers and PEFT accept."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: if the file is missing or does not hold a JSON object, naming file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not valid JSON (not UTF-8)") from error
    except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def write_json(path: str | os.PathLike, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, keys sorted."""
    Path(path).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def new_folder(path: str | os.PathLike, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends without an exception.

    Nobody ever sees a half-written `path`; after an exception nothing is left. With `replace`, a
    folder already at `path` is removed once the new one is complete.

    Raises:
        ValueError: if `path` exists and `replace` is off, or its parent cannot be written.
    """
    path = Path(path)
    if (path.exists() or path.is_symlink()) and not (replace and path.is_dir()):
        raise ValueError(f"{path}: already exists")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be created ({error.strerror})") from error
    try:
        fresh, old = temporary / "new", temporary / "old"
        fresh.mkdir()
        yield fresh
        for file in fresh.iterdir():
            file.chmod(0o644)  # safetensors writes 0600
        if replace and path.exists():
            path.rename(old)
        fresh.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
