"""Questions with gold answers, from any source."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

# (answer, place) -> None, or ValueError naming the place: a check of each gold answer.
CheckAnswer = Callable[[str, str], None]
Part = Literal["train", "eval"]


@dataclass(frozen=True)
class Example:
    """A question and its gold answer, as plain text."""

    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Where a row of a file or of a hub data set holds the question and the answer."""

    question: str = "question"
    answer: str = "answer"
    answer_marker: str | None = None  # the gold answer is what follows its last occurrence


def example_from_row(row: object, fields: Fields, *, place: str) -> Example:
    """Read one row.

    Text before the last `answer_marker` and, with a marker, thousands commas are dropped from
    the answer: "...\\n#### 1,234" becomes "1234". Whitespace around both texts is dropped.

    Raises:
        ValueError: not a mapping, a missing field or marker, a value that is no text or number,
            an empty question; the message starts with `place`.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: expected an object, got {type(row).__name__}")
    question = _text(row, fields.question, place)
    if not question:
        raise ValueError(f'{place}: field "{fields.question}" is empty')
    answer = _text(row, fields.answer, place)
    if fields.answer_marker:
        _, found, answer = answer.rpartition(fields.answer_marker)
        if not found:
            raise ValueError(f'{place}: field "{fields.answer}" has no "{fields.answer_marker}"')
        answer = answer.replace(",", "").strip()
    return Example(question=question, answer=answer)


def _text(row: Mapping, field: str, place: str) -> str:
    if field not in row:
        raise ValueError(f'{place}: no field "{field}"; it has {", ".join(map(str, row))}')
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f'{place}: field "{field}" is {type(value).__name__}, not text')
    text = str(value).strip()
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, tokenizers fail on it
        raise ValueError(f'{place}: field "{field}" is not valid Unicode') from None
    return text
