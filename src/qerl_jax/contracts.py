"""Checks of a user's own functions, before a run starts and of what they give in it.

What broadcasts or converts by itself would train on a wrong number, and never say so.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qerl_jax.data.messages import first_line
from qerl_jax.protocols import AdvantageFn, RewardFn, Schedule, ScheduleMaker, TokenLossFn
from qerl_jax.resolve import bind_keywords, check_order

# What each kind of function is called with, in order.
LOSS_DATA = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "completion_mask")
ADVANTAGE_DATA = ("rewards",)
REWARD_DATA = ("prompt", "completion", "answer")

# Statistics are logged beside these.
RESERVED = frozenset(
    "step epoch sigma noise_max_relative learning_rate reward reward_std kept_groups groups "
    "length_mean length_max truncated loss loss_tokens grad_norm update_norm entropy logprob_gap "
    "importance_weight".split()
)


def check_token_loss(
    fn: TokenLossFn, *, place: str, reference: bool, shape: tuple[int, int]
) -> None:
    """Check that a loss gives (loss, statistics), both [batch, completion].

    Args:
        fn: with its hyperparameters bound; it is traced, not computed.
        place: what to name in messages, e.g. "loss.name: my_losses:my_loss".
        reference: whether ref_logprobs will be there; None if not.
        shape: [batch, completion] of a micro-batch.

    Raises ValueError.
    """
    tokens = jax.ShapeDtypeStruct(shape, jnp.float32)
    rows = jax.ShapeDtypeStruct(shape[:1], jnp.float32)
    trace = partial(_call, place, jax.eval_shape, fn, tokens, tokens)
    try:
        result = trace(tokens if reference else None, rows, tokens)
    except ValueError:
        if reference:
            raise
        trace(tokens, rows, tokens)  # raises the same, unless the reference was what it lacked
        raise ValueError(
            f"{place}: needs ref_logprobs, which are None unless loss.beta or loss.log_kl is set"
        ) from None
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(
            f"{place}: gave {_kind(result)}, not a pair of a loss and a dict of statistics"
        )
    losses, statistics = result
    for name in statistics:
        if not isinstance(name, str):
            raise ValueError(f"{place}: a statistic is named {name!r}, not by a string")
        if name in RESERVED or "/" in name:
            raise ValueError(f"{place}: a statistic cannot be named {name!r}, which is ours")
    for name, value in {"the loss": losses, **statistics}.items():
        array = isinstance(value, jax.ShapeDtypeStruct)
        if not (array and value.shape == shape and jnp.issubdtype(value.dtype, jnp.floating)):
            found = f"{value.dtype}{list(value.shape)}" if array else _kind(value)
            raise ValueError(
                f"{place}: {name} is {found}, not a float of each token, "
                f"[batch, completion] = {list(shape)}; means are taken later (loss.aggregation)"
            )


def make_advantage(fn: AdvantageFn, *, place: str, shape: tuple[int, int]) -> AdvantageFn:
    """Return `fn` with its result checked: a finite number for each reward, [prompts, group].

    It is tried on unequal and on equal rewards of that shape. Raises ValueError, here or later.
    """

    def advantage(rewards: Float[Array, "prompts group"]) -> Float[Array, "prompts group"]:
        result = _call(place, lambda: jnp.asarray(fn(rewards)))
        if result.shape != rewards.shape:
            raise ValueError(
                f"{place}: gave shape {list(result.shape)} for rewards [prompts, group] = "
                f"{list(rewards.shape)}"
            )
        if jnp.issubdtype(result.dtype, jnp.complexfloating) or not jnp.isfinite(result).all():
            raise ValueError(f"{place}: gave {result.tolist()} for rewards {rewards.tolist()}")
        return result.astype(jnp.float32)

    advantage(jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape) % 2)
    advantage(jnp.ones(shape, jnp.float32))
    return advantage


def make_schedule(
    maker: ScheduleMaker, *, place: str, total_steps: int, **settings: Any
) -> Schedule:
    """Call a schedule maker with those settings that it takes; what it gives is checked.

    It is tried at up to a thousand steps from the first to the last. Raises ValueError, here or
    later, for what is not a standard deviation.
    """
    bound = bind_keywords(maker, {**settings, "total_steps": total_steps}, data=(), place=place)
    schedule = _call(place, bound)

    def sigma(step: int) -> float:
        value = _call(place, schedule, step)
        number = math.nan if isinstance(value, str) else _call(place, float, value)
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{place}: gave {value!r} at step {step}, not a sigma >= 0")
        return number

    for step in (*range(0, total_steps, math.ceil(total_steps / 1000)), total_steps - 1):
        sigma(step)
    return sigma


def check_reward(fn: RewardFn, *, place: str) -> None:
    """Check that a reward can be called with three strings, without a call.

    Raises ValueError.
    """
    try:
        inspect.signature(fn).bind(*REWARD_DATA)
    except TypeError as error:
        raise ValueError(f"{place} cannot take (prompt, completion, answer): {error}") from error
    except ValueError:  # some functions written in C have no signature
        return
    check_order(fn, REWARD_DATA, place=place)


def _call(place: str, fn: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return fn(*arguments)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ValueError(f"{place}: {type(error).__name__}: {first_line(error)}") from error


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "one array" if isinstance(value, jax.ShapeDtypeStruct) else type(value).__name__
