"""Config files: load with inheritance and overrides, dump, hash, compare."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from qerl_jax.config import ExperimentConfig
from qerl_jax.config_decode import decode, field_type, parse_text

MAX_BASE_DEPTH = 3  # files between a config and its most distant base


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read a YAML config, its bases and the command line's overrides.

    The key `base` names one file or a list of files, relative to this one; they are merged in
    order and this file over them. Sections merge field by field; a field is replaced whole.
    Overrides are "--section.field", "value" or "--section.field=value" and win over files.

    Raises:
        FileNotFoundError: no such file.
        ValueError: one line with the file or flag, the dotted field and what was expected.
    """
    mapping = _read_with_bases(Path(path), ancestors=())
    mapping = _apply_overrides(mapping, overrides)
    return decode(ExperimentConfig, mapping, where=f"{path}: ")


def parse_config(text: str, *, where: str = "config") -> ExperimentConfig:
    """Read the text of `dump_config`; `where` is its place in error messages."""
    return decode(ExperimentConfig, _read_mapping(text, where), where=f"{where}: ")


def dump_config(config: ExperimentConfig) -> str:
    """Return the whole config as YAML text that loads to an equal object."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=float("inf"))


def config_hash(config: ExperimentConfig) -> str:
    """Return 16 hexadecimal digits that differ for configs that differ in any field."""
    return hashlib.sha256(dump_config(config).encode()).hexdigest()[:16]


def diff_configs(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
    """Return a line "section.field: old -> new" for each field that differs."""
    before, after = _flatten(old), _flatten(new)
    changed = [name for name in before if before[name] != after[name]]
    show = partial(json.dumps, ensure_ascii=False)
    return [f"{name}: {show(before[name])} -> {show(after[name])}" for name in changed]


def _read_with_bases(path: Path, *, ancestors: tuple[Path, ...]) -> dict[str, Any]:
    chain = " -> ".join(str(p) for p in (*ancestors, path))
    if os.path.realpath(path) in map(os.path.realpath, ancestors):
        raise ValueError(f"{ancestors[-1]}: base: the files form a cycle: {chain}")
    if len(ancestors) > MAX_BASE_DEPTH:
        raise ValueError(f"{ancestors[-1]}: base: deeper than {MAX_BASE_DEPTH} files: {chain}")
    own = _read_mapping(_read_text(path, ancestors), str(path))
    bases = _base_paths(path, own.pop("base", []))
    # Decoded here only for its errors, which must name the file that holds the mistake.
    decode(ExperimentConfig, own, where=f"{path}: ")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = _merge(merged, _read_with_bases(base, ancestors=(*ancestors, path)))
    return _merge(merged, own)


def _base_paths(path: Path, value: Any) -> list[Path]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"{path}: base: expected a file name or a list of file names")
    return [Path(os.path.normpath(path.parent / name)) for name in names]


def _read_text(path: Path, ancestors: tuple[Path, ...]) -> str:
    where = f"{ancestors[-1]}: base: {path}" if ancestors else str(path)
    if not path.exists():
        raise FileNotFoundError(f"{where}: no such config file")
    if path.is_dir():
        raise ValueError(f"{where}: is a folder, not a config file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: is not UTF-8 text (byte {error.start})") from None


def _read_mapping(text: str, where: str) -> dict[Any, Any]:
    try:
        node, value = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ValueError(f"{where}{line}: invalid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
        raise ValueError(f"{where}: invalid YAML: {str(error).splitlines()[0]}") from None
    _refuse_duplicate_keys(node, where, seen=set())
    if isinstance(value, dict):
        return value
    found = "an empty file" if value is None else f"a {type(value).__name__}"
    raise ValueError(f"{where}: expected a mapping of settings, got {found}")


def _refuse_duplicate_keys(node: Any, where: str, *, seen: set[int]) -> None:
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))  # an alias may point back to its own parent
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    else:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                first = lines[key.value]
                raise ValueError(f"{where}:{line}: {key.value} is already set on line {first}")
            if isinstance(key, yaml.ScalarNode):
                lines[key.value] = line
        children = [value for _, value in node.value]
    for child in children:
        _refuse_duplicate_keys(child, where, seen=seen)


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge section by section; the fields of `over` win whole."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both else value
    return merged


def _apply_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    result = dict(mapping)
    for name, text in _override_pairs(overrides):
        kind = field_type(name, where="--")
        value = parse_text(kind, text)
        decode(kind, value, name=name, where="--")
        *parents, leaf = name.split(".")
        place = result
        for parent in parents:
            place[parent] = dict(place.get(parent, {}))
            place = place[parent]
        place[leaf] = value
    return result


def _override_pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    tokens = list(overrides)
    while tokens:
        flag, equals, text = tokens.pop(0).partition("=")
        if not flag.startswith("--") or flag == "--":
            raise ValueError(f'unexpected "{flag}": an override is --section.field value')
        if not equals:
            if not tokens or tokens[0].startswith("--"):
                raise ValueError(f"{flag}: needs a value, as in {flag} VALUE or {flag}=VALUE")
            text = tokens.pop(0)
        pairs.append((flag[2:], text))
    return pairs


def _flatten(config: ExperimentConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for top in fields(config):
        value = getattr(config, top.name)
        if is_dataclass(value):
            flat |= {f"{top.name}.{f.name}": getattr(value, f.name) for f in fields(value)}
        else:
            flat[top.name] = value
    return flat
