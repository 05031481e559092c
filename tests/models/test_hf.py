"""Checkpoint folders into parameters: values, bits, refusals and memory."""

import json
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file

from qerl_jax.models import decoder_config_from_hf, forward
from qerl_jax.models.head import head_logits, head_weight
from qerl_jax.models.hf import load_params, read_config
from qerl_jax.models.hf_keys import key_table
from qerl_jax.quant import NvFp4Tensor, dequantize, quantize, quantize_params
from qerl_jax.tree import flatten_arrays, flatten_weights, num_bytes

BF16 = ml_dtypes.bfloat16
DTYPES = {"BF16": BF16, "F32": np.float32, "U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn}
TINY = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
UP = "model.layers.1.mlp.up_proj.weight"


def raw_tensors(path):
    """Read a file with the library's lowest-level reader."""
    return {
        name: np.frombuffer(bytes(item["data"]), DTYPES[item["dtype"]]).reshape(item["shape"])
        for name, item in deserialize(path.read_bytes())
    }


def config_of(folder):
    return decoder_config_from_hf(read_config(folder))


def load(folder, *, quantize=False, **kwargs):
    return load_params(folder, config_of(folder), quantize=quantize, **kwargs)


def random_tensors(hf_config, *, dtype=BF16, seed=0):
    """Draw a checkpoint of this shape, named and shaped by hand."""
    rng = np.random.default_rng(seed)
    h, f = hf_config["hidden_size"], hf_config["intermediate_size"]
    kv = h // hf_config["num_attention_heads"] * hf_config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (hf_config["vocab_size"], h), "model.norm.weight": (h,)}
    if not hf_config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (hf_config["vocab_size"], h)
    for i in range(hf_config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for name, n in (("q", h), ("k", kv), ("v", kv)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (n, h)
            shapes[f"{at}.self_attn.{name}_proj.bias"] = (n,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (h, h)
        shapes |= {f"{at}.mlp.{name}_proj.weight": (f, h) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (h, f)
        shapes[f"{at}.input_layernorm.weight"] = (h,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (h,)
    return {k: rng.standard_normal(s, np.float32).astype(dtype) for k, s in shapes.items()}


def write_folder(folder, tensors, hf_config=TINY):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_same_arrays(one, other):
    one, other = flatten_arrays(one), flatten_arrays(other)
    assert list(one) == list(other)
    for name, array in one.items():
        assert array.dtype == other[name].dtype, name
        view = np.uint8 if array.dtype.itemsize == 1 else array.dtype
        np.testing.assert_array_equal(
            np.asarray(array).view(view), np.asarray(other[name]).view(view), err_msg=name
        )


# Values


@pytest.mark.parametrize("variant", ["dense", "ct_nvfp4a16"])
def test_golden_logits(golden, variant):
    folder = golden / "tiny_qwen2" / variant
    reference = np.load(golden / "tiny_qwen2/reference.npz")
    params, config = load(folder), config_of(folder)
    ids = jnp.asarray(reference["input_ids"], jnp.int32)
    hidden, _ = forward(params, None, ids, jnp.ones(ids.shape, bool), config=config)
    logits = head_logits(hidden.reshape(-1, config.embed), head_weight(params))
    expected = reference[f"{variant}/logits_f32"].reshape(logits.shape)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def test_every_tensor_lands_in_its_place(tmp_path):
    tensors = random_tensors(TINY)
    params = load(write_folder(tmp_path / "m", tensors))
    layers = params["layers"]
    places = {
        "model.embed_tokens.weight": params["embed_tokens"],
        "model.norm.weight": params["norm"],
        "lm_head.weight": params["lm_head"],
        "model.layers.1.self_attn.q_proj.weight": layers["q_proj"]["weight"][1],
        "model.layers.0.self_attn.k_proj.weight": layers["k_proj"]["weight"][0],
        "model.layers.1.self_attn.v_proj.weight": layers["v_proj"]["weight"][1],
        "model.layers.0.self_attn.o_proj.weight": layers["o_proj"]["weight"][0],
        "model.layers.1.mlp.gate_proj.weight": layers["gate_proj"]["weight"][1],
        "model.layers.1.mlp.up_proj.weight": layers["up_proj"]["weight"][1],
        "model.layers.0.mlp.down_proj.weight": layers["down_proj"]["weight"][0],
        "model.layers.1.self_attn.q_proj.bias": layers["q_proj"]["bias"][1],
        "model.layers.0.self_attn.k_proj.bias": layers["k_proj"]["bias"][0],
        "model.layers.1.self_attn.v_proj.bias": layers["v_proj"]["bias"][1],
        "model.layers.0.input_layernorm.weight": layers["input_layernorm"][0],
        "model.layers.1.post_attention_layernorm.weight": layers["post_attention_layernorm"][1],
    }
    for key, array in places.items():
        np.testing.assert_array_equal(
            np.asarray(array, np.float32), tensors[key].astype(np.float32)
        )
    wide = {path for path, leaf in flatten_weights(params).items() if leaf.dtype == jnp.float32}
    norms = {"norm", "layers/input_layernorm", "layers/post_attention_layernorm"}
    assert wide == norms | {f"layers/{name}_proj/bias" for name in "qkv"}


@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_dtypes_of_other_checkpoints(tmp_path, stored):
    tensors = random_tensors(TINY, dtype=stored)
    folder = write_folder(tmp_path / "m", tensors)
    wide, narrow = load(folder, dtype=jnp.float32), load(folder)
    up = tensors[UP].astype(np.float32)
    np.testing.assert_array_equal(wide["layers"]["up_proj"]["weight"][1], up)
    np.testing.assert_array_equal(narrow["layers"]["up_proj"]["weight"][1], up.astype(BF16))
    assert narrow["embed_tokens"].dtype == jnp.bfloat16


def test_the_quantizer_sees_what_the_file_holds_not_a_cast_of_it(tmp_path):
    folder = write_folder(tmp_path / "m", random_tensors(TINY, dtype=np.float32))
    weight = load(folder, dtype=jnp.float32)["layers"]["down_proj"]["weight"]
    quantized = load(folder, quantize=True, dtype=jnp.bfloat16)["layers"]["down_proj"]["weight"]
    assert_same_arrays(quantized, quantize(weight))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_keys_and_shapes_are_those_of_transformers(kind, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    settings = {**TINY, "tie_word_embeddings": tied, "head_dim": 16}
    settings.pop("model_type")
    hf_config = getattr(transformers, f"{kind}Config")(**settings)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(hf_config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if tied:
        expected.pop("lm_head.weight", None)
    config = decoder_config_from_hf(
        {**hf_config.to_dict(), "architectures": [f"{kind}ForCausalLM"]}
    )
    table = key_table(config, nvfp4=False)
    assert {key: slot.shape for key, slot in table.items()} == expected


# NVFP4


def test_compressed_tensors_checkpoint_loads_bit_for_bit(golden):
    folder = golden / "tiny_qwen2/ct_nvfp4a16"
    params, raw = load(folder), raw_tensors(folder / "model.safetensors")
    for name, module in (("k_proj", "self_attn.k_proj"), ("down_proj", "mlp.down_proj")):
        weight = params["layers"][name]["weight"]
        assert isinstance(weight, NvFp4Tensor)
        for i in range(2):
            key = f"model.layers.{i}.{module}.weight"
            np.testing.assert_array_equal(weight.packed[i], raw[f"{key}_packed"])
            np.testing.assert_array_equal(
                np.asarray(weight.block_scales[i]).view(np.uint8),
                raw[f"{key}_scale"].view(np.uint8),
            )
            assert float(weight.global_scale[i]) == raw[f"{key}_global_scale"][0]
    reference = np.load(golden / "tiny_qwen2/reference.npz")
    for path, layer in (("self_attn.k_proj", 1), ("mlp.down_proj", 0)):
        decoded = dequantize(params["layers"][path.split(".")[1]]["weight"], dtype=jnp.float32)[
            layer
        ]
        expected = reference[f"ct_nvfp4a16/dequant/model.layers.{layer}.{path}"]
        np.testing.assert_array_equal(decoded, expected)


def test_nvfp4_checkpoint_stays_nvfp4_whatever_is_asked(golden):
    folder = golden / "tiny_qwen2/ct_nvfp4a16"
    assert_same_arrays(load(folder, quantize=True), load(folder, quantize=False))


def test_quantizing_gives_the_bytes_of_llm_compressor(golden):
    ours = load(golden / "tiny_qwen2/dense", quantize=True, round_to=jnp.bfloat16)
    assert_same_arrays(ours, load(golden / "tiny_qwen2/ct_nvfp4a16"))


@pytest.mark.parametrize("round_to", [jnp.float32, jnp.bfloat16])
def test_quantizing_on_the_way_in_equals_quantizing_afterwards(golden, round_to):
    folder = golden / "tiny_qwen2/dense"
    streamed = load(folder, quantize=True, round_to=round_to)
    assert_same_arrays(streamed, quantize_params(load(folder), round_to=round_to))
    scales = {
        name: streamed["layers"][name]["weight"].global_scale for name in ("q_proj", "v_proj")
    }
    np.testing.assert_array_equal(scales["q_proj"], scales["v_proj"])


def test_memory_is_the_packed_model_and_one_tensor(tmp_path, monkeypatch):
    hf_config = {**TINY, "hidden_size": 256, "num_key_value_heads": 4}
    hf_config |= {"intermediate_size": 1024, "num_hidden_layers": 12}
    tensors = random_tensors(hf_config)
    dense_bytes = sum(tensor.nbytes for tensor in tensors.values())
    largest = max(tensor.nbytes for tensor in tensors.values())
    folder = write_folder(tmp_path / "m", tensors, hf_config)
    del tensors
    packed_bytes = num_bytes(load(folder, quantize=True))  # and everything is compiled now

    from qerl_jax import hf_files
    from qerl_jax.models import hf

    def live_bytes():
        return sum(a.nbytes for a in jax.live_arrays()) + tracemalloc.get_traced_memory()[0]

    seen = []

    def watched(entry):
        seen.append(live_bytes())
        return hf_files.read_tensor(entry)

    monkeypatch.setattr(hf, "read_tensor", watched)
    tracemalloc.start()  # numpy's arrays
    try:
        before = live_bytes()
        params = load(folder, quantize=True)
        host_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    allowed = 3 * largest + 2**20
    assert packed_bytes + 2 * allowed < dense_bytes  # or the test could not fail
    assert max(seen) - before < packed_bytes + allowed
    assert host_peak < allowed
    assert num_bytes(params) == packed_bytes


# Folders


def shard(folder, tensors, *, index=None):
    """Write two shards and their index; returns the index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    names = sorted(tensors)
    where = {n: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == file}, folder / file)
    text = json.dumps({"metadata": {}, "weight_map": where})
    (folder / "model.safetensors.index.json").write_text(text)
    return where


def test_shards_equal_a_single_file(tmp_path):
    tensors = random_tensors(TINY)
    shard(tmp_path / "sharded", tensors)
    single = load(write_folder(tmp_path / "single", tensors))
    assert_same_arrays(load(tmp_path / "sharded"), single)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    tensors, folder = random_tensors(TINY), tmp_path / "m"
    where = shard(folder, tensors)
    first, second = sorted(set(where.values()))
    extra = next(n for n, file in where.items() if file == first)
    kept = {n: tensors[n] for n, file in where.items() if file == second}
    save_file({**kept, extra: tensors[extra]}, folder / second)
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert str(caught.value) == f"{folder / second}: {extra}: is also in {first}"


def test_an_index_that_lies_is_refused(tmp_path):
    folder = tmp_path / "m"
    where = shard(folder, random_tensors(TINY))
    index = folder / "model.safetensors.index.json"
    first, second = sorted(set(where.values()))
    name = next(n for n, file in where.items() if file == first)
    index.write_text(json.dumps({"weight_map": {**where, name: second}}))
    with pytest.raises(ValueError, match=rf"index.json: {name} is not in {second}$"):
        load(folder)
    index.write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(ValueError, match=r"weight_map is not a table of file names$"):
        load(folder)
    index.write_text(json.dumps({"weight_map": where}))
    (folder / second).unlink()
    with pytest.raises(ValueError, match=rf"{second}: no such file$"):
        load(folder)


def test_config_errors_name_the_place(tmp_path):
    with pytest.raises(ValueError) as caught:
        read_config(tmp_path / "nowhere")
    assert str(caught.value) == f"{tmp_path}/nowhere: no such model folder"
    with pytest.raises(ValueError) as caught:
        read_config(tmp_path)
    assert str(caught.value) == f"{tmp_path}/config.json: no such file"
    (tmp_path / "config.json").write_text('{\n"a": 1,\n}')
    with pytest.raises(ValueError, match=r"config.json:3: not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config.json: holds a JSON list, not an object$"):
        read_config(tmp_path)


def test_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor model.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_files_are_refused(golden, tmp_path, keep):
    folder = shutil.copytree(golden / "tiny_qwen2/dense", tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert str(caught.value).startswith(f"{path}: not a complete safetensors file (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "gguf"}, "gguf"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "compressed-tensors (pack-quantized)",
        ),
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path, settings, found):
    folder = write_folder(tmp_path / "m", {}, {**TINY, "quantization_config": settings})
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert str(caught.value) == (
        f"{folder}/config.json: quantization_config: {found} is not supported; only "
        "compressed-tensors (nvfp4-pack-quantized) is"
    )


# Tensors


def replaced(name, value):
    return lambda tensors: tensors.update({name: value})


def poisoned(name, value):
    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].flat[5] = value

    return change


Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("model.layers.0.mlp.extra", np.zeros(3, BF16)), "{file}: model.layers.0.mlp.extra"
         ": this tensor has no place in the model"),
        (replaced("model.layers.2.mlp.up_proj.weight", np.zeros((96, 64), BF16)), "{file}: "
         "model.layers.2.mlp.up_proj.weight: this tensor has no place in the model"),
        (lambda t: t.pop(UP), "{folder}: tensor model.layers.1.mlp.up_proj.weight is missing "
         "(1 missing)"),
        (lambda t: t.pop("lm_head.weight"), "{folder}: tensor lm_head.weight is missing "
         "(1 missing)"),
        (replaced(UP, np.zeros((64, 96), BF16)), "{file}: model.layers.1.mlp.up_proj.weight: "
         "shape [64, 96], but config.json asks for [96, 64]"),
        (replaced("model.norm.weight", np.zeros((1, 64), BF16)), "{file}: model.norm.weight: "
         "shape [1, 64], but config.json asks for [64]"),
        (replaced(UP, np.zeros((96, 64), np.int8)), "{file}: model.layers.1.mlp.up_proj.weight: "
         "dtype int8 is not one of bfloat16, float16, float32"),
        (poisoned(UP, np.nan), "{file}: model.layers.1.mlp.up_proj.weight: holds NaN or infinity"),
        (poisoned(Q0, -np.inf), "{file}: model.layers.0.self_attn.q_proj.weight: holds NaN or "
         "infinity"),
        (replaced("model.embed_tokens.weight", np.full((40, 64), 3.4e38, np.float32)),
         "{file}: model.embed_tokens.weight: holds numbers beyond bfloat16"),
        (poisoned("model.norm.weight", np.nan), "{file}: model.norm.weight: holds NaN or infinity"),
        (poisoned("model.embed_tokens.weight", np.inf), "{file}: model.embed_tokens.weight: "
         "holds NaN or infinity"),
    ],
)  # fmt: skip
def test_refused_tensors(tmp_path, change, message, quantize):
    tensors = random_tensors(TINY)
    change(tensors)
    folder = write_folder(tmp_path / "m", tensors)
    with pytest.raises(ValueError) as caught:
        load(folder, quantize=quantize)
    file = folder / "model.safetensors"
    assert str(caught.value) == message.format(file=file, folder=folder)


def test_input_size_that_does_not_divide_is_refused_before_any_reading(tmp_path, monkeypatch):
    hf_config = {**TINY, "intermediate_size": 40}
    folder = write_folder(tmp_path / "m", random_tensors(hf_config), hf_config)
    load(folder)  # fine in 16 bits
    monkeypatch.setattr("qerl_jax.models.hf.read_tensor", None)
    with pytest.raises(ValueError) as caught:
        load(folder, quantize=True)
    assert str(caught.value) == (
        f"{folder}/model.safetensors: model.layers.0.mlp.down_proj.weight: "
        "input size 40 is not a multiple of 16"
    )


def test_tied_models_may_store_their_head_if_it_is_the_embedding(tmp_path):
    hf_config = {**TINY, "tie_word_embeddings": True}
    tensors = random_tensors(hf_config)
    embedding = tensors["model.embed_tokens.weight"]
    plain = load(write_folder(tmp_path / "plain", tensors, hf_config))
    assert "lm_head" not in plain
    stored = write_folder(tmp_path / "s", {**tensors, "lm_head.weight": embedding}, hf_config)
    assert_same_arrays(load(stored), plain)
    other = write_folder(tmp_path / "o", {**tensors, "lm_head.weight": -embedding}, hf_config)
    with pytest.raises(ValueError) as caught:
        load(other)
    assert str(caught.value) == (
        f"{other}/model.safetensors: lm_head.weight: differs from model.embed_tokens.weight, so "
        "the model is not tied: tie_word_embeddings in config.json has to be false"
    )


def test_left_overs_of_exporters_are_ignored(golden, tmp_path):
    tensors = random_tensors(TINY)
    plain = load(write_folder(tmp_path / "plain", tensors))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert_same_arrays(load(write_folder(tmp_path / "old", tensors)), plain)
    source = golden / "tiny_qwen2/ct_nvfp4a16"
    folder = shutil.copytree(source, tmp_path / "w4a4")
    raw = raw_tensors(source / "model.safetensors")
    raw["model.layers.0.mlp.up_proj.input_global_scale"] = np.ones(1, np.float32)
    save_file(raw, folder / "model.safetensors")
    assert_same_arrays(load(folder), load(source))


def test_damaged_nvfp4_scales_are_refused(golden, tmp_path):
    source = golden / "tiny_qwen2/ct_nvfp4a16"
    folder = shutil.copytree(source, tmp_path / "m")
    raw = raw_tensors(source / "model.safetensors")
    raw["model.layers.1.mlp.up_proj.weight_global_scale"] = np.zeros(1, np.float32)
    save_file(raw, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers/up_proj/weight: global_scale .* is not positive"):
        load(folder)
