from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_jax.rewards.quantity import MAX_CHARACTERS, parse_quantity

DECORATIONS = [
    "{}",
    " {} \n",
    "{}.",
    "{},",
    "{}%",
    r"{}\%",
    "{} dollars per day",
    "{} km/h",
    "{} dollars/day",
    "{} square feet",
    "{} ft^2",
    "{} m\u00b2",
    "{}\u00b0C",
    r"{}^\circ",
    "({})",
    "**{}**",
    "**{}** eggs",
    "`{}`",
    "_{}_",
    '"{}"',
    "x = {}",
    "x={}",
    "${}$",
    "$x = {}$",
    r"\({}\)",
    r"\text{{{}}}",
    r"{} \text{{ dollars}}",
    r"\boxed{{{}}}",
    "#### {}",
    "The answer is {}.",
    "Answer: {}",
    "a total of {} eggs",
    "{} (exactly)",
    "{}\u5143",
    "{0} or {0}",
    "{0} dollars = {0}.00",
]


@pytest.mark.parametrize("decoration", DECORATIONS)
@given(number=st.integers(-(10**6), 10**6))
def test_decoration_is_ignored(decoration, number):
    assert parse_quantity(decoration.format(number)) == number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$70,000", 70000),
        (r"\$70,000", 70000),
        ("US$18", 18),
        ("\u20ac18", 18),
        ("$-5", -5),
        ("-$5", -5),
        ("- 5", -5),
        ("x = - 5", -5),
        ("\u22125", -5),
        (r"1{,}234", 1234),
        (r"1\,234", 1234),
        (r"10,\!080", 10080),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"\dfrac12", Fraction(1, 2)),
        (r"\frac 59", Fraction(5, 9)),
        (r"\frac9{19}", Fraction(9, 19)),
        (r"-\frac{35}{9}", Fraction(-35, 9)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        ("3/4 of the cake", Fraction(3, 4)),
        ("$18.00 = 18 dollars", 18),
    ],
)
def test_forms_of_a_number(text, value):
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eighteen",
        "18 or 20",
        "17, 18",
        "18, 18",
        "18 18",
        "18-18",
        "18 - 18",
        "18 + 0",
        "18 * 1",
        "18/1/1",
        "18 / 1",
        "18^1",
        "18^{18}",
        "18_8",
        "18!",
        "18(2)",
        "18x",
        "18i",
        "18k",
        "18 thousand",
        "18 million",
        "18 squared",
        "18 and a half",
        "18 - a",
        "x - 18",
        "x18",
        "f(18)",
        "sqrt(18)",
        "sqrt 18",
        "minus 18",
        "twice 18",
        "not 18",
        r"\sqrt{18}",
        r"18\sqrt{18}",
        r"18\pi",
        "18\u03c0",
        r"1\frac{4}{5}",
        "18\u00b2",
        "18\u00bd",
        "1\uff18",
        "3\u5341",
        "3 x 3 = 3",
        "3**3**3",
        "18:18",
        "0.0.0",
        "18 < 20",
        "~18",
        "\u224818",
        "|18|",
        "[1,2)",
        "(18, 18)",
        "1e999999999",
        "9" * 101,
        "18" + " " * MAX_CHARACTERS,
    ],
)
def test_changed_or_unclear_values_are_none(text):
    assert parse_quantity(text) is None


@given(
    left=st.integers(0, 99),
    right=st.integers(0, 99),
    operator=st.sampled_from(["+", "-", "*", "^", "/1/", "x", ",", " ", " \u00d7 ", r"\cdot "]),
    space=st.sampled_from(["", " "]),
)
def test_an_expression_is_not_one_of_its_numbers(left, right, operator, space):
    value = parse_quantity(f"{left}{space}{operator}{space}{right}")
    grouped = operator == "," and not space  # one number if the comma fits, never two
    assert value is None or (grouped and value == int(f"{left}{right}"))
