"""The table of rewards by name, and their weighted sum."""

import math
from collections.abc import Callable, Mapping, Sequence

from qerl_jax.protocols import RewardFn
from qerl_jax.rewards.format import format_boxed, format_hash, format_tags
from qerl_jax.rewards.verdicts import exact_number, last_number, marked_number

LARGEST = 1e18  # squares of rewards stay within float32

REWARDS: Mapping[str, RewardFn] = {
    "exact_number": exact_number,
    "format_boxed": format_boxed,
    "format_hash": format_hash,
    "format_tags": format_tags,
    "last_number": last_number,
    "marked_number": marked_number,
}


def combine_rewards(
    rewards: Mapping[str, Callable[[str, str, str], float]], weights: Sequence[float]
) -> Callable[[str, str, str], tuple[float, dict[str, float]]]:
    """Return a function of (prompt, completion, answer) that gives (total, {name: value}).

    total = sum_i weights[i] * rewards[i](prompt, completion, answer); values are unweighted.

    Raises:
        ValueError: no reward, not one finite weight for each; later, when called, a reward that
            fails or gives anything but a finite number.
    """
    if not rewards or len(rewards) != len(weights):
        raise ValueError(f"reward.weights: {len(weights)} for {len(rewards)} reward functions")
    for weight in weights:
        if not math.isfinite(weight):
            raise ValueError(f"reward.weights: {weight} is not finite")

    def score(prompt: str, completion: str, answer: str) -> tuple[float, dict[str, float]]:
        values = {
            name: _value(name, reward, prompt, completion, answer)
            for name, reward in rewards.items()
        }
        total = math.fsum(w * v for w, v in zip(weights, values.values(), strict=True))
        return total, values

    return score


def _value(name: str, reward: RewardFn, *strings: str) -> float:
    """Turn what a reward gives into a float, or name the reward."""
    try:
        value = reward(*strings)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ValueError(f"reward {name}: {type(error).__name__}: {error}") from error
    try:
        number = None if isinstance(value, str) else float(value)
    except Exception:  # a user's object may raise anything
        number = None
    if number is None or not math.isfinite(number):
        raise ValueError(f"reward {name}: gave {value!r}, not a finite number")
    if abs(number) > LARGEST:
        raise ValueError(f"reward {name}: gave {value!r}, expected at most {LARGEST:g}")
    return number
