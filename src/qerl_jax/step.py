"""One training step: roll out, score, turn into an optimizer batch, update."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.aqn import max_relative_noise
from qerl_jax.data import DataState, next_batch
from qerl_jax.experiment import Experiment, noise_targets, sample_prompts
from qerl_jax.learner import TrainBatch, TrainState
from qerl_jax.lora import overlay_norms
from qerl_jax.policy import policy_params, step_keys
from qerl_jax.rl import informative_groups, token_weights
from qerl_jax.rollout import Rollout


@contextmanager
def phase(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall-clock seconds of a block to `times`."""
    start = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - start


def train_step(
    experiment: Experiment, state: TrainState, cursor: DataState
) -> tuple[TrainState, DataState, dict[str, Any], Rollout]:
    """Run one step: a rollout and `optimizer.num_iterations` optimizer steps on it.

    Returns the new state (the given one is donated), the new data cursor, the metrics record
    and the rollout. Everything random comes from the state's key and step. Raises ValueError when
    the loss, its gradient or the update is not finite: the adapter is lost, and no save may keep
    it.
    """
    config, times = experiment.config, {}
    step = int(state.step)
    noise_key, sampling_key = step_keys(state.key, step)
    sigma = jnp.float32(experiment.parts.schedule(step) if config.aqn.enabled else 0.0)
    indices, next_cursor = next_batch(
        len(experiment.train_prompts),
        cursor,
        batch_size=config.rollout.prompts_per_step,
        seed=config.seed,
    )
    targets = noise_targets(config, rollout=True)
    noise_level = float(
        _max_relative_noise(experiment.params, state.trainable, noise_key, sigma, targets=targets)
    )
    with phase(times, "rollout"):
        rollout = sample(experiment, state, indices, noise_key, sampling_key, sigma)
    with phase(times, "batch"):
        batch, info = make_batch(experiment, state, rollout, noise_key, sigma)
        jax.block_until_ready(batch)  # or its forwards would be timed as part of the update
    with phase(times, "update"):
        updates = []
        for _ in range(config.optimizer.num_iterations):
            state, metrics = experiment.update_step(
                state, experiment.params, batch, noise_key, sigma
            )
            updates.append(metrics)
        metrics = _mean_metrics(jax.device_get(updates))
    _check_finite(metrics, step + 1)
    state = state.replace(step=state.step + 1)
    last_update = (step + 1) * config.optimizer.num_iterations - 1
    record = {
        "step": step + 1,
        "epoch": cursor.epoch,
        "sigma": float(sigma),
        "noise_max_relative": noise_level,
        "learning_rate": float(experiment.parts.learning_rate(last_update)),
        **info,
        **metrics,
    }
    return state, next_cursor, record | _timings(times, rollout), rollout


@partial(jax.jit, static_argnames="targets")
def _max_relative_noise(params, trainable, noise_key, sigma, *, targets):
    clean = overlay_norms(params, trainable)
    noisy = policy_params(params, trainable, noise_key, sigma, noise_targets=targets)
    return max_relative_noise(clean, noisy)


def _mean_metrics(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the metrics of the updates on one rollout.

    Entropy and the sampler's gap are of the policy that sampled, which later updates move away.
    """
    means = {name: np.mean([update[name] for update in updates]) for name in updates[0]}
    return means | {name: updates[0][name] for name in ("entropy", "logprob_gap")}


def _check_finite(metrics: Mapping[str, Any], step: int) -> None:
    names = ("loss", "grad_norm", "update_norm")
    values = {name: float(metrics[name]) for name in names}
    if not all(map(math.isfinite, values.values())):
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        raise ValueError(
            f"step {step}: {shown}; stopped before it is saved, checkpoints of earlier steps stay"
        )


def sample(experiment: Experiment, state, indices, noise_key, sampling_key, sigma) -> Rollout:
    """Sample and score completions of the prompts at `indices` from the noisy policy."""
    config = experiment.config
    policy = policy_params(
        experiment.params,
        state.trainable,
        noise_key,
        sigma,
        noise_targets=noise_targets(config, rollout=True),
    )
    return sample_prompts(
        experiment,
        policy,
        state.trainable.adapter,
        [experiment.train_prompts[i] for i in indices],
        sampling_key,
        settings=config.rollout,
        max_completion_tokens=config.rollout.max_completion_tokens,
        num_generations=config.rollout.num_generations,
    )


def make_batch(
    experiment: Experiment, state: TrainState, rollout: Rollout, noise_key, sigma
) -> tuple[TrainBatch, dict[str, Any]]:
    """Turn a rollout into an optimizer batch and the metrics that come from it alone."""
    config, loss = experiment.config, experiment.config.loss
    groups = rollout.rewards.reshape(-1, config.rollout.num_generations)
    advantages = experiment.parts.advantage_fn(jnp.asarray(groups)).reshape(-1)
    loss_mask = rollout.completion_mask
    if loss.mask_truncated:
        loss_mask = loss_mask & rollout.finished[:, None]
    tokens = rollout.tokens
    forward = (experiment.params, state.trainable, tokens, noise_key, sigma)
    sampler = jnp.asarray(rollout.sampler_logprobs)
    old = sampler if loss.old_logprobs == "sampler" else None
    if old is None and config.optimizer.num_iterations > 1:
        old = experiment.old_logprobs(*forward)
    batch = TrainBatch(
        tokens=tokens,
        advantages=advantages,
        loss_mask=jnp.asarray(loss_mask),
        token_weights=token_weights(
            jnp.asarray(loss_mask, jnp.float32),
            aggregation=experiment.parts.aggregation,
            max_completion_tokens=config.rollout.max_completion_tokens,
        ),
        sampler_logprobs=sampler,
        old_logprobs=old,
        ref_logprobs=experiment.ref_logprobs(*forward) if loss.beta > 0 or loss.log_kl else None,
    )
    return batch, _rollout_metrics(rollout, groups)


def _rollout_metrics(rollout: Rollout, groups: np.ndarray) -> dict[str, Any]:
    lengths = rollout.lengths
    return {
        "reward": float(rollout.rewards.mean()),
        "reward_std": float(rollout.rewards.std()),
        **{f"reward/{name}": float(v.mean()) for name, v in rollout.reward_parts.items()},
        "kept_groups": int(np.sum(np.asarray(informative_groups(jnp.asarray(groups))))),
        "groups": len(groups),
        "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated": float(1.0 - rollout.finished.mean()),
    }


def _timings(times: Mapping[str, float], rollout: Rollout) -> dict[str, float]:
    total = sum(times.values())
    return {
        **{f"time/{name}": seconds for name, seconds in times.items()},
        "time/step": total,
        "time/tokens_per_second": int(rollout.lengths.sum()) / max(times["rollout"], 1e-9),
    }
