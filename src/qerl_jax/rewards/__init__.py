"""Rewards: strings in, a float out."""

from qerl_jax.rewards.combine import REWARDS, combine_rewards
from qerl_jax.rewards.format import format_boxed, format_hash, format_tags
from qerl_jax.rewards.verdicts import (
    NUMBER_REWARDS,
    exact_number,
    last_number,
    marked_number,
    validate_answer,
)

__all__ = [
    "NUMBER_REWARDS",
    "REWARDS",
    "combine_rewards",
    "exact_number",
    "format_boxed",
    "format_hash",
    "format_tags",
    "last_number",
    "marked_number",
    "validate_answer",
]
