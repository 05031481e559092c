"""Checks of a user's own functions on tiny arguments, before a run starts.

What broadcasts or converts by itself would train on a wrong number, and never say so.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.data.messages import first_line
from qerl_jax.protocols import AdvantageFn, RewardFn, Schedule, ScheduleMaker, TokenLossFn
from qerl_jax.resolve import bind_keywords

_SHAPE = (2, 3)
# Statistics are logged beside these.
RESERVED = frozenset(
    "step epoch sigma noise_max_relative learning_rate reward reward_std kept_groups groups "
    "length_mean length_max truncated loss loss_tokens grad_norm update_norm entropy logprob_gap "
    "importance_weight".split()
)


def check_token_loss(fn: TokenLossFn, *, place: str, reference: bool) -> None:
    """Check that a loss gives (loss, statistics), both [batch, completion].

    Args:
        fn: with its hyperparameters bound; it is traced, not computed.
        place: what to name in messages, e.g. "loss.name: my_losses:my_loss".
        reference: whether ref_logprobs will be there; None if not.

    Raises ValueError.
    """
    tokens = jax.ShapeDtypeStruct(_SHAPE, jnp.float32)
    rows = jax.ShapeDtypeStruct(_SHAPE[:1], jnp.float32)
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
        if value.shape != _SHAPE or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                f"{place}: {name} is {value.dtype}{list(value.shape)}, not a float of each token, "
                f"[batch, completion] = {list(_SHAPE)}; means are taken later (loss.aggregation)"
            )


def check_advantage(fn: AdvantageFn, *, place: str) -> None:
    """Check that an advantage gives a finite number for each reward, [prompts, group].

    Raises ValueError.
    """
    rewards = jnp.array([[1.0, 0.0, 0.5], [1.0, 1.0, 1.0]])
    advantages = _call(place, lambda: jnp.asarray(fn(rewards)))
    if advantages.shape != rewards.shape:
        raise ValueError(
            f"{place}: gave shape {list(advantages.shape)} for rewards [prompts, group] = "
            f"{list(rewards.shape)}"
        )
    if not jnp.isfinite(advantages).all():
        raise ValueError(f"{place}: gave {advantages.tolist()} for rewards {rewards.tolist()}")


def make_schedule(maker: ScheduleMaker, *, place: str, **settings: Any) -> Schedule:
    """Call a schedule maker with those of `settings` that it takes.

    Raises ValueError.
    """
    bound = bind_keywords(maker, settings, field=place)
    return _call(place, bound)


def check_schedule(schedule: Schedule, *, total_steps: int, place: str) -> None:
    """Check that a noise schedule gives a standard deviation at the ends and in the middle.

    Raises ValueError.
    """
    for step in (0, total_steps // 2, total_steps - 1):
        sigma = _call(place, schedule, step)
        number = math.nan if isinstance(sigma, str) else _call(place, float, sigma)
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{place}: gave {sigma!r} at step {step}, not a sigma >= 0")


def check_reward(fn: RewardFn, *, place: str) -> None:
    """Check that a reward can be called with three strings, without a call.

    Raises ValueError.
    """
    try:
        inspect.signature(fn).bind("prompt", "completion", "answer")
    except TypeError as error:
        raise ValueError(f"{place} cannot take (prompt, completion, answer): {error}") from error
    except ValueError:  # some functions written in C have no signature
        return


def _call(place: str, fn: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return fn(*arguments)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ValueError(f"{place}: {type(error).__name__}: {first_line(error)}") from error


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "one array" if isinstance(value, jax.ShapeDtypeStruct) else type(value).__name__
