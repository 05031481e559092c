"""Sources of examples outside the package: JSONL files, the Hugging Face hub, reasoning-gym."""

import dataclasses
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from qerl_jax.data.examples import CheckAnswer, Example, Fields, Part, example_from_row
from qerl_jax.data.messages import first_line, unknown_name
from qerl_jax.data.split import part_of


def jsonl_examples(
    path: str | Path,
    fields: Fields,
    *,
    size: int | None = None,
    check_answer: CheckAnswer | None = None,
    field: str = "path",
) -> tuple[Example, ...]:
    """Read the first `size` rows (None: all) of a .jsonl or .jsonl.gz file, UTF-8.

    Blank lines are passed over. `field` is what named the file, for the message that there is
    none.

    Raises:
        FileNotFoundError: no such file.
        ValueError: "path:LINE: ..." for a bad line, a broken gzip file, or no example at all.
    """
    path = Path(os.path.expanduser(path))
    if path.is_dir():
        raise ValueError(f"{field}: {path}: is a folder, not a file")
    if not path.is_file():
        raise FileNotFoundError(f"{field}: {path}: no such file")
    examples = []
    for number, line in itertools.islice(_lines(path), size):
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            reason = getattr(error, "msg", error)
            raise ValueError(f"{place}: not valid JSON ({reason})") from None
        except RecursionError:
            raise ValueError(f"{place}: not valid JSON (nested too deeply)") from None
        examples.append(_checked(example_from_row(row, fields, place=place), place, check_answer))
    if not examples:
        raise ValueError(f"{path}: holds no examples")
    return tuple(examples)


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Give (number from 1, text) of each line that is not blank."""
    opener = gzip.open if str(path).endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{number}: not valid UTF-8 ({error.reason})") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}:{number + 1}: broken gzip file ({error})") from None


def hub_examples(
    name: str,
    fields: Fields,
    *,
    subset: str | None,
    split: str,
    size: int | None = None,
    check_answer: CheckAnswer | None = None,
) -> tuple[Example, ...]:
    """Read the first `size` rows (None: all) of a split of a Hugging Face data set.

    Raises:
        ValueError: the data set cannot be loaded, or a row is bad.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError('data.source: hub needs the package "datasets"') from None
    try:
        rows = load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises its own, urllib's, httpx's and more
        raise ValueError(
            f"data.name: {name} (subset {subset}, split {split}) cannot be loaded from the hub: "
            f"{first_line(error)}; without network save it as a file and set data.source: jsonl"
        ) from error
    examples = []
    for index, row in enumerate(itertools.islice(rows, size)):
        place = f"{name} {split} row {index}"
        examples.append(_checked(example_from_row(row, fields, place=place), place, check_answer))
    return tuple(examples)


def reasoning_gym_examples(
    name: str,
    *,
    size: int | None,
    seed: int,
    task: Mapping[str, int],
    part: Part,
    check_answer: CheckAnswer | None = None,
) -> tuple[Example, ...]:
    """Generate `size` examples of a reasoning-gym task; questions of a small task may repeat.

    Example i depends on the seed, the task and i, not on `size`. Only the question and the gold
    answer are taken: the package's own scores are not binary and can be gamed.

    Raises:
        ValueError: the package is missing, the task, an argument or its value is bad, or the
            part yields too few examples.
    """
    if size is None:
        raise ValueError(f"data.{part}_size: null; reasoning_gym never ends, so give a number")
    dataset = _open_task(name, task, seed=_mixed(seed), length=50 * size + 1000)
    examples = []
    for index in range(len(dataset)):
        item = dataset[index]
        # The package seeds item i with seed + i, so that the seeds of train and eval alone would
        # give both parts the same items, shifted.
        if part_of(item["question"]) == part:
            place = f"{name} item {index}"
            example = example_from_row(item, Fields(), place=place)
            examples.append(_checked(example, place, check_answer))
            if len(examples) == size:
                return tuple(examples)
    raise ValueError(
        f"data.{part}_size: {size} exceeds the {len(examples)} examples that {name} gave for {part}"
    )


def _open_task(name: str, task: Mapping[str, int], *, seed: int, length: int):
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            'data.source: reasoning_gym needs the package "reasoning-gym" '
            f"(pip install -e '.[gym]'): {first_line(error)}"
        ) from error
    if name not in DATASETS:
        raise unknown_name("data.name", name, DATASETS)
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for argument in task:
        if argument not in known:
            raise unknown_name("data.task", argument, known)
    try:
        return reasoning_gym.create_dataset(name, size=length, seed=seed, **task)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"data.task: {name} refuses {dict(task)}: {first_line(error)}") from error


def _mixed(seed: int) -> int:
    """Spread seeds apart: with the package's seed + i, neighbours would share most items."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) % 2**31


def _checked(example: Example, place: str, check_answer: CheckAnswer | None) -> Example:
    if check_answer is not None:
        check_answer(example.answer, place)
    return example
