"""Generation: agreement with the trainer's forward, per-sample randomness, ends of completions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.aqn import perturb_norm_scales
from qerl_jax.lora import init_lora
from qerl_jax.models import TokenBatch, completion_logprobs, decoder_config_from_hf, init_params
from qerl_jax.models.decoder import forward
from qerl_jax.models.head import last_logits
from qerl_jax.quant import quantize_params
from qerl_jax.sampling import SamplingConfig, generate

HF = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}
SAMPLING = SamplingConfig(max_completion_tokens=12, end_ids=(5, 6, 7), pad_id=5)
TARGETS = ("input_layernorm", "post_attention_layernorm")


def setup(dtype="float32", *, quantized=True):
    """Return (config, noisy params, adapter with non-zero b)."""
    config = decoder_config_from_hf(HF)
    config = config.__class__(**{**config.__dict__, "dtype": dtype})
    params = init_params(jax.random.key(1), config)
    params = quantize_params(params) if quantized else params
    noisy = perturb_norm_scales(params, jax.random.key(2), jnp.float32(0.05), targets=TARGETS)
    adapter = init_lora(
        jax.random.key(3), params, targets=("q_proj", "o_proj", "down_proj"), rank=4, alpha=8.0
    )
    filled = jax.tree.map(lambda x: x + 0.05, adapter)
    return config, noisy, filled


def prompts(rows=6, width=9):
    ids = np.random.default_rng(0).integers(8, 64, (rows, width))
    lengths = np.array([9, 5, 1, 7, 9, 3])[:rows]
    return jnp.asarray(ids), jnp.asarray(np.arange(width)[None, :] >= width - lengths[:, None])


def completion_mask(out):
    return jnp.arange(out.ids.shape[1])[None, :] < out.lengths[:, None]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-3)])
def test_sampled_logprobs_equal_the_teacher_forced_ones(key, temperature, dtype, tolerance):
    config, params, adapter = setup(dtype)
    ids, mask = prompts()
    sampling = SamplingConfig(
        max_completion_tokens=12, end_ids=(5,), pad_id=0, temperature=temperature
    )
    out = generate(params, adapter, ids, mask, key, jnp.arange(6), config=config, sampling=sampling)
    batch = TokenBatch(ids, mask, out.ids, completion_mask(out))
    logprobs, _ = completion_logprobs(
        params, adapter, batch, config=config, temperature=temperature
    )
    gaps = jnp.abs(logprobs - out.logprobs)[batch.completion_mask]
    assert gaps.mean() <= tolerance


def test_greedy_decoding_is_the_argmax_of_full_forwards(key):
    config, params, adapter = setup()
    ids, mask = prompts(2)
    sampling = SamplingConfig(max_completion_tokens=5, end_ids=(5,), pad_id=0, temperature=0.0)
    out = generate(params, adapter, ids, mask, key, jnp.arange(2), config=config, sampling=sampling)
    for step in range(int(out.lengths.min())):
        hidden, _ = forward(params, adapter, ids, mask, config=config)
        token = jnp.argmax(last_logits(params, hidden[:, -1]), axis=-1)
        assert token.tolist() == out.ids[:, step].tolist()
        ids = jnp.concatenate([ids, token[:, None]], axis=1)
        mask = jnp.pad(mask, ((0, 0), (0, 1)), constant_values=True)


def test_packed_and_expanded_weights_give_the_same_tokens(key):
    config, params, adapter = setup()
    ids, mask = prompts()
    expanded, packed = (
        generate(
            params,
            adapter,
            ids,
            mask,
            key,
            jnp.arange(6),
            config=config,
            sampling=SAMPLING,
            weights=weights,
        )
        for weights in ("expanded", "packed")
    )
    assert expanded.ids.tolist() == packed.ids.tolist()
    np.testing.assert_allclose(expanded.logprobs, packed.logprobs, atol=1e-6)


def test_a_sample_does_not_depend_on_its_place_or_company(key):
    config, params, adapter = setup()
    ids, mask = prompts()
    whole = generate(
        params, adapter, ids, mask, key, jnp.arange(6), config=config, sampling=SAMPLING
    )
    order = np.array([4, 1])
    part = generate(
        params,
        adapter,
        ids[order],
        mask[order],
        key,
        jnp.asarray(order),
        config=config,
        sampling=SAMPLING,
    )
    assert part.ids.tolist() == whole.ids[order].tolist()
    np.testing.assert_allclose(part.logprobs, whole.logprobs[order], atol=1e-5)


def test_same_prompt_gives_different_samples_and_a_seed_gives_the_same(key):
    config, params, adapter = setup()
    ids, mask = prompts()
    same, same_mask = jnp.tile(ids[:1], (6, 1)), jnp.tile(mask[:1], (6, 1))
    run = [
        generate(
            params, adapter, same, same_mask, k, jnp.arange(6), config=config, sampling=SAMPLING
        ).ids.tolist()
        for k in (key, key, jax.random.key(9))
    ]
    assert len({tuple(row) for row in run[0]}) == 6
    assert run[0] == run[1] != run[2]


def test_ends_belong_to_the_completion_and_padding_does_not(key):
    config, params, adapter = setup()
    ids, mask = prompts()
    out = generate(
        params, adapter, ids, mask, key, jnp.arange(100, 106), config=config, sampling=SAMPLING
    )
    lengths, finished = np.asarray(out.lengths), np.asarray(out.finished)
    assert 0 < finished.sum() < 6, "the case must hold both kinds of end"
    for row in range(6):
        own = np.asarray(out.ids)[row, : lengths[row]]
        assert np.isin(own[:-1], SAMPLING.end_ids).sum() == 0
        assert finished[row] == (own[-1] in SAMPLING.end_ids)
        assert finished[row] or lengths[row] == 12
        # pad_id is also an end token here: only lengths tell them apart
        assert (np.asarray(out.ids)[row, lengths[row] :] == SAMPLING.pad_id).all()
        assert (np.asarray(out.logprobs)[row, lengths[row] :] == 0).all()


def test_adapter_moves_the_sampler_and_a_zero_b_does_not(key):
    config, params, adapter = setup()
    ids, mask = prompts()
    zero = adapter.replace(
        pairs={
            name: {"a": p["a"], "b": jnp.zeros_like(p["b"])} for name, p in adapter.pairs.items()
        }
    )
    none, with_zero, moved = (
        generate(params, chosen, ids, mask, key, jnp.arange(6), config=config, sampling=SAMPLING)
        for chosen in (None, zero, adapter)
    )
    assert none.ids.tolist() == with_zero.ids.tolist()
    assert none.logprobs.tolist() == with_zero.logprobs.tolist()
    assert np.abs(none.logprobs[:, 0] - moved.logprobs[:, 0]).max() > 1e-3


def test_generation_compiles_once_for_changing_noise(key):
    config, params, adapter = setup()
    ids, mask = prompts()
    before = generate._cache_size()
    for sigma in (0.0, 0.01, 0.02):
        noisy = perturb_norm_scales(params, key, jnp.float32(sigma), targets=TARGETS)
        sampling = SamplingConfig(max_completion_tokens=3, end_ids=(5,), pad_id=0)
        generate(noisy, adapter, ids, mask, key, jnp.arange(6), config=config, sampling=sampling)
    assert generate._cache_size() == before + 1
