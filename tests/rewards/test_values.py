from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_jax.rewards.values import find_last_number, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        (" 18\n", 18),
        ("72.", 72),
        ("1,234", 1234),
        ("$18", 18),
        ("18.0", 18),
        ("-5", -5),
        ("+5", 5),
        ("\u22125", -5),
        ("-$5", -5),
        (".5", Fraction(1, 2)),
        ("007", 7),
        ("1,234,567.25", Fraction("1234567.25")),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("-6/4", Fraction(-3, 2)),
    ],
)
def test_number_has_its_exact_value(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        ".",
        "18 eggs",
        "1 8",
        "17,18",
        "1,23",
        "0,123",
        "1,2345",
        "--5",
        "1.2.3",
        "1/0",
        "1.5/2",
        "1/2/3",
        "0x12",
        "1_000",
        "\u0661\u0668",
        "NaN",
        "inf",
        "1e101",
        "1e999999999",
        "1" * 101,
    ],
)
def test_anything_else_is_no_number(text):
    assert parse_number(text) is None


def test_hundred_digits_are_exact():
    assert parse_number("9" * 100) == 10**100 - 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 18.", 18),
        ("20 or 18", 18),
        ("16-3=13", 13),
        ("10-20", 20),
        ("below zero: -5.", -5),
        ("it costs -$1,200.50!", Fraction(-2401, 2)),
        ("3/4 of it", Fraction(3, 4)),
        ("no number", None),
        ("18 or 17,18", None),
    ],
)
def test_last_number_of_a_text(text, value):
    assert find_last_number(text) == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9)))
def test_decimals_are_exact(number):
    assert parse_number(f"{number:f}"[:100]) == Fraction(f"{number:f}"[:100])


@given(st.integers(-(10**30), 10**30))
def test_thousands_commas_change_nothing(number):
    assert parse_number(f"{number:,}") == parse_number(str(number)) == number
