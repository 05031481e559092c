"""`qerl score` and `qerl generate` against transformers on the embedded model; what they refuse."""

import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.base_model import load_weights, model_path, open_model
from qerl_jax.inference import GENERATE_ROWS, generate, score
from qerl_jax.lora import Trainable
from qerl_jax.output import check_output
from qerl_jax.peft import export_adapter
from qerl_jax.testing import tiny_adapter

TEXTS = ("17+58=75", "3+5=", "9")
PROMPTS = ("17+58=", "3+5=", "99+99=", "40+2=")


@pytest.fixture(scope="module")
def model():
    return open_model("tiny", dtype="float32")


@pytest.fixture(scope="module")
def oracle():
    """Return transformers' own model, in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = model_path("tiny")
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, model):
    """Return the folder of an adapter that changes the model."""
    params = load_weights(model, quantize=False, scale_rounding="float32")
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    moved = Trainable(adapter=tiny_adapter(jax.random.key(1), params), norm_scales=None)
    export_adapter(folder, moved)
    return str(folder)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes rows (or text as it is) to a file and returns its name."""

    def write(rows):
        if not isinstance(rows, str):
            rows = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "in.jsonl").write_text(rows)
        return str(tmp_path / "in.jsonl")

    return write


@pytest.fixture
def run_score(write, tmp_path):
    """Return a function that scores rows through files and returns the records."""

    def run(rows, **changes):
        target = tmp_path / "out.jsonl"
        settings = {
            "model": "tiny",
            "adapter": None,
            "quantize": False,
            "input": write(rows),
            "output": str(target),
            "top_k": 0,
            "temperature": 1.0,
        }
        score(**settings | changes)
        return [json.loads(line) for line in target.read_text().splitlines()]

    return run


@pytest.fixture
def run_generate(capsys):
    """Return a function that generates and returns the printed records."""

    def run(*prompts, **changes):
        settings = {
            "model": "tiny",
            "adapter": None,
            "quantize": False,
            "prompts": prompts,
            "input": None,
            "max_tokens": 6,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": 0,
            "chat": False,
            "n": 1,
        }
        capsys.readouterr()
        generate(**settings | changes)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def oracle_logits(oracle, ids):
    import torch

    with torch.no_grad():
        return oracle(torch.tensor([ids])).logits[0].numpy()


# score


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_transformers(run_score, oracle, model, temperature):
    records = run_score([{"text": text} for text in TEXTS], top_k=4, temperature=temperature)
    for text, record in zip(TEXTS, records, strict=True):
        ids = model.tokenizer(text)["input_ids"]
        assert record["ids"] == ids
        logits = oracle_logits(oracle, ids)
        every = np.asarray(jax.nn.log_softmax(logits / np.float32(temperature), axis=-1))
        expected = every[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(record["logprobs"], expected, atol=1e-4)
        assert record["nll"] == pytest.approx(-expected.sum(), abs=1e-3)
        largest = np.argsort(-logits, axis=-1)[:, :4]
        assert record["top_ids"] == largest.tolist()
        np.testing.assert_allclose(
            record["top_logits"], np.take_along_axis(logits, largest, axis=-1), atol=1e-4
        )


def test_texts_and_their_ids_are_the_same_rows(run_score, model):
    texts = run_score([{"text": text} for text in TEXTS])
    ids = run_score([{"ids": model.tokenizer(text)["input_ids"]} for text in TEXTS])
    assert texts == ids
    assert set(texts[0]) == {"ids", "logprobs", "nll"}
    assert texts[2] == {"ids": texts[2]["ids"], "logprobs": [], "nll": 0.0}


def test_numbers_are_read_back_as_the_float32_they_were(run_score):
    record = run_score([{"text": TEXTS[0]}])[0]
    wide = np.array(record["logprobs"])
    assert all(float(str(np.float32(value))) == value for value in wide)
    assert max(len(str(value)) for value in record["logprobs"]) <= 14


def test_a_long_row_says_the_same_of_its_beginning(run_score):
    """Rows of 40 and 70 tokens are padded to different widths."""
    long = [10 + i % 11 for i in range(70)]
    short, whole = run_score([{"ids": long[:40]}, {"ids": long}])
    np.testing.assert_allclose(short["logprobs"], whole["logprobs"][:39], atol=1e-4)


def test_blank_lines_are_passed_over_and_unknown_fields_do_not_matter(run_score):
    records = run_score('\n{"text": "3+5=", "note": 1}\n\n')
    assert len(records) == 1


def test_an_adapter_changes_the_scores(run_score, adapter):
    plain, moved = (run_score([{"text": TEXTS[0]}], adapter=a)[0] for a in (None, adapter))
    assert np.abs(np.subtract(plain["logprobs"], moved["logprobs"])).max() > 0.01


def test_quantize_changes_the_scores_a_little(run_score):
    dense, packed = (run_score([{"text": TEXTS[0]}], quantize=q)[0] for q in (False, True))
    gap = np.abs(np.subtract(dense["logprobs"], packed["logprobs"])).max()
    assert 1e-3 < gap < 3.0


def test_standard_input_and_output(run_score, monkeypatch, capsys):
    expected = run_score([{"text": "3+5=8"}])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "3+5=8"}\n')))
    score(
        model="tiny",
        adapter=None,
        quantize=False,
        input="-",
        output="-",
        top_k=0,
        temperature=1.0,
    )
    assert json.loads(capsys.readouterr().out) == expected[0]


