"""One optimizer step: policy loss over the whole batch, in micro-batches, on the trainable tree.

    loss = sum over tokens of weight * importance * token_loss

The weights come from the whole optimizer batch (rl/aggregation.py), so micro-batches only add
up and their number does not change the update.
"""

import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from qerl_jax.lora import Trainable
from qerl_jax.models import TokenBatch
from qerl_jax.protocols import Metrics, Params, TokenLossFn
from qerl_jax.rl import kl_k3, masked_sum, truncated_importance_weights

# (params, trainable, tokens, noise_key, sigma) -> (logprobs, entropy), both [batch, completion]
LogprobFn = Callable[..., tuple[Float[Array, "batch completion"], Float[Array, "..."]]]

# (state, params, batch, noise_key, sigma) -> (state, metrics)
UpdateStep = Callable[..., tuple["TrainState", Metrics]]


@typing.no_type_check
@flax.struct.dataclass
class TrainState:
    """All that training changes; the frozen base weights are passed beside it."""

    step: Int[Array, ""]  # rollouts done
    trainable: Trainable
    opt_state: optax.OptState
    key: Key[Array, ""]  # the run's key; keys of a step are derived from it


@typing.no_type_check
@flax.struct.dataclass
class TrainBatch:
    """One optimizer batch: a rollout with everything that the loss needs."""

    tokens: TokenBatch
    advantages: Float[Array, " batch"]
    loss_mask: Bool[Array, "batch completion"]  # completion tokens that carry loss
    token_weights: Float[Array, "batch completion"]  # sums to the aggregation over the batch
    sampler_logprobs: Float[Array, "batch completion"]
    old_logprobs: Float[Array, "batch completion"] | None  # None: those of this very forward
    ref_logprobs: Float[Array, "batch completion"] | None


def split_micro_batches(batch: Any, micro_batch_size: int) -> Any:
    """Reshape every leaf [batch, ...] to [batch / micro, micro, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, micro_batch_size, *x.shape[1:]), batch)


def make_logprobs(
    logprob_fn: LogprobFn, *, micro_batch_size: int
) -> Callable[..., Float[Array, "batch completion"]]:
    """Build the jitted forward for old and reference log-probabilities of a whole rollout."""

    @jax.jit
    def logprobs(params, trainable, tokens: TokenBatch, noise_key, sigma):
        def one(micro):
            return logprob_fn(params, trainable, micro, noise_key, sigma)[0]

        stacked = jax.lax.map(one, split_micro_batches(tokens, micro_batch_size))
        return stacked.reshape(-1, stacked.shape[-1])

    return logprobs


def make_update_step(
    logprob_fn: LogprobFn,
    token_loss: TokenLossFn,
    optimizer: optax.GradientTransformation,
    *,
    micro_batch_size: int,
    importance_cap: float | None = None,
) -> UpdateStep:
    """Build update_step(state, params, batch, noise_key, sigma) -> (state, metrics), jitted.

    `importance_cap` turns on truncated importance sampling: token losses are multiplied by
    min(pi_old / pi_sampler, cap). The state is donated: use the returned one. `step` is left
    to the caller, who may take several optimizer steps on one rollout.
    """
    micro_loss = partial(
        _micro_loss, logprob_fn=logprob_fn, token_loss=token_loss, importance_cap=importance_cap
    )

    @partial(jax.jit, donate_argnames="state")
    def update_step(
        state: TrainState,
        params: Params,
        batch: TrainBatch,
        noise_key: Key[Array, ""],
        sigma: Float[Array, ""],
    ):
        grad_fn = jax.value_and_grad(micro_loss, has_aux=True)

        def accumulate(total, micro):
            (loss, sums), grads = grad_fn(state.trainable, params, micro, noise_key, sigma)
            return jax.tree.map(jnp.add, total, (loss, sums, grads)), None

        micros = split_micro_batches(batch, micro_batch_size)
        first = jax.tree.map(lambda x: x[0], micros)
        shapes = jax.eval_shape(grad_fn, state.trainable, params, first, noise_key, sigma)
        (loss, sums), grads = shapes
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (loss, sums, grads))
        (loss, sums, grads), _ = jax.lax.scan(accumulate, zeros, micros)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
            **_means(sums),
        }
        return state.replace(trainable=trainable, opt_state=opt_state), metrics

    return update_step


def _micro_loss(
    trainable, params, batch, noise_key, sigma, *, logprob_fn, token_loss, importance_cap
):
    """Loss summed over a micro-batch, and sums of statistics over its tokens."""
    logprobs, entropy = logprob_fn(params, trainable, batch.tokens, noise_key, sigma)
    mask = batch.loss_mask.astype(jnp.float32)
    fixed = jax.lax.stop_gradient(logprobs)
    old = fixed if batch.old_logprobs is None else batch.old_logprobs
    losses, statistics = token_loss(logprobs, old, batch.ref_logprobs, batch.advantages, mask)
    if batch.ref_logprobs is not None and "kl" not in statistics:
        statistics = {**statistics, "kl": kl_k3(fixed, batch.ref_logprobs)}
    if importance_cap is not None:
        weights = truncated_importance_weights(
            old, batch.sampler_logprobs, mask, cap=importance_cap
        )
        losses = losses * weights
        statistics = {**statistics, "importance_weight": weights}
    completion = batch.tokens.completion_mask.astype(jnp.float32)
    sums = {
        "loss_tokens": jnp.sum(mask),
        "completion_tokens": jnp.sum(completion),
        "entropy": masked_sum(entropy, completion),
        "logprob_gap": masked_sum(jnp.abs(fixed - batch.sampler_logprobs), completion),
        "statistics": {
            name: masked_sum(jax.lax.stop_gradient(value), mask)
            for name, value in statistics.items()
        },
    }
    return masked_sum(losses, batch.token_weights), sums


def _means(sums):
    """Turn summed statistics into means per token."""
    tokens = jnp.maximum(sums["completion_tokens"], 1.0)
    loss_tokens = sums["loss_tokens"]  # without any (all truncated, say) there is no mean: NaN
    means = {name: total / loss_tokens for name, total in sums["statistics"].items()}
    means["entropy"] = sums["entropy"] / tokens
    means["logprob_gap"] = sums["logprob_gap"] / tokens
    means["loss_tokens"] = sums["loss_tokens"]
    return means
