"""Rewards for the form of a completion, whatever its answer: 1.0 or 0.0."""

from qerl_jax.rewards.markers import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    HASH,
    THINK_CLOSE,
    THINK_OPEN,
    box_spans,
    visible_text,
)
from qerl_jax.rewards.quantity import parse_quantity

_TAGS = (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)


def format_tags(prompt: str, completion: str, answer: str) -> float:
    """Score exactly <think>..</think> <answer>..</answer>, each tag once and nothing around.

    A prompt that ends with <think> has given the first tag.
    """
    del answer
    text = completion.strip()
    if prompt.rstrip().endswith(THINK_OPEN):
        text = THINK_OPEN + text
    if any(text.count(tag) != 1 for tag in _TAGS):
        return 0.0
    between = text.partition(THINK_CLOSE)[2].partition(ANSWER_OPEN)[0]
    framed = text.startswith(THINK_OPEN) and text.endswith(ANSWER_CLOSE)
    return float(framed and not between.strip())


def format_hash(prompt: str, completion: str, answer: str) -> float:
    """Score a line "#### number" after the thinking; units may follow the number."""
    del answer
    lines = (line.strip() for line in visible_text(prompt, completion).splitlines())
    marked = (line.removeprefix(HASH) for line in lines if line.startswith(HASH))
    return float(any(parse_quantity(content) is not None for content in marked))


def format_boxed(prompt: str, completion: str, answer: str) -> float:
    r"""Score a complete \boxed{..} with some content, after the thinking."""
    del answer
    text = visible_text(prompt, completion)
    return float(any(text[span.inside : span.end].strip() for span in box_spans(text)))