def test_the_output_must_not_replace_the_input(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "3+5=8"}\n')
    (tmp_path / "link").symlink_to("in.jsonl")
    with pytest.raises(ValueError, match=r"^--out: .*link is the file that --in reads$"):
        check_output(str(tmp_path / "link"), sources={"--in": str(tmp_path / "in.jsonl")})
    check_output("/dev/null", sources={"--in": "-", "data.eval_path": None})


def test_the_output_must_not_replace_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("run/adapter/a", "run/config.resolved.yaml", "run/environment.json", "data"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run" / "mine.jsonl").write_text("")
    for target, source, message in (
        ("data", "~/data", "is the file that x reads"),
        ("run/adapter/a", "~/run/adapter", "lies in the folder that x reads"),
        ("run/adapter/a", None, f"belongs to the run {tmp_path}/run"),
        ("run/metrics.jsonl", "-", f"belongs to the run {tmp_path}/run"),
        ("run/samples.jsonl", None, f"belongs to the run {tmp_path}/run"),  # not there yet
    ):
        with pytest.raises(ValueError, match=rf"^--out: .*{target} {message}$"):
            check_output(str(tmp_path / target), sources={"x": source})
    check_output(str(tmp_path / "run" / "mine.jsonl"), sources={})


BAD_ROWS = {
    '{"text": "1"}\n{"ids": [1, 2]\n': r":2: not valid JSON",
    '{"text": "1"}\n\n[1]\n': r":3: holds list, not an object",
    '{"txt": "1"}\n': r':1: needs "text" \(a string\) or "ids" \(a list of integers\)',
    '{"text": 1}\n': r':1: needs "text"',
    '{"ids": "12"}\n': r":1: ids must be a list of integers",
    '{"ids": [1, true]}\n': r":1: ids must be a list of integers",
    '{"ids": [1, 2.0]}\n': r":1: ids must be a list of integers",
    '{"ids": [1, 99999]}\n': r":1: token id 99999 is not one of 0 to \d+$",
    '{"ids": [-1]}\n': r":1: token id -1 is not one of 0 to \d+$",
    '{"ids": []}\n': r":1: 0 tokens; 1 to \d+ are allowed",
    '{"text": ""}\n': r":1: 0 tokens; 1 to \d+ are allowed",
    "\n": r"in\.jsonl: holds no rows",
}


@pytest.mark.parametrize("rows", BAD_ROWS)
def test_a_bad_row_is_named_and_nothing_is_written(run_score, tmp_path, rows):
    (tmp_path / "out.jsonl").write_text("older\n")
    with pytest.raises(ValueError, match=BAD_ROWS[rows]) as error:
        run_score(rows)
    assert str(error.value).startswith(str(tmp_path / "in.jsonl"))
    assert (tmp_path / "out.jsonl").read_text() == "older\n"


def test_a_row_over_the_context_is_refused(run_score, model):
    limit = model.config.max_positions
    with pytest.raises(ValueError, match=rf":1: {limit + 1} tokens; 1 to {limit} are allowed"):
        run_score([{"ids": [2] * (limit + 1)}])


def refuse_to_load(*_, **__):
    raise AssertionError("the weights were read before the input was checked")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 99999}, r"--top-k: 99999 exceeds \d+, the vocabulary"),
        ({"adapter": "no/adapter"}, r"no/adapter: no such adapter folder"),
        ({"model": "no/model"}, r"no/model: no such model folder"),
        ({"output": "no/folder/x.jsonl"}, r"--out: no/folder/x.jsonl cannot be written"),
        ({"output": "."}, r"--out: \. is a folder"),
    ],
)
def test_bad_settings_are_refused_before_the_weights_are_read(
    run_score, monkeypatch, changes, message
):
    monkeypatch.setattr("qerl_jax.inference.load_weights", refuse_to_load)
    with pytest.raises(ValueError, match=message):
        run_score([{"text": "1"}], **changes)


