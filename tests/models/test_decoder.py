"""The decoder against transformers on tiny random models, and against itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.models import abstract_params, decoder_config_from_hf, forward, init_params
from qerl_jax.models.head import head_logits, head_weight, token_logprobs
from qerl_jax.models.hf import load_params

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# family, what differs from SHAPE: grouped, multi-query and full attention; tied and untied
VARIANTS = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2_tied_mqa": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_untied_mha": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": False, "num_key_value_heads": 4},
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
}


def random_model(family, changes):
    """Build a random transformers model whose norms and biases are not the identity."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        mean, std = (0.0, 0.2) if parameter.ndim > 1 else (0.8, 0.2)
        torch.nn.init.normal_(parameter, mean=mean, std=std)
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """Return (transformers model, config, params), the latter read from a saved folder."""
    model = random_model(*VARIANTS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    config = decoder_config_from_hf(model.config.to_dict())
    return model, config, load_params(folder, config, quantize=False, dtype=jnp.float32)


def logits_of(params, config, ids, valid):
    hidden, _ = forward(params, None, jnp.asarray(ids), jnp.asarray(valid), config=config)
    flat = head_logits(hidden.reshape(-1, config.embed), head_weight(params))
    return np.asarray(flat).reshape(*ids.shape, -1)


def test_logits_equal_transformers(pair):
    model, config, params = pair
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 150))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    got = logits_of(params, config, ids, np.ones(ids.shape, bool))
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_left_padding_changes_nothing(pair):
    _, config, params = pair
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (1, 12))
    alone = logits_of(params, config, ids, np.ones(ids.shape, bool))
    padded = np.pad(ids, ((0, 0), (5, 0)), constant_values=7)
    valid = np.arange(17)[None, :] >= 5
    np.testing.assert_allclose(logits_of(params, config, padded, valid)[:, 5:], alone, atol=2e-5)


def test_loaded_shapes_are_the_declared_ones(pair):
    _, config, params = pair
    declared = abstract_params(config, dtype=jnp.float32)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), declared
    )


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_of_logits_change_neither_values_nor_gradients(key, chunk):
    config = decoder_config_from_hf({**SHAPE, "model_type": "qwen2", "rms_norm_eps": 1e-6})
    params = init_params(key, config)
    hidden = jax.random.normal(key, (2, 5, config.embed))
    targets = jnp.arange(10).reshape(2, 5)

    def total(hidden, chunk):
        chunked = config.__class__(**{**config.__dict__, "logits_chunk": chunk})
        logprobs, entropy = token_logprobs(params, hidden, targets, temperature=0.7, config=chunked)
        return jnp.sum(logprobs * jnp.arange(10.0).reshape(2, 5)), (logprobs, entropy)

    def direct(hidden):
        logits = jnp.einsum("bte,ve->btv", hidden, head_weight(params), precision="highest")
        logprobs = jax.nn.log_softmax(logits / 0.7)
        picked = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return jnp.sum(picked * jnp.arange(10.0).reshape(2, 5)), (picked, entropy)

    got, gradient = jax.value_and_grad(total, has_aux=True)(hidden, chunk)
    expected, expected_gradient = jax.value_and_grad(direct, has_aux=True)(hidden)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_remat_changes_no_gradient(key):
    config = decoder_config_from_hf({**SHAPE, "model_type": "llama", "rms_norm_eps": 1e-6})
    params = init_params(key, config)
    ids, valid = jnp.arange(12).reshape(2, 6), jnp.ones((2, 6), bool)

    def loss(params, remat):
        chosen = config.__class__(**{**config.__dict__, "remat": remat})
        hidden, _ = forward(params, None, ids, valid, config=chosen)
        return jnp.sum(jnp.square(hidden[..., 0]))

    with_remat, without = (jax.grad(loss)(params, remat) for remat in (True, False))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), with_remat, without
    )
