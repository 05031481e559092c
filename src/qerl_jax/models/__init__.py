"""The decoder: configuration, weights on disk and forward passes."""

from qerl_jax.models.batch import TokenBatch, completion_logprobs
from qerl_jax.models.config import DecoderConfig, decoder_config_from_hf
from qerl_jax.models.decoder import forward
from qerl_jax.models.init import abstract_params, init_params

__all__ = [
    "DecoderConfig",
    "TokenBatch",
    "abstract_params",
    "completion_logprobs",
    "decoder_config_from_hf",
    "forward",
    "init_params",
]
