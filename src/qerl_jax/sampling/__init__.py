"""Sampling of completions: filters on logits, and the jitted token loop."""

from qerl_jax.sampling.filters import SamplingConfig, filter_logits, sample_token
from qerl_jax.sampling.generate import Completions, generate

__all__ = ["Completions", "SamplingConfig", "filter_logits", "generate", "sample_token"]
