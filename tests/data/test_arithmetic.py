import re

import pytest

from qerl_jax.data import OPERATIONS, arithmetic_examples
from qerl_jax.data.arithmetic import MAX_LISTED

TASKS = [
    ("addition", {}),
    ("subtraction", {"max_digits": 1}),
    ("multiplication", {"max_digits": 1, "max_terms": 3}),
    ("chain", {"max_digits": 1}),
    ("chain", {"min_digits": 2, "max_digits": 4, "min_terms": 3, "max_terms": 5}),
    ("addition", {"max_digits": 18}),
]


def _make(operation, task, part="train", *, size=200, seed=0):
    return arithmetic_examples(operation, size=size, seed=seed, task=task, part=part)


def _terms(question):
    return [int(term) for term in re.findall(r"\d+", question)]


def _reordered(question):
    """Return the signed terms in sorted order: the same for 17+58 and 58+17."""
    return tuple(sorted(re.findall(r"[-+*]?\d+", ("" if "*" in question else "+") + question)))


@pytest.mark.parametrize(("operation", "task"), TASKS)
def test_answers_are_right_and_questions_well_formed(operation, task):
    for example in _make(operation, task):
        assert re.fullmatch(r"\d+([-+*]\d+)+=", example.question)
        assert int(example.answer) == eval(re.sub(r"\b0+(?=\d)", "", example.question[:-1]))
        assert set(re.sub(r"[\d=]", "", example.question)) <= set(OPERATIONS[operation])


@pytest.mark.parametrize(("operation", "task"), TASKS)
def test_arguments_are_bounds_that_are_reached(operation, task):
    task = {"min_digits": 1, "max_digits": 2, "min_terms": 2, "max_terms": 2, **task}
    examples = _make(operation, task)
    terms = [_terms(example.question) for example in examples]
    lengths = [len(str(term)) for row in terms for term in row]
    assert max(lengths) == task["max_digits"]
    assert min(lengths) >= task["min_digits"]
    assert {len(row) for row in terms} == set(range(task["min_terms"], task["max_terms"] + 1))


def test_chain_has_two_or_three_terms_and_both_signs():
    questions = [example.question for example in _make("chain", {})]
    assert {len(_terms(question)) for question in questions} == {2, 3}
    assert {sign for question in questions for sign in "+-" if sign in question} == {"+", "-"}


@pytest.mark.parametrize(("operation", "task"), TASKS)
def test_questions_are_different_and_depend_on_the_seed_alone(operation, task):
    examples = _make(operation, task)
    assert len(set(examples)) == len(examples)
    assert examples == _make(operation, task)
    assert examples[:50] == _make(operation, task, size=50)
    assert examples != _make(operation, task, seed=1)


@pytest.mark.parametrize(("operation", "task"), TASKS)
def test_no_eval_problem_is_ever_in_train(operation, task):
    size = 400
    train = {
        _reordered(e.question) for s in range(3) for e in _make(operation, task, size=size, seed=s)
    }
    held_out = {
        _reordered(e.question)
        for s in range(3)
        for e in _make(operation, task, "eval", size=size, seed=s)
    }
    assert train
    assert held_out
    assert not train & held_out


def test_all_problems_of_a_small_space():
    train, held_out = (
        arithmetic_examples("addition", size=None, seed=0, task={"max_digits": 1}, part=part)
        for part in ("train", "eval")
    )
    assert {e.question for e in (*train, *held_out)} == {
        f"{a}+{b}=" for a in range(10) for b in range(10)
    }
    assert len(train) > len(held_out) > 0
    assert _make("addition", {"max_digits": 1}, size=10**6) == train


def test_one_in_five_is_held_out():
    train, held_out = (len(_make("addition", {}, part, size=10**5)) for part in ("train", "eval"))
    assert train + held_out == 10**4
    assert abs(held_out - 2000) < 200  # 5 standard deviations


def test_all_problems_of_a_large_space_are_refused():
    assert 10**6 > MAX_LISTED
    with pytest.raises(
        ValueError, match=r"^data\.train_size: null asks for all 1\.0e\+06 problems"
    ):
        _make("addition", {"max_digits": 3}, size=None)


@pytest.mark.parametrize(
    ("operation", "task", "message"),
    [
        ("adition", {}, 'data.name: "adition" is unknown; the nearest is "addition"'),
        ("addition", {"max_digit": 2}, 'data.task: "max_digit" is unknown; the nearest is "max_di'),
        ("addition", {"max_digits": 0}, r"data.task.max_digits: 0 is not in \[1, 18\]"),
        ("addition", {"max_digits": 19}, r"data.task.max_digits: 19 is not in \[1, 18\]"),
        ("addition", {"min_terms": 1}, r"data.task.min_terms: 1 is not in \[2, 64\]"),
        ("addition", {"min_digits": 3}, "data.task.min_digits: 3 exceeds max_digits, which is 2"),
        ("chain", {"min_terms": 4}, "data.task.min_terms: 4 exceeds max_terms, which is 3"),
    ],
)
def test_bad_arguments(operation, task, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        _make(operation, task)
