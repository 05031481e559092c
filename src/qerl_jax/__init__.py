"""Reinforcement learning of NVFP4-quantized language models through LoRA, in functional JAX."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Resolved on first use: the command line answers --help without importing jax.
_HOMES = {
    "ADVANTAGES": "qerl_jax.rl.advantages",
    "AQN_SCHEDULES": "qerl_jax.aqn",
    "LoraAdapter": "qerl_jax.lora",
    "NvFp4Tensor": "qerl_jax.quant.nvfp4",
    "POLICY_LOSSES": "qerl_jax.rl.losses",
    "REWARDS": "qerl_jax.rewards",
    "dequantize": "qerl_jax.quant.nvfp4",
    "forward": "qerl_jax.models.decoder",
    "generate": "qerl_jax.sampling",
    "init_lora": "qerl_jax.lora",
    "perturb_norm_scales": "qerl_jax.aqn",
    "quantize": "qerl_jax.quant.nvfp4",
    "quantize_params": "qerl_jax.quant.policy",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
