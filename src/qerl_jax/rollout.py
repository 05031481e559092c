"""From prompts to a scored rollout: generate, decode, reward. Host code over NumPy arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from qerl_jax.data import Prompt, decode_completion, left_pad
from qerl_jax.models import TokenBatch
from qerl_jax.sampling import Completions

# (prompt_ids, prompt_mask, sample_ids) -> Completions
GenerateFn = Callable[..., Completions]
# (prompt text, completion text, gold answer) -> (total, {name: value})
ScoreFn = Callable[[str, str, str], tuple[float, Mapping[str, float]]]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Completions of some prompts, row = prompt * num_generations + generation."""

    prompt_ids: Int[np.ndarray, "batch prompt"]
    prompt_mask: Bool[np.ndarray, "batch prompt"]
    completion_ids: Int[np.ndarray, "batch completion"]
    completion_mask: Bool[np.ndarray, "batch completion"]  # built from lengths, not from ids
    sampler_logprobs: Float[np.ndarray, "batch completion"]
    finished: Bool[np.ndarray, " batch"]  # ended by an end token
    texts: tuple[str, ...]
    rewards: Float[np.ndarray, " batch"]
    reward_parts: Mapping[str, Float[np.ndarray, " batch"]]

    @property
    def lengths(self) -> Int[np.ndarray, " batch"]:
        """Completion lengths in tokens, the end token included."""
        return self.completion_mask.sum(axis=1)

    @property
    def tokens(self) -> TokenBatch:
        """The same rows as device arrays."""
        return TokenBatch(
            prompt_ids=jnp.asarray(self.prompt_ids),
            prompt_mask=jnp.asarray(self.prompt_mask),
            completion_ids=jnp.asarray(self.completion_ids),
            completion_mask=jnp.asarray(self.completion_mask),
        )


def roll_out(
    prompts: Sequence[Prompt],
    generate_fn: GenerateFn,
    score_fn: ScoreFn,
    tokenizer,
    *,
    num_generations: int,
    prompt_width: int,
    pad_id: int,
    sample_ids: Int[np.ndarray, " batch"] | None = None,
) -> Rollout:
    """Sample `num_generations` completions of each prompt and score them.

    `prompt_width` (tokens) is the fixed width of the padded prompts, one for the whole run, so
    that generation compiles once. `sample_ids` (default: the row number) choose the random
    draws of each row.
    """
    rows = [prompt for prompt in prompts for _ in range(num_generations)]
    ids, mask = left_pad([prompt.ids for prompt in rows], prompt_width, pad_id)
    if sample_ids is None:
        sample_ids = np.arange(len(rows), dtype=np.int32)
    out = generate_fn(jnp.asarray(ids), jnp.asarray(mask), jnp.asarray(sample_ids))
    lengths = np.asarray(out.lengths)
    completion_ids = np.asarray(out.ids)
    texts = tuple(
        decode_completion(tokenizer, row[:length])
        for row, length in zip(completion_ids, lengths, strict=True)
    )
    scores = [
        score_fn(prompt.text, text, prompt.answer) for prompt, text in zip(rows, texts, strict=True)
    ]
    return Rollout(
        prompt_ids=ids,
        prompt_mask=mask,
        completion_ids=completion_ids,
        completion_mask=np.arange(completion_ids.shape[1])[None, :] < lengths[:, None],
        sampler_logprobs=np.asarray(out.logprobs),
        finished=np.asarray(out.finished),
        texts=texts,
        rewards=np.array([total for total, _ in scores], np.float32),
        reward_parts={
            name: np.array([parts[name] for _, parts in scores], np.float32)
            for name in scores[0][1]
        },
    )