def test_texts_need_a_tokenizer_and_ids_do_not(run_score, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_path("tiny"), folder, ignore=shutil.ignore_patterns("tokenizer*"))
    assert run_score([{"ids": [2, 3]}], model=str(folder)) == run_score([{"ids": [2, 3]}])
    with pytest.raises(ValueError, match=r"model: holds no tokenizer \(none of tokenizer\.json"):
        run_score([{"text": "1"}], model=str(folder))


def test_float32_files_are_not_rounded(tmp_path, oracle, run_score, model):
    """Weights that bfloat16 cannot hold are scored as they are."""
    import torch

    scaled = type(oracle)(oracle.config).eval()
    scaled.load_state_dict(oracle.state_dict())
    with torch.no_grad():
        for parameter in scaled.parameters():
            parameter.mul_(1.0 + 1 / 512)
    scaled.save_pretrained(tmp_path / "model")
    ids = model.tokenizer(TEXTS[0])["input_ids"]
    record = run_score([{"ids": ids}], model=str(tmp_path / "model"), top_k=3)[0]
    logits = oracle_logits(scaled, ids)
    expected = np.sort(logits, axis=-1)[:, :-4:-1]
    np.testing.assert_allclose(record["top_logits"], expected, atol=2e-4)


# generate


def test_greedy_completions_are_those_of_transformers(run_generate, oracle, model):
    import torch

    records = run_generate(*PROMPTS)
    for prompt, record in zip(PROMPTS, records, strict=True):
        ids = torch.tensor([model.tokenizer(prompt)["input_ids"]])
        whole = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
        )
        expected = whole[0, ids.shape[1] :].tolist()
        assert record["prompt"] == prompt
        assert record["completion"] == model.tokenizer.decode(expected, skip_special_tokens=True)
        assert record["tokens"] == len(expected)
        assert record["finish_reason"] == ("stop" if expected[-1] in model.end_ids else "length")


def test_the_logprob_is_that_of_score(run_generate, run_score, model):
    """The end token belongs to a completion that stopped."""
    record = run_generate("17+58=")[0]
    prompt = model.tokenizer(record["prompt"])["input_ids"]
    ids = [*prompt, *model.tokenizer(record["completion"])["input_ids"], model.end_ids[0]]
    assert (record["finish_reason"], record["tokens"]) == ("stop", len(ids) - len(prompt))
    logprobs = run_score([{"ids": ids}])[0]["logprobs"][len(prompt) - 1 :]
    assert record["logprob"] == pytest.approx(sum(logprobs), abs=1e-4)


