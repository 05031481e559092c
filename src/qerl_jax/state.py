"""The state that a run begins with."""

import jax
import jax.numpy as jnp
import optax

from qerl_jax.config import ExperimentConfig
from qerl_jax.learner import TrainState
from qerl_jax.lora import Trainable, init_trainable
from qerl_jax.peft import import_adapter
from qerl_jax.protocols import Params


def make_trainable(config: ExperimentConfig, params: Params, key: jax.Array) -> Trainable:
    """Make what the lora section asks for, untrained."""
    lora = config.lora
    return init_trainable(
        key,
        params,
        targets=lora.targets,
        rank=lora.rank,
        alpha=lora.alpha,
        train_norms=lora.train_norms,
    )


def describe(trainable: Trainable) -> str:
    """Name what makes two adapters interchangeable: targets, rank, scale, trained norms."""
    pairs = trainable.adapter.pairs
    rank = next(iter(pairs.values()))["a"].shape[-1]
    norms = "with" if trainable.norm_scales else "without"
    return (
        f"{'+'.join(sorted(pairs))} of rank {rank}, scale {trainable.adapter.scale:g}, "
        f"{norms} trained norms"
    )


def init_state(
    config: ExperimentConfig,
    optimizer: optax.GradientTransformation,
    params: Params,
    *,
    read_init_from: bool = True,
) -> TrainState:
    """Make the state of step 0, from the seed alone or from lora.init_from.

    Without `read_init_from` only shapes and types are those of step 0: enough to restore into.
    Raises ValueError for an adapter that is not what the lora section asks for.
    """
    init_key, run_key = jax.random.split(jax.random.key(config.seed))
    trainable = make_trainable(config, params, init_key)
    if read_init_from and config.lora.init_from is not None:
        given = import_adapter(config.lora.init_from, params, field="lora.init_from")
        if describe(given) != describe(trainable):
            raise ValueError(
                f"lora.init_from: {config.lora.init_from} has {describe(given)}, "
                f"the lora section asks for {describe(trainable)}"
            )
        trainable = given
    return TrainState(
        step=jnp.int32(0),
        trainable=trainable,
        opt_state=optimizer.init(trainable),
        key=run_key,
    )
