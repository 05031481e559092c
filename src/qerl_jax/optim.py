"""The optimizer: AdamW with warm-up, decay of the learning rate, and clipping.

Steps are optimizer steps, counted from 0.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

# Name -> factor of the learning rate at progress 0..1 between the end of warm-up and total_steps.
LEARNING_RATE_SCHEDULES: Mapping[str, Callable[[Array], Array]] = {
    "constant": jnp.ones_like,
    "cosine": lambda progress: 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
}


def learning_rate_at(
    step: int | Int[Array, ""],
    *,
    learning_rate: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
) -> Float[Array, ""]:
    """Return the learning rate of an optimizer step.

    Warm-up is linear, learning_rate * (step + 1) / warmup_steps: the first step already moves,
    where a ramp from 0 would waste it, and step warmup_steps - 1 is the first at full rate.
    "cosine" then falls to 0 at total_steps, one past the last step.

    Raises:
        ValueError: an unknown schedule.
    """
    if schedule not in LEARNING_RATE_SCHEDULES:
        names = ", ".join(sorted(LEARNING_RATE_SCHEDULES))
        raise ValueError(f'optimizer.schedule: "{schedule}" is not one of {names}')
    step = jnp.asarray(step, jnp.float32)
    warmup = jnp.minimum((step + 1.0) / max(warmup_steps, 1), 1.0)
    progress = jnp.clip((step - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0, 1.0)
    return learning_rate * warmup * LEARNING_RATE_SCHEDULES[schedule](progress)


def make_optimizer(
    *,
    learning_rate: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
) -> optax.GradientTransformation:
    """Build AdamW with clipping by global norm before it and the schedule of `learning_rate_at`.

    Weight decay is decoupled, scaled by the learning rate, and falls on adapter matrices alone
    (`decay_mask`). max_grad_norm 0 means no clipping.

    Raises:
        ValueError: an unknown schedule, or at init a weight decay that falls on no leaf.

    Reference: Loshchilov and Hutter 2019 (arXiv:1711.05101), Algorithm 2.
    """

    def rate(step: Int[Array, ""]) -> Float[Array, ""]:
        return learning_rate_at(
            step,
            learning_rate=learning_rate,
            schedule=schedule,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
        )

    rate(jnp.zeros((), jnp.int32))  # an unknown schedule fails here, not in the first update
    clip = [optax.clip_by_global_norm(max_grad_norm)] if max_grad_norm > 0 else []
    decay = [optax.add_decayed_weights(weight_decay, mask=decay_mask)] if weight_decay > 0 else []
    return optax.chain(
        *clip,
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        *decay,
        optax.scale_by_learning_rate(rate),
    )


def decay_mask(trainable: Any) -> Any:
    """Tell which leaves are decayed: stacked matrices [layers, ...] below "adapter".

    Norm scales are not: their neutral value is 1 (or what the base model has), not 0.

    Raises:
        ValueError: no leaf qualifies, so that weight decay would silently do nothing.
    """
    mask = jax.tree_util.tree_map_with_path(_is_decayed, trainable)
    if not any(jax.tree.leaves(mask)):
        raise ValueError("optimizer.weight_decay: the trained tree has no adapter matrix to decay")
    return mask


def _is_decayed(path: tuple[Any, ...], leaf: Any) -> bool:
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return "adapter" in names and leaf.ndim >= 3