def test_a_limit_cuts_a_completion(run_generate):
    (record,) = run_generate("17+58=", max_tokens=1)
    assert (record["tokens"], record["finish_reason"]) == (1, "length")
    assert len(record["completion"]) == 1


def test_samples_stand_by_their_prompts_and_depend_on_the_seed(run_generate):
    settings = {"temperature": 1.5, "n": 8}
    first, again, other = (run_generate(*PROMPTS[:2], seed=s, **settings) for s in (0, 0, 1))
    assert [record["prompt"] for record in first] == [p for p in PROMPTS[:2] for _ in range(8)]
    assert first == again != other
    assert len({record["completion"] for record in first[:8]}) > 1


def test_filters_reach_the_sampler(run_generate):
    greedy = run_generate(*PROMPTS, max_tokens=3)
    for change in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999999}):
        kept = run_generate(*PROMPTS, temperature=1.0, max_tokens=3, **change)
        assert [r["completion"] for r in kept] == [r["completion"] for r in greedy], change


def test_more_rows_than_a_batch_holds(run_generate, capsys):
    """Each row is what it is in any batch, and the filler of the last one is not printed."""
    prompts = [f"{i}+{i}=" for i in range(10, 10 + GENERATE_ROWS + 3)]
    records = run_generate(*prompts, temperature=1.0)
    assert [record["prompt"] for record in records] == prompts
    alone = run_generate(*prompts[:3], temperature=1.0)
    assert [r["completion"] for r in alone] == [r["completion"] for r in records[:3]]
    assert len({record["completion"] for record in records[GENERATE_ROWS:]}) > 1


def test_prompts_from_a_file_come_after_those_of_the_command_line(run_generate, write):
    path = write([{"prompt": "1+1="}, {"prompt": "2+2=", "answer": "4"}])
    records = run_generate("3+3=", input=path)
    assert [record["prompt"] for record in records] == ["3+3=", "1+1=", "2+2="]


def test_an_adapter_changes_what_is_generated(run_generate, adapter):
    plain, moved = (run_generate(*PROMPTS, adapter=a) for a in (None, adapter))
    assert plain != moved


def test_chat_wraps_the_prompt(run_generate, tmp_path):
    pytest.importorskip("jinja2")
    folder = tmp_path / "model"
    shutil.copytree(model_path("tiny"), folder)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}+1="
    (folder / "chat_template.jinja").write_text(template)
    (record,) = run_generate("2", model=str(folder), chat=True)
    (expected,) = run_generate("2+1=")
    assert record == expected


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ((), {}, r"generate: no prompt given"),
        (("1+1=", ""), {}, r"prompt 2: holds no token"),
        (("1+1=",), {"chat": True}, r"--chat: .* has no chat template"),
        (
            ("1+1=",),
            {"max_tokens": 10**6},
            r"prompt 1: 4 tokens and --max-tokens 1000000 exceed the model's context of \d+ tokens",
        ),
        (("1+1=",), {"adapter": "no/adapter"}, r"no/adapter: no such adapter folder"),
    ],
)
def test_generate_refuses_before_the_weights_are_read(
    run_generate, monkeypatch, prompts, changes, message
):
    monkeypatch.setattr("qerl_jax.inference.load_weights", refuse_to_load)
    with pytest.raises(ValueError, match=message):
        run_generate(*prompts, **changes)


def test_a_bad_prompt_row_is_named(run_generate, write):
    path = write('{"prompt": "1+1="}\n{"text": "1+1="}\n')
    with pytest.raises(ValueError, match=r'in\.jsonl:2: needs "prompt" \(a string\)'):
        run_generate(input=path)


def test_every_dtype_gives_close_scores(run_score):
    wide, narrow = (
        run_score([{"text": TEXTS[0]}], dtype=d)[0]["logprobs"] for d in ("float32", "bfloat16")
    )
    gap = np.abs(np.subtract(wide, narrow)).max()
    assert 0 < gap < 0.5
    assert jnp.isfinite(jnp.array(narrow)).all()
