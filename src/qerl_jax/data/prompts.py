"""From examples to prompts in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from qerl_jax.data.examples import Example
from qerl_jax.data.messages import first_line

PLACEHOLDER = "{question}"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as the model sees it, and the gold answer of its example."""

    text: str
    ids: tuple[int, ...]  # tokens
    answer: str


def build_prompt(
    example: Example,
    *,
    prompt_template: str,
    chat_template: bool,
    system_prompt: str | None,
    tokenizer: Any,
) -> tuple[str, list[int]]:
    """Return the text of a prompt and its token ids.

    The question takes the place of "{question}" in the template; other braces, of template and
    question, stay as they are. With `chat_template` the result is the user's turn in the
    tokenizer's own template, after `system_prompt` if there is one, up to where the model's turn
    begins. No special token is added beyond what the text spells: a beginning-of-text token is
    there only if the chat template or `prompt_template` writes it.

    Raises:
        ValueError: the template does not hold "{question}" once, the tokenizer has no chat
            template, or a system prompt is given without one.
    """
    if prompt_template.count(PLACEHOLDER) != 1:
        count = prompt_template.count(PLACEHOLDER)
        raise ValueError(f"data.prompt_template: holds {PLACEHOLDER} {count} times, not once")
    text = prompt_template.replace(PLACEHOLDER, example.question)
    if chat_template:
        text = _chat_text(text, system_prompt, tokenizer)
    elif system_prompt is not None:
        raise ValueError("data.system_prompt: has no place without data.chat_template: true")
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _chat_text(text: str, system_prompt: str | None, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise ValueError("data.chat_template: the tokenizer of this model has no chat template")
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    turns = [*system, {"role": "user", "content": text}]
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program and may raise anything
        raise ValueError(f"data.chat_template: the template fails: {first_line(error)}") from error


def encode_prompts(
    examples: Sequence[Example],
    tokenizer: Any,
    *,
    prompt_template: str,
    chat_template: bool,
    system_prompt: str | None,
    max_prompt_tokens: int,
) -> tuple[tuple[Prompt, ...], int]:
    """Return the prompts of at most `max_prompt_tokens` tokens, and how many were dropped.

    Raises:
        ValueError: as `build_prompt`; a prompt of no tokens; every prompt is too long.
    """
    prompts, dropped = [], []
    for example in examples:
        text, ids = build_prompt(
            example,
            prompt_template=prompt_template,
            chat_template=chat_template,
            system_prompt=system_prompt,
            tokenizer=tokenizer,
        )
        if not ids:
            raise ValueError(f"data: the tokenizer gives no token for the prompt {text!r}")
        if len(ids) > max_prompt_tokens:
            dropped.append(len(ids))
        else:
            prompts.append(Prompt(text=text, ids=tuple(ids), answer=example.answer))
    if not prompts:
        raise ValueError(
            f"data.max_prompt_tokens: all {len(dropped)} prompts are longer than "
            f"{max_prompt_tokens} tokens; the shortest has {min(dropped, default=0)}"
        )
    return tuple(prompts), len(dropped)


def left_pad(
    sequences: Sequence[Sequence[int]], length: int, pad_id: int
) -> tuple[Int[np.ndarray, "batch prompt"], Bool[np.ndarray, "batch prompt"]]:
    """Return int32 ids and the mask of real tokens, each row filled up on the left.

    The mask comes from the lengths: `pad_id` may be a token of the text, too.

    Raises:
        ValueError: a sequence is longer than `length` (tokens).
    """
    ids = np.full((len(sequences), length), pad_id, np.int32)
    mask = np.zeros((len(sequences), length), bool)
    for row, sequence in enumerate(sequences):
        if len(sequence) > length:
            raise ValueError(f"left_pad: row {row} has {len(sequence)} tokens, over {length}")
        start = length - len(sequence)
        ids[row, start:] = sequence
        mask[row, start:] = True
    return ids, mask
