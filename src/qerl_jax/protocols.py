"""Types shared by every layer of the package, and the glossary of axis names.

Axis words used in array annotations:

    batch        prompts x generations: the rows of a rollout
    prompts      prompts of one step;  group: completions of one prompt (num_generations)
    time         prompt + completion slots;  prompt / completion: the two parts of it
    vocab        token ids;  embed: hidden size;  ffn: MLP width
    q_heads, kv_heads, head_dim, rank (of LoRA), layers
    m k n        rows, input features and output features of a matrix product;
                 weights are [n, k] ("out, in"), as in Hugging Face files
"""

import typing
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxtyping import Array, Float

Params = Mapping[str, Any]  # nested dicts of arrays and NvFp4Tensor
Metrics = dict[str, Any]  # name -> scalar
Schedule = Callable[[int], float]  # training step (from 0) -> sigma


@typing.runtime_checkable
class TokenLossFn(Protocol):
    """Policy loss of each token; the aggregation over tokens is chosen apart from it."""

    def __call__(
        self,
        logprobs: Float[Array, "batch completion"],
        old_logprobs: Float[Array, "batch completion"],
        ref_logprobs: Float[Array, "batch completion"] | None,
        advantages: Float[Array, " batch"],
        completion_mask: Float[Array, "batch completion"],
    ) -> tuple[Float[Array, "batch completion"], dict[str, Float[Array, "batch completion"]]]:
        """Return (loss, statistics), both per token; masked positions are ignored."""
        ...


@typing.runtime_checkable
class ScheduleMaker(Protocol):
    """Makes the noise schedule of a run; one of a user's own may take fewer keywords."""

    def __call__(
        self, *, sigma_start: float, sigma_end: float, num_stages: int, total_steps: int
    ) -> Schedule: ...


@typing.runtime_checkable
class AdvantageFn(Protocol):
    """Advantages of the completions of each group from their rewards.

    A keyword-only parameter `eps` is given loss.advantage_eps, others as those of a loss are.
    """

    def __call__(self, rewards: Float[Array, "prompts group"]) -> Float[Array, "prompts group"]: ...


@typing.runtime_checkable
class RewardFn(Protocol):
    """Reward of one completion: strings in, a float out.

    `answer` is the gold answer of the data set ("" if it has none).
    """

    def __call__(self, prompt: str, completion: str, answer: str) -> float: ...
