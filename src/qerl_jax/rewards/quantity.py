"""One number with its decoration: "$18 per day", "x = 5", "50%", "**1{,}234** eggs".

Units, currency and words around the number are ignored. What could change its value is not:
operators, functions, scale words or a second, different number leave no value at all.
"""

import re
from fractions import Fraction

from qerl_jax.rewards.values import NUMBER, number_value, plain_minus

MAX_CHARACTERS = 500  # a longer text is no single quantity

_CURRENCY = "$\u20ac\u00a3\u00a5\u20b9"  # dollar, euro, pound, yen, rupee
_QUOTES = "'\"`\u2018\u2019\u201c\u201d"
_TOKEN = re.compile(rf"(?:([+-])(\s*))?(?:([{_CURRENCY}])\s*(-?))?({NUMBER})")
_BEFORE = frozenset(f"{_CURRENCY}{_QUOTES}=:.,;([{{")
_BETWEEN = frozenset(f"{_CURRENCY}=%\u00b0")
_AFTER = frozenset(f"{_CURRENCY}{_QUOTES}=:.,;()[]{{}}%\u00b0?!/-")
_OPENS = frozenset(f"{_QUOTES}=:([{{")  # may touch the sign or the first digit

_CHANGES_NEXT = re.compile(
    r"\b(?:sqrt|root|log|ln|exp|sin|cos|tan|abs|not|minus|negative|plus|times|over"
    r"|half|twice|double|triple)\b|[^\W\d]\(",  # f(18) is a function
    re.IGNORECASE,
)
_CHANGES_LAST = re.compile(
    r"^\s*[xyznie]\b|^[!({[-]|\b(?:squared|cubed|factorial|half|halves|plus|minus|pi|k"
    r"|hundreds?|thousands?|[mbtr]illions?|mn|bn)\b",  # 18x, 18!, 18(2), 18-a, 18k
    re.IGNORECASE,
)
# A slash or a hyphen within a word is a unit ("km/h"); elsewhere it is an operator.
_OPERATOR = re.compile(r"[/-](?![^\W\d_])|(?<![^\W\d_])[/-]")

_LENGTHS = "mm|cm|dm|m|km|ft|foot|feet|in|inch|inches|yd|yards?|meters?|metres?|miles?"

_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"####|</?answer>|\\[()\[\]]", " "),
        (r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox|boxed)(?=[\s{])", " "),
        (r"\*\*([^*]+)\*\*", r" \1 "),
        (r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9]{3}(?![0-9]))", ","),
        (r"\\[dt]?frac\s*(?:\{(-?[0-9]+)\}|([0-9]))\s*(?:\{([0-9]+)\}|([0-9]))", r" \1\2/\3\4 "),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree", "\u00b0"),
        (rf"\\([%{_CURRENCY}])", r"\1"),
        (rf"(?<![^\W\d])({_LENGTHS})\s?(?:\^\s?(?:[23]|\{{[23]\}})|[\u00b2\u00b3])", r"\1"),
        (r"\\[,;:! ]", " "),
    )
)


def parse_quantity(text: str) -> Fraction | None:
    r"""Return the exact value of a text that holds one number, or None.

    Equal numbers joined by "=" or "or" count as one ("$18.00 = 18 dollars"); percent signs are
    units (50% is 50). Simple LaTeX is read: \frac{1}{2}, \text{...}, 1{,}234, 90^\circ, \$.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    plain = _rewrite(text)
    if any(c.isnumeric() and not c.isascii() for c in plain):  # other scripts, powers, halves
        return None
    tokens = list(_TOKEN.finditer(plain))
    if not tokens:
        return None
    edges = [0, *(edge for token in tokens for edge in token.span()), len(plain)]
    before, *gaps, after = (plain[edges[i] : edges[i + 1]] for i in range(0, len(edges), 2))
    if not (_fits_before(before, tokens[0]) and _fits_after(after) and all(map(_joins, gaps))):
        return None
    values = {_token_value(token) for token in tokens}
    return values.pop() if len(values) == 1 else None


def _rewrite(text: str) -> str:
    plain = plain_minus(text)
    for pattern, replacement in _REWRITES:
        plain = pattern.sub(replacement, plain)
    return plain.strip(" \t\r\n*_`")


def _token_value(token: re.Match[str]) -> Fraction | None:
    sign, _, _, inner_sign, number = token.groups()
    value = number_value(number)
    if value is None or (sign and inner_sign):
        return None
    return -value if "-" in (sign, inner_sign) else value


def _words_and(allowed: frozenset[str], text: str) -> bool:
    return all(c.isspace() or (c.isalpha() and c != "\u03c0") or c in allowed for c in text)


def _fits_before(text: str, token: re.Match[str]) -> bool:
    """Tell whether the text before the first number leaves its value alone."""
    if not _words_and(_BEFORE, text) or _CHANGES_NEXT.search(text):
        return False
    sign, space, currency, _, _ = token.groups()
    if sign and space:  # "x - 5" is a difference, "x = - 5" is not
        return not text.strip() or text.rstrip()[-1] in _OPENS
    if not text or text[-1].isspace() or text[-1] in _OPENS or not text[-1].isascii():
        return True
    return currency is not None and sign is None  # "US$18", but not "x18" or "x-18"


def _fits_after(text: str) -> bool:
    """Tell whether the text after the last number leaves its value alone."""
    changed = _CHANGES_LAST.search(text) or _OPERATOR.search(text)
    return _words_and(_AFTER, text) and not changed


def _joins(gap: str) -> bool:
    """Tell whether the text between two numbers says that they are the same."""
    changed = _CHANGES_LAST.search(gap) or _CHANGES_NEXT.search(gap)
    says_same = "=" in gap or re.search(r"\bor\b", gap)
    return _words_and(_BETWEEN, gap) and not changed and bool(says_same)
