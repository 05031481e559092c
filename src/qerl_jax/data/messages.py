"""Pieces of one-line error messages."""

import difflib
from collections.abc import Iterable


def unknown_name(place: str, name: str, valid: Iterable[str]) -> ValueError:
    """Make the error of a name outside a closed set, with the nearest valid one.

    The whole set is listed if it is short.
    """
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1)
    message = f'{place}: "{name}" is unknown'
    if near:
        message += f'; the nearest is "{near[0]}"'
    if len(names) <= 12:
        message += f"; known: {', '.join(names) or 'none'}"
    return ValueError(message)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or its type if it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
