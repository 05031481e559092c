"""Rewards that say whether the number in a completion is the gold answer: 1.0 or 0.0, exactly.

All compare exact values, so 18, 18.0 and 36/2 are equal and 17.999 is not 18. A gold answer
that is not one number never scores; `validate_answer` refuses it when the data are loaded.
"""

from fractions import Fraction

from qerl_jax.rewards.markers import last_marker, visible_text
from qerl_jax.rewards.quantity import parse_quantity
from qerl_jax.rewards.values import find_last_number, parse_number

# The rewards of this file: they need a gold answer that is one number.
NUMBER_REWARDS = frozenset({"exact_number", "last_number", "marked_number"})


def exact_number(prompt: str, completion: str, answer: str) -> float:
    """Score a completion that is the gold number and nothing else, apart from whitespace."""
    del prompt
    return _verdict(parse_number(completion), answer)


def marked_number(prompt: str, completion: str, answer: str) -> float:
    r"""Score the last <answer>..</answer>, \boxed{..} or "#### .." line after the thinking.

    Text outside the marker never counts; units, currency, percent signs and thousands commas in
    it are ignored; two different values in it are no answer.
    """
    marked = last_marker(visible_text(prompt, completion))
    return _verdict(None if marked is None else parse_quantity(marked), answer)


def last_number(prompt: str, completion: str, answer: str) -> float:
    """Score the last number anywhere after the thinking.

    Lenient: it needs no marker, reads "20 or 18" as 18, and can be right by luck. Useful to
    measure a model that was never taught a format; prefer `marked_number` to train on.
    """
    return _verdict(find_last_number(visible_text(prompt, completion)), answer)


def validate_answer(answer: str, place: str) -> None:
    """Refuse a gold answer that is not one number.

    Args:
        answer: the gold answer.
        place: where it stands, for the message, e.g. "train.jsonl:7".

    Raises:
        ValueError: it is not.
    """
    if parse_quantity(answer) is None:
        shown = answer if len(answer) <= 40 else f"{answer[:40]}..."
        raise ValueError(f"{place}: the gold answer {shown!r} is not one number")


def _verdict(value: Fraction | None, answer: str) -> float:
    return float(value is not None and value == parse_quantity(answer))
