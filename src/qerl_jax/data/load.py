"""One entry to all sources of examples."""

from collections.abc import Mapping

from qerl_jax.data.arithmetic import arithmetic_examples
from qerl_jax.data.examples import CheckAnswer, Example, Fields, Part
from qerl_jax.data.messages import unknown_name
from qerl_jax.data.sources import hub_examples, jsonl_examples, reasoning_gym_examples

SOURCES = ("arithmetic", "hub", "jsonl", "reasoning_gym")


def load_examples(
    *,
    source: str,
    name: str,
    subset: str | None,
    path: str | None,
    split: str,
    size: int | None,
    seed: int,
    task: Mapping[str, int],
    question_field: str,
    answer_field: str,
    answer_marker: str | None,
    part: Part,
    check_answer: CheckAnswer | None = None,
) -> tuple[Example, ...]:
    """Load the examples of one part.

    Files and hub splits are read in order, up to `size` (None: all). Generated tasks take
    `seed` for train and `seed + 1` for eval, and no question of one part is in the other.
    `check_answer(answer, place)` sees each gold answer of a file, split or task with its place.

    Raises:
        ValueError: naming the config field, or the file and line, at fault.
        FileNotFoundError: no such file.
    """
    if size is not None and size < 1:
        raise ValueError(f"data.{part}_size: {size} is not positive")
    if seed < 0:
        raise ValueError(f"data.data_seed: {seed} is negative")
    fields = Fields(question=question_field, answer=answer_field, answer_marker=answer_marker)
    drawn = {"size": size, "seed": seed + (part == "eval"), "task": task, "part": part}
    read = {"size": size, "check_answer": check_answer}
    if source == "arithmetic":
        examples = arithmetic_examples(name, **drawn)
    elif source == "reasoning_gym":
        examples = reasoning_gym_examples(name, **drawn, check_answer=check_answer)
    elif source == "hub":
        examples = hub_examples(name, fields, subset=subset, split=split, **read)
    elif source == "jsonl":
        if path is None:
            raise ValueError(f"data.{part}_path: data.source jsonl needs the path of a file")
        examples = jsonl_examples(path, fields, **read, field=f"data.{part}_path")
    else:
        raise unknown_name("data.source", source, SOURCES)
    if not examples:
        raise ValueError(f"data: {source} {name} gave no examples for {part}")
    return examples
