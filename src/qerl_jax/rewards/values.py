"""Exact values of numbers in text: Fractions, never floats, in time linear in the text."""

import re
from collections import deque
from fractions import Fraction

# Longer numbers and larger exponents are no number: model text must not buy big arithmetic.
MAX_NUMBER_CHARACTERS = 100
MAX_EXPONENT = 100

# Every tail is optional and starts with its own character, so the pattern never backtracks.
NUMBER = (
    r"(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)"  # 12  1,234  1.5  18.  .5
    r"(?:[eE][+-]?[0-9]+)?"
    r"(?:/[0-9]+)?"
)
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+")
_SIGNED = re.compile(rf"([+-]?)\$?({NUMBER})")
# A minus between two terms, or a hyphen, is no sign. Neither is one after a full stop: 2.-3.
_IN_TEXT = re.compile(rf"((?<![\w.)\]}}])[+-])?\$?({NUMBER})")
_MINUS_SIGNS = dict.fromkeys(map(ord, "\u2212\u2013\ufe63\uff0d"), "-")


def number_value(token: str) -> Fraction | None:
    """Return the exact value of a match of NUMBER, or None if it has none.

    None: misplaced thousands commas ("17,18"), a fraction of anything but two integers, a zero
    denominator, more than MAX_NUMBER_CHARACTERS or MAX_EXPONENT.
    """
    if len(token) > MAX_NUMBER_CHARACTERS:
        return None
    upper, slash, lower = token.partition("/")
    mantissa, _, exponent = upper.lower().partition("e")
    whole, point, decimals = mantissa.partition(".")
    if "," in whole and not _GROUPED.fullmatch(whole):
        return None
    if slash and (point or exponent or int(lower) == 0):
        return None
    power = int(exponent or 0)
    if abs(power) > MAX_EXPONENT:
        return None
    digits = int(whole.replace(",", "") + decimals)
    return Fraction(digits, int(lower or 1)) * Fraction(10) ** (power - len(decimals))


def plain_minus(text: str) -> str:
    """Replace the typographic minus signs (U+2212 and dashes) by "-"."""
    return text.translate(_MINUS_SIGNS)


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else, or None.

    Surrounding whitespace, a sign, a dollar sign, thousands commas, decimals, exponents and a
    fraction of two integers are parts of a number: " 18.0", "$1,234", "72.", "-5", "1/2".
    """
    match = _SIGNED.fullmatch(plain_minus(text.strip()))
    return _signed_value(match) if match else None


def find_last_number(text: str) -> Fraction | None:
    """Return the value of the last number anywhere in a text; None: none, or a malformed one."""
    last = deque(_IN_TEXT.finditer(plain_minus(text)), maxlen=1)
    return _signed_value(last[0]) if last else None


def _signed_value(match: re.Match[str]) -> Fraction | None:
    value = number_value(match[2])
    return -value if value is not None and match[1] == "-" else value
