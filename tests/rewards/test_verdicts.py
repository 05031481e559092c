"""The rewards that judge a number. The cases of golden/answer_cases.jsonl were written by hand;
its policy: the content of the last marker after the thinking, units ignored, no tolerance."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_jax.rewards import (
    NUMBER_REWARDS,
    REWARDS,
    exact_number,
    last_number,
    marked_number,
    validate_answer,
)

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "golden" / "answer_cases.jsonl").open(encoding="utf-8")
]
# Cases of the other style whose gold is one number, or whose verdict is "wrong".
NUMBERS = {"s25", "s26", "s27", "s28", "s31", "s33", "s36", "s38", "s39"}
JUDGED = [case for case in CASES if case["style"] == "gsm8k" or case["id"] in NUMBERS]

MARKERS = ["#### {}", "<answer>{}</answer>", r"so \boxed{{{}}}.", "#### {}\n"]
FORMS = {
    "exact_number": ["{}", " {}\n"],
    "marked_number": [f"9 * 2 = 7 {marker}" for marker in MARKERS],
    "last_number": ["I say 7, then {}.", *MARKERS],
}
EVERY_FORM = [(name, form) for name, forms in FORMS.items() for form in forms]
FRAGMENTS = [
    *("<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "}", "{", "####", "\n", " "),
    *("18", "-", "\u2212", "$", ",", ".", "/", "\\frac", "%", "or", "=", "^", "e9", "**", "\u00b2"),
]


@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case["id"])
def test_answer_cases(case):
    assert marked_number("", case["output"], case["gold"]) == float(case["verdict"]), case["note"]


def test_all_gsm8k_cases_are_judged():
    assert sum(case["style"] == "gsm8k" for case in JUDGED) == 25


def test_no_answer_case_is_right_by_mistake():
    wrong = [case for case in CASES if not case["verdict"]]
    assert not any(marked_number("", case["output"], case["gold"]) for case in wrong)


@pytest.mark.parametrize("case", [c for c in CASES if c.get("verdict_lenient")])
def test_lenient_cases(case):
    assert last_number("", case["output"], case["gold"]) == 1.0


@pytest.mark.parametrize(("name", "form"), EVERY_FORM)
@pytest.mark.parametrize(
    ("said", "gold"),
    [
        ("72.", "72"),
        ("1,234", "1234"),
        ("$18", "18"),
        ("18.0", "18"),
        ("18", "18.0"),
        ("-5", "-5"),
        ("\u22125", "-5"),
        ("1234", "1,234"),
        ("18", "$18"),
        ("0.5", "1/2"),
    ],
)
def test_equal_values_in_other_forms_are_right(name, form, said, gold):
    assert REWARDS[name]("", form.format(said), gold) == 1.0


@pytest.mark.parametrize(("name", "form"), EVERY_FORM)
@pytest.mark.parametrize(
    ("said", "gold"),
    [
        ("1,234", "1"),
        ("\u22125", "5"),
        ("-5", "5"),
        ("18", "10"),  # the same first character
        ("", "18"),
        ("180", "18"),
        ("3.18", "18"),
        ("17.999999999999999999", "18"),
        ("0.333333333333333333333", "1/3"),
        ("18e1", "18"),
    ],
)
def test_other_values_are_wrong(name, form, said, gold):
    assert REWARDS[name]("", form.format(said), gold) == 0.0


@pytest.mark.parametrize("name", sorted(NUMBER_REWARDS))
@pytest.mark.parametrize("gold", ["", "eighteen", "18 or 20", "1,2", r"\sqrt{18}", "[18,20)"])
def test_unusable_gold_never_scores(name, gold):
    for form in ("{}", *MARKERS):
        for said in (gold, "18", "20", ""):
            assert REWARDS[name]("", form.format(said), gold) == 0.0
    with pytest.raises(ValueError, match=r"^data\.jsonl:7: the gold answer .* is not one number$"):
        validate_answer(gold, "data.jsonl:7")


@pytest.mark.parametrize("gold", ["18", "-5", "1,234", "18.0", "$18", "50%", "1/2"])
def test_usable_gold_passes(gold):
    validate_answer(gold, "data.jsonl:7")


def test_a_long_gold_is_cut_in_the_message():
    with pytest.raises(ValueError) as raised:
        validate_answer("words " * 1000, "data.jsonl:7")
    assert len(str(raised.value)) < 120


def test_exact_number_is_the_whole_completion():
    assert exact_number("", "18", "18") == 1.0
    for completion in ("18 eggs", "= 18", "#### 18", "18 18", "1 8", "18?"):
        assert exact_number("", completion, "18") == 0.0


def test_thinking_opened_by_the_prompt_must_end():
    assert marked_number("think: <think>", "#### 18", "18") == 0.0
    assert marked_number("think: <think>", "18</think>#### 18", "18") == 1.0
    assert last_number("think: <think>", "18", "18") == 0.0


@pytest.mark.parametrize(("name", "form"), EVERY_FORM)
@given(said=st.integers(-200, 200), gold=st.integers(-200, 200))
def test_right_if_and_only_if_equal(name, form, said, gold):
    assert REWARDS[name]("", form.format(said), str(gold)) == float(said == gold)


@pytest.mark.parametrize("name", sorted(REWARDS))
@given(
    completion=st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map("".join)),
    answer=st.one_of(st.text(), st.just("18")),
)
def test_any_text_gets_zero_or_one(name, completion, answer):
    assert REWARDS[name]("", completion, answer) in (0.0, 1.0)


LONG = 100_000
HOSTILE = {
    "digits": "1" * LONG,
    "commas": "1," * LONG,
    "points": "1." * LONG,
    "slashes": "1/" * LONG,
    "exponents": "1e" * LONG,
    "minuses": "-" * LONG,
    "dollars": "$" * LONG,
    "open boxes": "\\boxed{" * LONG,
    "nested boxes": "\\boxed{" * LONG + "18" + "}" * LONG,
    "nested braces": "\\boxed{" + "{" * LONG + "18" + "}" * LONG + "}",
    "backslashes": "\\" * LONG,
    "tags": "<answer>" * LONG + "</answer>",
    "empty tags": "<answer></answer>" * LONG,
    "thinking": "<think>" * LONG + "</think>" * LONG,
    "hashes": "#" * LONG,
    "empty lines": "####\n" * LONG,
    "spaces": "#### " + " " * LONG + "17",
    "stars": "#### " + "*" * LONG,
    "short stars": "#### " + "**a" * 160,
    "short spaces": "#### " + "- " * 240,
    "power": "#### 1e999999999",
    "small power": "#### 1e-999999999",
    "fraction": "#### 1/" + "9" * 5000,
    "tower": r"\boxed{9^{9^{9^{9}}}}",
}


# Quadratic time would take minutes here, a power that is computed for ever.
@pytest.mark.parametrize("name", sorted(NUMBER_REWARDS))
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_is_wrong_at_once(name, text):
    assert REWARDS[name]("", text, "17.5") == 0.0
    assert REWARDS[name]("", "#### 18", text) == 0.0
