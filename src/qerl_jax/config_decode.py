"""Typed decoding of plain mappings into the config dataclasses, strict, with one-line errors.

Differs from draccus, which accepts `true` for an int, null for a required field and a number for
a string: each of these hides a mistake in a config file, so all are refused here.
"""

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from qerl_jax.config import ExperimentConfig

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def decode(kind: Any, value: Any, *, name: str = "", where: str = "") -> Any:
    """Turn a plain value, as YAML reads it, into an instance of `kind`.

    `name` is the dotted field and `where` the prefix of messages ("configs/x.yaml: " or "--").

    Raises ValueError with where and name for an unknown key, a wrong type or a wrong choice.
    """
    if is_dataclass(kind):
        return _decode_section(kind, value, name, where)
    if value is None and _is_optional(kind):
        return None
    required = _without_none(kind) if _is_optional(kind) else kind
    origin, args = get_origin(required), get_args(required)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        items = enumerate(value)
        return tuple(decode(args[0], v, name=f"{name}[{i}]", where=where) for i, v in items)
    if origin is dict and isinstance(value, dict):
        keys = [decode(args[0], k, name=f"{name} (a key)", where=where) for k in value]
        return {k: decode(args[1], value[k], name=f"{name}.{k}", where=where) for k in keys}
    decoded = _decode_scalar(required, value) if origin is None else None
    if decoded is None:
        raise ValueError(f"{where}{name}: expected {describe(kind)}, got {_show(value)}")
    return decoded


def parse_text(kind: Any, text: str) -> Any:
    """Read the text of a command-line override as the plain value that `decode` takes.

    Strings stay as typed; "null" is None for an optional field; lists are a,b or [a,b].
    """
    origin, args = get_origin(kind), get_args(kind)
    if _is_optional(kind):
        return None if text == "null" else parse_text(_without_none(kind), text)
    if kind is str or origin is Literal:
        return text
    if origin is tuple:
        inner = text.strip()
        inner = inner[1:-1] if inner.startswith("[") and inner.endswith("]") else inner
        return [parse_text(args[0], part.strip()) for part in inner.split(",")] if inner else []
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: an impossible date
        return text  # decode says what was expected


def field_type(name: str, *, where: str = "") -> Any:
    """Return the type of a dotted field; a free mapping (data.task, loss.extra) takes any key.

    Raises ValueError with the nearest name for an unknown field, or for a whole section.
    """
    kind: Any = ExperimentConfig
    for part in name.split("."):
        types = {f.name: f.type for f in fields(kind)} if is_dataclass(kind) else {}
        if get_origin(kind) is dict and part:
            kind = get_args(kind)[1]
        elif part in types:
            kind = types[part]
        else:
            raise ValueError(unknown_key(name, where=where))
    if is_dataclass(kind):
        example = f"{where}{name}.{fields(kind)[0].name}"
        raise ValueError(f"{where}{name} is a section; set one of its fields, as in {example}")
    return kind


def unknown_key(name: str, *, where: str = "") -> str:
    """Return the message about an unknown key, with the nearest known ones."""
    if name in field_names():
        section, _, leaf = name.partition(".")
        return f'{where}"{name}" is written with a dot; write {section}: {{{leaf}: ...}}'
    dashes = where if where == "--" else ""
    near = " or ".join(dashes + other for other in nearest(name, field_names()))
    hint = f" (nearest: {near})" if near else ""
    return f"{where}{name} is unknown{hint}"


def field_names() -> tuple[str, ...]:
    """Return the dotted names of all sections and fields."""
    names: list[str] = []
    for top in fields(ExperimentConfig):
        names.append(top.name)
        if is_dataclass(top.type):
            names += [f"{top.name}.{f.name}" for f in fields(top.type)]
    return tuple(names)


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return the known names most like `name`: same section, same last word, then any; maybe []."""
    section, _, leaf = name.rpartition(".")
    siblings = [k for k in known if k.rpartition(".")[0] == section]
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf and k != name]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.8)
    initials = [k for k in siblings if _initials(k.rpartition(".")[2]) == leaf]  # lr
    return close or initials or same_leaf or difflib.get_close_matches(name, known, n=1)


def is_text(value: str) -> bool:
    """Tell whether files and tokenizers can take a string: no NUL, no half of a surrogate pair."""
    return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_") if word)


def describe(kind: Any) -> str:
    """Return a type in the words of a config file: "int or null", "a list of str"."""
    origin, args = get_origin(kind), get_args(kind)
    if _is_optional(kind):
        return f"{describe(_without_none(kind))} or null"
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is tuple:
        return f"a list of {describe(args[0])}"
    if origin is dict:
        return f"a mapping of {describe(args[0])} to {describe(args[1])}"
    return "a mapping" if is_dataclass(kind) else kind.__name__


def _decode_section(kind: Any, value: Any, name: str, where: str) -> Any:
    if not isinstance(value, dict):
        place = f"{where}{name}: " if name else where
        raise ValueError(f"{place}expected a mapping of settings, got {_show(value)}")
    types = {f.name: f.type for f in fields(kind)}
    decoded = {}
    for key, item in value.items():
        full = f"{name}.{key}" if name else str(key)
        if key not in types:
            raise ValueError(unknown_key(full, where=where))
        decoded[key] = decode(types[key], item, name=full, where=where)
    return kind(**decoded)


def _decode_scalar(kind: type, value: Any) -> Any:
    """Return the value as `kind`, or None if it is not one."""
    if kind is float and isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)  # PyYAML reads 3e-5, without a dot, as a string
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1000 else None
    if isinstance(value, str) and not is_text(value):
        return None
    return value if type(value) is kind else None


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and type(None) in get_args(kind)


def _without_none(kind: Any) -> Any:
    return next(arg for arg in get_args(kind) if arg is not type(None))


def _show(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool | str):
        text = json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())
    elif isinstance(value, int) and abs(value) >= 2**1000:
        text = "an integer of hundreds of digits"  # Python writes no more than 4,300 of them
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
