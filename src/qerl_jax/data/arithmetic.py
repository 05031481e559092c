"""Synthetic arithmetic: "17+58=" with the answer "75"."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from qerl_jax.data.batches import epoch_order
from qerl_jax.data.examples import Example, Part
from qerl_jax.data.messages import unknown_name
from qerl_jax.data.split import part_of

# Operation -> the signs that may stand between two terms.
OPERATIONS: Mapping[str, str] = {
    "addition": "+",
    "chain": "+-",
    "multiplication": "*",
    "subtraction": "-",
}
# Up to this many problems are listed and shuffled, more are drawn.
MAX_LISTED = 200_000
_LIMITS = {"min_digits": 18, "max_digits": 18, "min_terms": 64, "max_terms": 64}


@dataclass(frozen=True)
class _Space:
    """All problems of an operation with given arguments."""

    signs: str
    low: int  # smallest term
    high: int  # largest term
    min_terms: int
    max_terms: int

    @property
    def size(self) -> int:
        values, signs = self.high - self.low + 1, len(self.signs)
        terms = range(self.min_terms, self.max_terms + 1)
        return sum(values**count * signs ** (count - 1) for count in terms)


def arithmetic_examples(
    operation: str, *, size: int | None, seed: int, task: Mapping[str, int], part: Part
) -> tuple[Example, ...]:
    """Generate different problems of one part, at most `size` (None: all of them).

    The arguments are min_digits and max_digits, decimal digits of a term (default 1 to 2; one
    digit includes 0), and min_terms and max_terms (default 2, for "chain" 2 to 3). Terms are
    uniform over their integers. Of up to MAX_LISTED problems all are equally likely, so that
    longer ones prevail; beyond it the number of terms is uniform. Reordered terms (17+58,
    58+17) count as one problem for the split between train and eval. Problem i depends on the
    seed, the arguments and i. Fewer come back if there are fewer.

    Raises:
        ValueError: an unknown operation or argument, a value out of range, or a size that the
            part cannot give.
    """
    space = _space(operation, task)
    if space.size <= MAX_LISTED:
        listed = [p for p in _all_problems(space) if part_of(_canonical(p)) == part]
        chosen = [listed[i] for i in epoch_order(len(listed), seed=seed, epoch=0)[:size]]
    elif size is None:
        raise ValueError(
            f"data.{part}_size: null asks for all {space.size:.1e} problems of {operation}; "
            f"give a number of examples"
        )
    else:
        chosen = _draw(space, np.random.default_rng(seed), size, part)
    return tuple(_example(problem) for problem in chosen)


# A problem is its terms with the sign before each: (("", 17), ("+", 58)).
_Problem = tuple[tuple[str, int], ...]


def _space(operation: str, task: Mapping[str, int]) -> _Space:
    if operation not in OPERATIONS:
        raise unknown_name("data.name", operation, OPERATIONS)
    default = {"min_digits": 1, "max_digits": 2, "min_terms": 2, "max_terms": 2}
    if operation == "chain":
        default["max_terms"] = 3
    for name, value in task.items():
        if name not in default:
            raise unknown_name("data.task", name, default)
        lowest = 2 if name.endswith("terms") else 1
        if not lowest <= value <= _LIMITS[name]:
            raise ValueError(f"data.task.{name}: {value} is not in [{lowest}, {_LIMITS[name]}]")
    args = {**default, **task}
    for unit in ("digits", "terms"):
        low, high = args[f"min_{unit}"], args[f"max_{unit}"]
        if low > high:
            raise ValueError(f"data.task.min_{unit}: {low} exceeds max_{unit}, which is {high}")
    return _Space(
        signs=OPERATIONS[operation],
        low=0 if args["min_digits"] == 1 else 10 ** (args["min_digits"] - 1),
        high=10 ** args["max_digits"] - 1,
        min_terms=args["min_terms"],
        max_terms=args["max_terms"],
    )


def _all_problems(space: _Space) -> Iterator[_Problem]:
    values = range(space.low, space.high + 1)
    for count in range(space.min_terms, space.max_terms + 1):
        for signs in itertools.product(space.signs, repeat=count - 1):
            for terms in itertools.product(values, repeat=count):
                yield tuple(zip(("", *signs), terms, strict=True))


def _draw(space: _Space, rng: np.random.Generator, size: int, part: Part) -> list[_Problem]:
    """Draw different problems of a part; a dict keeps their order."""
    drawn: dict[_Problem, None] = {}
    for _ in range(50 * size + 1000):
        count = int(rng.integers(space.min_terms, space.max_terms, endpoint=True))
        signs = (space.signs[i] for i in rng.integers(len(space.signs), size=count - 1))
        terms = rng.integers(space.low, space.high, size=count, endpoint=True)
        problem = tuple(zip(("", *signs), map(int, terms), strict=True))
        if part_of(_canonical(problem)) == part:
            drawn[problem] = None
            if len(drawn) == size:
                return list(drawn)
    raise ValueError(f"data.{part}_size: {size} exceeds the {len(drawn)} different problems found")


def _canonical(problem: _Problem) -> str:
    """Return one text for all orders of the terms; the first term of a sum is a "+" term."""
    first = "*" if problem[1][0] == "*" else "+"
    return " ".join(sorted(f"{sign or first}{term}" for sign, term in problem))


def _example(problem: _Problem) -> Example:
    terms = [-term if sign == "-" else term for sign, term in problem]
    total = math.prod(terms) if problem[1][0] == "*" else sum(terms)
    text = "".join(f"{sign}{term}" for sign, term in problem)
    return Example(question=f"{text}=", answer=str(total))
