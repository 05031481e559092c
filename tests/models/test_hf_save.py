"""Parameters back into folders: NVFP4 as compressed-tensors writes it, and dense."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import deserialize

from qerl_jax.models import DecoderConfig, decoder_config_from_hf, init_params
from qerl_jax.models.hf import load_params, read_config, save_dense, save_nvfp4
from qerl_jax.tree import flatten_arrays

TIED_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 40,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def config_of(folder):
    return decoder_config_from_hf(read_config(folder))


def assert_same_arrays(one, other):
    one, other = flatten_arrays(one), flatten_arrays(other)
    assert list(one) == list(other)
    for name, array in one.items():
        assert array.dtype == other[name].dtype, name
        assert np.asarray(array).tobytes() == np.asarray(other[name]).tobytes(), name


def raw(folder):
    data = (folder / "model.safetensors").read_bytes()
    return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in deserialize(data)}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, request):
    """The golden dense model with a tokenizer, a licence and something private beside it."""
    golden = request.path.parents[1] / "golden/tiny_qwen2/dense"
    folder = shutil.copytree(golden, tmp_path_factory.mktemp("in") / "m")
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "private.txt"):
        (folder / name).write_text(name)
    return folder


def test_quantized_folder_is_the_one_of_llm_compressor(model_folder, golden, tmp_path):
    """Same names, shapes, dtypes and bytes as its exporter, but for float32 norms and biases."""
    config, out = config_of(model_folder), tmp_path / "out"
    params = load_params(model_folder, config, quantize=True, round_to=jnp.bfloat16)
    save_nvfp4(out, model_folder, params, config)
    theirs, ours = raw(golden / "tiny_qwen2/ct_nvfp4a16"), raw(out)
    assert set(ours) == set(theirs)
    for name, (dtype, shape, data) in theirs.items():
        if name.endswith((".bias", "norm.weight")):
            assert ours[name][:2] == ("F32", shape)
        else:
            assert ours[name] == (dtype, shape, data), name
    assert_same_arrays(load_params(out, config_of(out), quantize=False), params)


def test_quantized_config_describes_the_format(model_folder, golden, tmp_path):
    config, out = config_of(model_folder), tmp_path / "out"
    save_nvfp4(out, model_folder, load_params(model_folder, config, quantize=True), config)
    ours = read_config(out)
    settings = ours.pop("quantization_config")
    assert ours == read_config(model_folder)
    theirs = read_config(golden / "tiny_qwen2/ct_nvfp4a16")["quantization_config"]
    weights = settings["config_groups"]["group_0"]["weights"]
    assert weights.items() <= theirs["config_groups"]["group_0"]["weights"].items()
    for name in ("quant_method", "format", "quantization_status", "ignore"):
        assert settings[name] == theirs[name]
    assert settings["config_groups"]["group_0"]["input_activations"] is None
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    assert {p.name for p in out.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "chat_template.jinja", "LICENSE"),
    }


def test_dense_parameters_are_not_saved_as_nvfp4(model_folder, tmp_path):
    config = config_of(model_folder)
    params = load_params(model_folder, config, quantize=False)
    with pytest.raises(ValueError, match=r"^layers/\w+_proj/weight: is not quantized$"):
        save_nvfp4(tmp_path / "out", model_folder, params, config)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dense_round_trip_of_a_tied_model_with_qk_norms(tmp_path, key, dtype):
    config = decoder_config_from_hf(TIED_QWEN3)
    params = jax.tree.map(lambda x: x + 1 / 3, init_params(key, config))
    save_dense(tmp_path / "m", params, config, hf_config=TIED_QWEN3, dtype=dtype)
    back = load_params(tmp_path / "m", config_of(tmp_path / "m"), quantize=False, dtype=dtype)
    expected = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), params)
    assert_same_arrays(jax.tree.map(lambda x: x.astype(jnp.float32), back), expected)
    tensors = raw(tmp_path / "m")
    assert len(tensors) == 2 * 11 + 2 and "lm_head.weight" not in tensors
    assert {kind for kind, _, _ in tensors.values()} == {"F32" if dtype == jnp.float32 else "BF16"}
    assert read_config(tmp_path / "m")["dtype"] == jnp.dtype(dtype).name


def test_transformers_reads_the_dense_folder(tmp_path, key):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = decoder_config_from_hf(TIED_QWEN3)
    params = init_params(key, config)
    save_dense(tmp_path / "m", params, config, hf_config=TIED_QWEN3, dtype=jnp.float32)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for i, layer in enumerate(model.model.layers):
        expected = params["layers"]["down_proj"]["weight"][i]
        np.testing.assert_array_equal(layer.mlp.down_proj.weight.detach().numpy(), expected)


def test_nvfp4_parameters_are_not_saved_as_dense(model_folder, tmp_path):
    config: DecoderConfig = config_of(model_folder)
    params = load_params(model_folder, config, quantize=True)
    with pytest.raises(ValueError, match=r"_proj/weight: is NVFP4; there are no dense weights"):
        save_dense(tmp_path / "out", params, config, hf_config=read_config(model_folder))


def test_an_existing_folder_is_left_alone_and_a_failed_save_leaves_nothing(
    model_folder, tmp_path, monkeypatch
):
    config, out = config_of(model_folder), tmp_path / "out"
    params = load_params(model_folder, config, quantize=True)
    out.mkdir()
    with pytest.raises(ValueError) as caught:
        save_nvfp4(out, model_folder, params, config)
    assert str(caught.value) == f"{out}: already exists"
    assert list(tmp_path.iterdir()) == [out] and not any(out.iterdir())

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("qerl_jax.models.hf_save.write_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        save_nvfp4(tmp_path / "other", model_folder, params, config)
    assert list(tmp_path.iterdir()) == [out]


def test_a_folder_below_a_file_cannot_be_created(model_folder, tmp_path):
    config = config_of(model_folder)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/out: cannot be created \(.+\)$"):
        save_nvfp4(
            tmp_path / "file/out",
            model_folder,
            load_params(model_folder, config, quantize=True),
            config,
        )


def test_written_json_is_plain(model_folder, tmp_path):
    config, out = config_of(model_folder), tmp_path / "out"
    save_nvfp4(out, model_folder, load_params(model_folder, config, quantize=True), config)
    assert json.loads((out / "config.json").read_text()) == read_config(out)
    assert all(path.stat().st_mode & 0o077 == 0o044 for path in out.iterdir())
