r"""Where a completion states its answer: <answer>..</answer>, \boxed{..} or "#### .." of a line.

Every search is one pass over the text, so its time is linear in the length of the text.
"""

import re
from typing import NamedTuple

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
HASH = "####"

_BRACES = re.compile(r"(\\boxed\s{0,8}\{)|\{|(\})|\\.", re.DOTALL)


class Span(NamedTuple):
    """A marker that starts at `start` and whose content is text[inside:end]; characters."""

    start: int
    inside: int
    end: int


def visible_text(prompt: str, completion: str) -> str:
    """Return what a completion says after its thinking, "" if the thinking never ends.

    A prompt that ends with <think> has opened the thinking for the completion.
    """
    opened = prompt.rstrip().endswith(THINK_OPEN)
    text = THINK_OPEN + completion if opened else completion
    return text.rpartition(THINK_CLOSE)[2].partition(THINK_OPEN)[0]


def last_marker(text: str) -> str | None:
    r"""Return the content of the last complete marker of a text, or None.

    The last one is that which begins last. If it begins inside an answer tag or a box, the
    outermost of these is the marker, so that the content is judged whole: in
    "<answer>17 or \boxed{18}</answer>" it is "17 or \boxed{18}".
    """
    boxes = box_spans(text)
    tags = [tag for tag in [_last_tag(text)] if tag]
    lines = [line for line in [_last_hash(text)] if line]
    last = max([*boxes, *tags, *lines], default=None)
    if last is None:
        return None
    around = (s for s in [*boxes, *tags] if s.start <= last.start < s.end)
    outermost = min(around, default=last)
    return text[outermost.inside : outermost.end]


def box_spans(text: str) -> list[Span]:
    r"""Return every \boxed{..} with balanced braces, in the order of their ends."""
    spans, opened = [], []
    for match in _BRACES.finditer(text):
        if match[2]:
            start, inside = opened.pop() if opened else (-1, -1)
            if start >= 0:
                spans.append(Span(start, inside, match.start()))
        elif match[1]:
            opened.append((match.start(), match.end()))
        elif match[0] == "{":
            opened.append((-1, -1))
    return spans


def _last_tag(text: str) -> Span | None:
    start = text.rfind(ANSWER_OPEN, 0, max(text.rfind(ANSWER_CLOSE), 0))
    if start < 0:
        return None
    inside = start + len(ANSWER_OPEN)
    return Span(start, inside, text.index(ANSWER_CLOSE, inside))


def _last_hash(text: str) -> Span | None:
    start = text.rfind(HASH)
    if start < 0:
        return None
    end = text.find("\n", start)
    return Span(start, start + len(HASH), len(text) if end < 0 else end)
