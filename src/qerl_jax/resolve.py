"""Functions named in a config: an entry of a closed table, or a user's own `module:function`."""

import contextlib
import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def load_function(spec: str, *, field: str, table: Mapping[str, Any]) -> Any:
    """Return table[spec], or import a user's function.

    Args:
        spec: a name in the table, or "package.module:function". The module is looked up in the
            current directory and on the Python path, of which the directory is the last entry
            from then on: functions of the module may import what lies beside it.
        field: the config field that holds spec, for messages, e.g. "loss.name".
        table: the closed table of names.

    Raises:
        ValueError: neither; a module that is missing or fails to import; a missing or
            uncallable attribute.
    """
    if spec in table:
        return table[spec]
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        names, near = ", ".join(sorted(table)), nearest_hint(spec, table)
        raise ValueError(f'{field}: "{spec}" is not one of {names}{near}, nor a module:function')
    if module_name.endswith(".py"):
        name = module_name.removesuffix(".py")
        raise ValueError(f"{field}: a module is named without .py, as in {name}:{attribute}")
    module = _import(module_name, field)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if not hasattr(module, attribute):
        near = nearest_hint(attribute, vars(module))
        raise ValueError(f'{field}: module "{module_name}" has no "{attribute}"{near}')
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(f'{field}: "{spec}" is not callable but {type(function).__name__}')
    return function


def keyword_names(fn: Callable[..., Any], *, field: str) -> frozenset[str]:
    """Return the names of the keyword-only parameters of fn: the hyperparameters it takes.

    What a functools.partial has fixed is none of them.

    Raises ValueError, naming `field`, for a function whose parameters Python cannot tell.
    """
    return frozenset(p.name for p in _keyword_parameters(fn, field))


def bind_keywords(
    fn: Callable[..., Any],
    available: Mapping[str, Any],
    *,
    data: Sequence[str],
    place: str,
) -> Callable[..., Any]:
    """Bind the keyword-only parameters of fn that have a value, and return a partial.

    Args:
        fn: data are its positional parameters, hyperparameters its keyword-only ones.
        available: values on offer; those that fn does not take are left aside.
        data: the positional arguments that fn is called with. It may give them other names.
        place: the config field and its value, for messages, e.g. "loss.name: my_losses:my_loss".

    Raises:
        ValueError: a keyword-only parameter without default and without value; a parameter that
            would miss its value since it is not keyword-only; data in another order.
    """
    parameters = _keyword_parameters(fn, place)
    check_order(fn, data, place=place)
    _refuse_unbound(fn, available, len(data), place=place)
    for parameter in parameters:
        if parameter.name not in available and parameter.default is inspect.Parameter.empty:
            raise ValueError(f'{place}: needs "{parameter.name}", which nothing sets')
    chosen = {p.name: available[p.name] for p in parameters if p.name in available}
    return functools.partial(fn, **chosen)


def check_order(fn: Callable[..., Any], data: Sequence[str], *, place: str) -> None:
    """Refuse a function that has the name of one argument where it is given another.

    Raises ValueError.
    """
    for given, name in zip(data, _positional_names(fn), strict=False):
        if name != given and name in data:
            raise ValueError(
                f'{place} has "{name}" where it is given {given}: the arguments are, in order, '
                f"{', '.join(data)}"
            )


def _positional_names(fn: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(fn).parameters.values() if p.kind in _POSITIONAL]


def _refuse_unbound(
    fn: Callable[..., Any], values: Mapping[str, Any], data: int, *, place: str
) -> None:
    # Such a parameter would keep its default, whatever the config says.
    for name in _positional_names(fn)[data:]:
        if name in values:
            raise ValueError(
                f'{place} takes "{name}" by position: only keyword-only parameters get their '
                "value from the config; put a bare * before it"
            )
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            raise ValueError(
                f"{place} takes **{parameter.name}: name the hyperparameters, after a bare *"
            )


def _keyword_parameters(fn: Callable[..., Any], field: str) -> tuple[inspect.Parameter, ...]:
    fixed = _fixed_keywords(fn)
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as error:  # some classes and functions written in C
        raise ValueError(f"{field}: {error}") from error
    return tuple(
        p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in fixed
    )


def _fixed_keywords(fn: Callable[..., Any]) -> frozenset[str]:
    """Return what the partials in fn have fixed: their signature offers it like a default."""
    fixed: set[str] = set()
    while True:
        if isinstance(fn, functools.partial):
            fixed.update(fn.keywords)
            fn = fn.func
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        else:
            return frozenset(fixed)


def _import(module_name: str, field: str) -> ModuleType:
    with _working_directory_on_path():
        try:
            return importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and _is_parent(error.name, module_name):
                message = f"is neither on the Python path nor in {os.getcwd()}"
            else:
                first_line = f"{type(error).__name__}: {error}".splitlines()[0]
                message = f"fails to import: {first_line}"
            raise ValueError(f'{field}: module "{module_name}" {message}') from error


def _is_parent(name: str | None, module_name: str) -> bool:
    return name is not None and f"{module_name}.".startswith(f"{name}.")


@contextlib.contextmanager
def _working_directory_on_path() -> Iterator[None]:
    directory = os.getcwd()
    importlib.invalidate_caches()  # the file may be younger than the directory listing
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have edited the path itself
            sys.path.remove(directory)


def nearest_hint(name: str, names: Iterable[str]) -> str:
    """Return " (nearest: other)", or nothing if no name is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (nearest: {close[0]})" if close else ""
