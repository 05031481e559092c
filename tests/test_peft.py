"""Adapter folders: the round trip, PEFT's own names and results, and refusals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qerl_jax.lora import BLOCK_NORMS, init_trainable
from qerl_jax.peft import export_adapter, import_adapter

SIZES = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
SIZES |= {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
Q_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
DOWN_B = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
NORM = "base_model.model.model.layers.1.post_attention_layernorm.weight"


@pytest.fixture(scope="module")
def params():
    layers = {name: {"weight": jnp.zeros((2, *size), jnp.bfloat16)} for name, size in SIZES.items()}
    layers |= {name: jnp.ones((2, 32)) for name in BLOCK_NORMS}
    return {"embed_tokens": jnp.zeros((50, 32)), "layers": layers, "norm": jnp.ones(32)}


def random_trainable(params, *, targets=tuple(SIZES), rank=3, alpha=7.0, train_norms=True, seed=0):
    drawn = jax.eval_shape(
        lambda model: init_trainable(
            jax.random.key(0),
            model,
            targets=targets,
            rank=rank,
            alpha=alpha,
            train_norms=train_norms,
        ),
        params,
    )
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32)), drawn)


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("train_norms", [True, False])
@pytest.mark.parametrize("targets", [tuple(SIZES), ("v_proj", "q_proj")])
def test_round_trip_is_exact(params, tmp_path, targets, train_norms):
    trainable = random_trainable(params, targets=targets, train_norms=train_norms)
    export_adapter(tmp_path / "adapter", trainable, base_model="some/model")
    back = import_adapter(tmp_path / "adapter", params)
    assert back.adapter.scale == trainable.adapter.scale == 7.0 / 3
    assert_equal(back, trainable)


@pytest.mark.parametrize(("rank", "alpha"), [(49, 1.0), (12, 32.0), (3, 0.1), (7, 16.0)])
def test_scale_survives_the_round_trip(params, tmp_path, rank, alpha):
    wide = {"layers": {"q_proj": {"weight": jnp.zeros((1, 64, 64))}}}
    trainable = random_trainable(
        wide, targets=("q_proj",), rank=rank, alpha=alpha, train_norms=False
    )
    export_adapter(tmp_path / "adapter", trainable)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["lora_alpha"] == alpha and config["r"] == rank
    assert import_adapter(tmp_path / "adapter", wide).adapter.scale == alpha / rank


def test_files_have_pefts_names_and_orientation(params, tmp_path):
    trainable = random_trainable(params)
    export_adapter(tmp_path / "adapter", trainable, base_model="some/model")
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    pairs = trainable.adapter.pairs
    assert len(tensors) == 2 * (2 * 7 + 2)
    assert all(value.dtype == np.float32 for value in tensors.values())
    np.testing.assert_array_equal(tensors[Q_A], pairs["q_proj"]["a"][1].T)  # [rank, in]
    np.testing.assert_array_equal(tensors[DOWN_B], pairs["down_proj"]["b"][0].T)  # [out, rank]
    np.testing.assert_array_equal(
        tensors[NORM], trainable.norm_scales["post_attention_layernorm"][1]
    )
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert config["r"] == 3 and config["lora_alpha"] == 7
    assert set(config["target_modules"]) == set(SIZES)
    assert set(config["modules_to_save"]) == set(BLOCK_NORMS)
    assert config["base_model_name_or_path"] == "some/model"


def test_half_precision_adapters_are_exported_exactly(params, tmp_path):
    trainable = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_trainable(params))
    export_adapter(tmp_path / "adapter", trainable)
    back = import_adapter(tmp_path / "adapter", params)
    assert_equal(back, jax.tree.map(lambda x: x.astype(jnp.float32), trainable))


def test_a_folder_is_never_overwritten_nor_half_written(params, tmp_path, monkeypatch):
    trainable = random_trainable(params)
    export_adapter(tmp_path / "adapter", trainable)
    before = {p.name: p.read_bytes() for p in (tmp_path / "adapter").iterdir()}
    with pytest.raises(ValueError, match=r"adapter: already exists$"):
        export_adapter(tmp_path / "adapter", random_trainable(params, seed=1))
    assert {p.name: p.read_bytes() for p in (tmp_path / "adapter").iterdir()} == before

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("qerl_jax.peft.write_json", fail)
    with pytest.raises(OSError, match="disk full"):
        export_adapter(tmp_path / "other", trainable)
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_replace_swaps_the_whole_folder(params, tmp_path):
    export_adapter(tmp_path / "adapter", random_trainable(params))
    (tmp_path / "adapter/leftover").touch()
    newer = random_trainable(params, seed=1)
    export_adapter(tmp_path / "adapter", newer, replace=True)
    assert_equal(import_adapter(tmp_path / "adapter", params), newer)
    assert not (tmp_path / "adapter/leftover").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_rank_stabilized_scale_and_target_pattern(params, tmp_path):
    export_adapter(tmp_path / "adapter", random_trainable(params, rank=4, alpha=6.0))
    edit(tmp_path / "adapter", use_rslora=True, target_modules=r".*_proj$")
    back = import_adapter(tmp_path / "adapter", params)
    assert back.adapter.scale == 3.0  # 6 / sqrt(4)
    assert tuple(back.adapter.pairs) == tuple(SIZES)


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora: True is not supported"),
        ({"bias": "all"}, "bias: 'all' is not supported"),
        ({"peft_type": "IA3"}, "peft_type: 'IA3' is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern: {'q_proj': 8} is not supported"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern: {'q_proj': 8} is not supported"),
        ({"layers_to_transform": [1]}, "layers_to_transform: [1] is not supported"),
        ({"r": 0}, "r: 0 is not a positive integer"),
        ({"r": True}, "r: True is not a positive integer"),
        ({"lora_alpha": "x"}, "lora_alpha: 'x' is not a positive number"),
        ({"lora_alpha": float("nan")}, "lora_alpha: nan is not a positive number"),
        ({"lora_alpha": True}, "lora_alpha: True is not a positive number"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: [1] is not supported"),
        ({"target_parameters": ["mlp.w"]}, "target_parameters: ['mlp.w'] is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: [1] is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' is not supported"),
        ({"init_lora_weights": "olora"}, "init_lora_weights: 'olora' is not supported"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights: 'loftq' is not supported"),
        ({"use_rslora": "false"}, "use_rslora: 'false' is not supported"),
        ({"modules_to_save": 5}, "modules_to_save: 5 is not supported"),
        ({"target_modules": {"a": 1}}, "target_modules: {'a': 1} is not supported"),
        ({"exclude_modules": ["v_proj"]}, "exclude_modules: ['v_proj'] is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: 'lm_head' is not one of input_layern"),
        ({"target_modules": ["embed_tokens"]}, "target_modules: 'embed_tokens' is not one of q_p"),
    ],
)
def test_refused_configs(params, tmp_path, changes, message):
    export_adapter(tmp_path / "adapter", random_trainable(params))
    edit(tmp_path / "adapter", **changes)
    with pytest.raises(ValueError) as caught:
        import_adapter(tmp_path / "adapter", params)
    expected = f"{tmp_path}/adapter/adapter_config.json: {message}"
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_A), "tensor {Q_A} is missing (1 missing)"),
        (lambda t: t.pop(NORM), "tensor {NORM} is missing (1 missing)"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[Q_A]}),
            "base_model.model.lm_head.lora_A.weight: this tensor has no place in the adapter",
        ),
        (
            lambda t: t.update({Q_A: np.zeros((4, 32), np.float32)}),
            "{Q_A}: shape [4, 32], but the model and r in adapter_config.json ask for [3, 32]",
        ),
        (
            lambda t: t.update({DOWN_B: np.full((32, 3), np.nan, np.float32)}),
            "{DOWN_B}: holds NaN or infinity",
        ),
    ],
)
def test_refused_tensors(params, tmp_path, change, message):
    export_adapter(tmp_path / "adapter", random_trainable(params))
    path = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ValueError) as caught:
        import_adapter(tmp_path / "adapter", params)
    assert str(caught.value) == f"{path}: " + message.format(Q_A=Q_A, NORM=NORM, DOWN_B=DOWN_B)


def test_missing_and_truncated_files(params, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: no such adapter folder$"):
        import_adapter(tmp_path / "nowhere", params)
    export_adapter(tmp_path / "adapter", random_trainable(params))
    path = tmp_path / "adapter/adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"adapter_model.safetensors: not a complete safetensors"):
        import_adapter(tmp_path / "adapter", params)
    path.unlink()
    with pytest.raises(ValueError, match=r"adapter_model.safetensors: no such file$"):
        import_adapter(tmp_path / "adapter", params)


def test_an_adapter_of_another_model_is_refused(params, tmp_path):
    export_adapter(tmp_path / "adapter", random_trainable(params))
    deeper = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), params["layers"])
    with pytest.raises(ValueError, match=r"layers\.2\..* is missing"):
        import_adapter(tmp_path / "adapter", {**params, "layers": deeper})


@pytest.fixture(scope="module")
def tiny_qwen2(tmp_path_factory):
    """A random Qwen2 made by transformers: (its folder, our config, our parameters)."""
    pytest.importorskip("torch").manual_seed(0)
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from qerl_jax.models import decoder_config_from_hf
    from qerl_jax.models.hf import load_params, read_config

    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    folder = tmp_path_factory.mktemp("qwen2")
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings)).save_pretrained(folder)
    config = decoder_config_from_hf(read_config(folder))
    return folder, config, load_params(folder, config, quantize=False, dtype=jnp.float32)


def our_logits(params, trainable, ids, config):
    from qerl_jax.lora import overlay_norms
    from qerl_jax.models import forward
    from qerl_jax.models.head import head_logits, head_weight

    policy, tokens = overlay_norms(params, trainable), jnp.asarray(ids)
    valid = jnp.ones(tokens.shape, bool)
    hidden, _ = forward(policy, trainable.adapter, tokens, valid, config=config)
    return head_logits(hidden.reshape(-1, config.embed), head_weight(params))


IDS = np.arange(2 * 12).reshape(2, 12) % 50


@pytest.mark.parametrize("train_norms", [True, False])
def test_peft_computes_the_same_logits_from_our_folder(tiny_qwen2, tmp_path, train_norms):
    import peft
    import torch
    import transformers

    folder, config, params = tiny_qwen2
    trainable = random_trainable(params, rank=4, alpha=2.0, train_norms=train_norms)
    export_adapter(tmp_path / "adapter", trainable, base_model=str(folder))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        plain = base(torch.from_numpy(IDS)).logits.numpy()
        model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        adapted = model(torch.from_numpy(IDS)).logits.numpy()
    ours = our_logits(params, trainable, IDS, config)
    np.testing.assert_allclose(ours, adapted.reshape(ours.shape), atol=1e-4, rtol=0)
    assert np.abs(adapted - plain).max() > 0.1  # the adapter does something


def test_a_folder_that_peft_wrote_is_read(tiny_qwen2, tmp_path):
    import peft
    import torch
    import transformers

    folder, config, params = tiny_qwen2
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["v_proj", "down_proj"],
        modules_to_save=["post_attention_layernorm"],
        init_lora_weights=False,  # B is random, not zero
        task_type="CAUSAL_LM",
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "modules_to_save" in name:
                value += 0.5
        theirs = model.eval()(torch.from_numpy(IDS)).logits.numpy()
    model.save_pretrained(tmp_path / "adapter")
    trainable = import_adapter(tmp_path / "adapter", params)
    assert set(trainable.adapter.pairs) == {"v_proj", "down_proj"}
    assert set(trainable.norm_scales) == {"post_attention_layernorm"}
    ours = our_logits(params, trainable, IDS, config)
    np.testing.assert_allclose(ours, theirs.reshape(ours.shape), atol=1e-4, rtol=0)
