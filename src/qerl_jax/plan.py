"""What a run will need, from shapes alone: nothing is loaded or compiled."""

from functools import partial

import jax
import numpy as np

from qerl_jax.experiment import Experiment
from qerl_jax.lora import lora_targets
from qerl_jax.models import abstract_params
from qerl_jax.quant import LINEAR_WEIGHTS, quantize_params
from qerl_jax.run_folder import run_path
from qerl_jax.state import init_state
from qerl_jax.tree import num_bytes, num_elements

_MIB = 2**20


def describe_plan(experiment: Experiment) -> str:
    """Describe a checked experiment: data, parameters, and bytes by part."""
    config, model = experiment.config, experiment.model.config
    dense = abstract_params(model)
    stored = dense
    if config.quant.format == "nvfp4":
        stored = jax.eval_shape(lambda p: quantize_params(p, include=LINEAR_WEIGHTS), dense)
    state = jax.eval_shape(partial(init_state, config, experiment.parts.optimizer), stored)
    rows = config.rollout.prompts_per_step * config.rollout.num_generations
    slots = experiment.prompt_width + config.rollout.max_completion_tokens
    width = np.dtype(jax.numpy.dtype(model.dtype)).itemsize
    cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim * width * rows * slots
    lines = [
        f"model        {config.model.path}: {num_elements(dense):,} parameters",
        f"base         {num_bytes(stored) / _MIB:10.1f} MiB as {config.quant.format}, "
        f"{num_bytes(dense) / _MIB:.1f} MiB in 16 bits",
        f"trained      {num_bytes(state.trainable) / _MIB:10.1f} MiB, "
        f"{num_elements(state.trainable):,} parameters",
        f"optimizer    {num_bytes(state.opt_state) / _MIB:10.1f} MiB",
        f"KV cache     {cache / _MIB:10.1f} MiB for {rows} rows x {slots} tokens",
    ]
    if config.rollout.weights == "expanded" and config.quant.format == "nvfp4":
        linear = sum(dense["layers"][name]["weight"].size for name in lora_targets(dense))
        lines.append(f"expanded     {linear * width / _MIB:10.1f} MiB during rollouts")
    lines += [
        f"data         {len(experiment.train_prompts)} training prompts "
        f"({experiment.dropped} too long), {len(experiment.eval_prompts)} held-out "
        f"({experiment.eval_dropped} too long), "
        f"up to {experiment.prompt_width} tokens",
        f"run folder   {run_path(config)}",
    ]
    return "\n".join(lines)
