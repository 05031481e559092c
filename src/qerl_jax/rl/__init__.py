"""The arithmetic of policy optimization: arrays in, arrays out, no model and no config."""

from qerl_jax.rl.advantages import (
    ADVANTAGES,
    group_bessel,
    group_mean_only,
    group_population,
    informative_groups,
    leave_one_out,
)
from qerl_jax.rl.aggregation import AGGREGATIONS, token_weights
from qerl_jax.rl.kl import KL_ESTIMATORS, kl_k1, kl_k2, kl_k3
from qerl_jax.rl.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    clipped_surrogate,
    dapo_token_loss,
    dr_grpo_token_loss,
    grpo_token_loss,
    truncated_importance_weights,
)
from qerl_jax.rl.masking import masked_sum

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "PolicyLoss",
    "clipped_surrogate",
    "dapo_token_loss",
    "dr_grpo_token_loss",
    "group_bessel",
    "group_mean_only",
    "group_population",
    "grpo_token_loss",
    "informative_groups",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "leave_one_out",
    "masked_sum",
    "token_weights",
    "truncated_importance_weights",
]
