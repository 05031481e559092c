import json
from types import SimpleNamespace

import numpy as np
import pytest

from qerl_jax.data import decode_completion, end_token_ids, load_tokenizer

BARE = SimpleNamespace(eos_token_id=None)
WITH_END = SimpleNamespace(eos_token_id=7)


def _folder(path, **configs):
    for name, config in configs.items():
        text = config if isinstance(config, str) else json.dumps(config)
        (path / f"{name}.json").write_text(text)
    return path


@pytest.mark.parametrize(
    ("configs", "tokenizer", "ids"),
    [
        ({"generation_config": {"eos_token_id": [5, 3, 5]}}, WITH_END, (5, 3)),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 2}}, WITH_END, (0,)),
        ({"generation_config": {}, "config": {"eos_token_id": 2}}, WITH_END, (2,)),
        ({"generation_config": {"eos_token_id": None}}, WITH_END, (7,)),
        ({"config": {"eos_token_id": [1, 2]}}, BARE, (1, 2)),
        ({}, WITH_END, (7,)),
    ],
)
def test_end_tokens_of_a_folder(tmp_path, configs, tokenizer, ids):
    assert end_token_ids(tokenizer, _folder(tmp_path, **configs)) == ids


def test_end_tokens_of_settings():
    assert end_token_ids(WITH_END, {"eos_token_id": [1, 106]}) == (1, 106)
    assert end_token_ids(WITH_END, {}) == (7,)


@pytest.mark.parametrize("ids", [-1, True, 2.0, "2", [1, "2"], {"a": 1}])
def test_bad_end_tokens_are_refused(ids):
    with pytest.raises(ValueError, match=r"^eos_token_id: .* is not a token id or a list of them$"):
        end_token_ids(WITH_END, {"eos_token_id": ids})


def test_no_end_token_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"^eos_token_id: none in "):
        end_token_ids(BARE, _folder(tmp_path, config={"eos_token_id": []}))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_named(tmp_path, text):
    with pytest.raises(ValueError, match=r"generation_config\.json:"):
        end_token_ids(WITH_END, _folder(tmp_path, generation_config=text))


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer of digits and one special token."""
    pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<|end|>", *"0123456789+-=?"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("as_path", [True, False])
def test_a_local_folder_loads(folder, as_path):
    tokenizer = load_tokenizer(folder if as_path else str(folder))
    assert tokenizer("17+58=", add_special_tokens=False)["input_ids"] == [2, 8, 11, 6, 9, 13]
    assert end_token_ids(tokenizer, folder) == (0,)


def test_completions_lose_their_special_tokens_only(folder):
    tokenizer = load_tokenizer(folder)
    assert decode_completion(tokenizer, np.array([12, 8, 6, 0], np.int32)) == "-75"
    assert decode_completion(tokenizer, [0]) == ""
    assert decode_completion(tokenizer, []) == ""


def test_missing_tokenizers_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none: no such model folder$"):
        load_tokenizer(tmp_path / "none")
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="no tokenizer can be read") as raised:
        load_tokenizer(tmp_path)
    assert len(str(raised.value).splitlines()) == 1
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="no tokenizer can be read"):
        load_tokenizer(tmp_path)
