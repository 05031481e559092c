import gzip
import json
import sys

import pytest

from qerl_jax.data import Example, Fields, hub_examples, jsonl_examples, reasoning_gym_examples
from qerl_jax.rewards import validate_answer

# The first two rows of GSM8K's train.jsonl (openai/grade-school-math, MIT), solutions shortened.
RAW = [
    {"question": "How many clips did Natalia sell?", "answer": "48/2 = <<48/2=24>>24\n#### 72"},
    {"question": "Balance?", "answer": "It was #### before.\n#### -1,234 "},
]


def _write(path, text, encoding="utf-8"):
    data = text.encode(encoding) if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def _jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_rows_are_read_in_order(tmp_path, name):
    rows = [{"q": f"{i}+1=", "a": i + 1, "other": [i]} for i in range(5)]
    path = _write(tmp_path / name, _jsonl(rows))
    fields = Fields(question="q", answer="a")
    expected = tuple(Example(question=f"{i}+1=", answer=str(i + 1)) for i in range(5))
    assert jsonl_examples(path, fields) == expected
    assert jsonl_examples(path, fields, size=3) == expected[:3]
    assert jsonl_examples(path, fields, size=99) == expected


def test_answer_follows_the_last_marker(tmp_path):
    path = _write(tmp_path / "raw.jsonl", _jsonl(RAW))
    examples = jsonl_examples(path, Fields(answer_marker="####"))
    assert [example.answer for example in examples] == ["72", "-1234"]


def test_blank_lines_byte_order_mark_and_missing_last_newline(tmp_path):
    first = '\ufeff{"question": "a\u2028\u00e9", "answer": "1"}\r\n'
    text = first + '\n  \n{"question": "b", "answer": ""}'
    examples = jsonl_examples(_write(tmp_path / "rows.jsonl", text), Fields())
    assert examples == (Example("a\u2028\u00e9", "1"), Example("b", ""))


GOOD = '{"question": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "1+1="', r"not valid JSON \(Expecting ',' delimiter\)"),
        ("[" * 100_000, r"not valid JSON \("),
        ("[1]", "expected an object, got list"),
        ('{"q": "1+1=", "answer": "2"}', 'no field "question"; it has q, answer'),
        ('{"question": "1+1=", "gold": "2"}', 'no field "answer"; it has question, gold'),
        ('{"question": null, "answer": "2"}', 'field "question" is NoneType, not text'),
        ('{"question": "1+1=", "answer": true}', 'field "answer" is bool, not text'),
        ('{"question": " ", "answer": "2"}', 'field "question" is empty'),
        ('{"question": "\\ud83d", "answer": "2"}', 'field "question" is not valid Unicode'),
        ('{"question": "1+1=", "answer": "two"}', "the gold answer 'two' is not one number"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = _write(tmp_path / "rows.jsonl", f"{GOOD}\n{line}\n{GOOD}")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:3: {message}") as raised:
        jsonl_examples(path, Fields(), check_answer=validate_answer)
    assert len(str(raised.value).splitlines()) == 1
    assert len(jsonl_examples(path, Fields(), size=1, check_answer=validate_answer)) == 1


def test_a_row_without_the_marker_is_named(tmp_path):
    path = _write(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(ValueError, match=r'rows\.jsonl:1: field "answer" has no "####"$'):
        jsonl_examples(path, Fields(answer_marker="####"))


def test_a_line_in_another_encoding_is_named(tmp_path):
    path = _write(
        tmp_path / "rows.jsonl", f'{GOOD}{{"question": "\u00e9", "answer": "2"}}', "latin-1"
    )
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: not valid UTF-8"):
        jsonl_examples(path, Fields())


def test_broken_gzip_is_named(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_text(GOOD)
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz:1: broken gzip file"):
        jsonl_examples(path, Fields())
    path.write_bytes(
        gzip.compress(_jsonl({"question": i, "answer": i} for i in range(99)).encode())[:-40]
    )
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz:\d+: broken gzip file"):
        jsonl_examples(path, Fields())


@pytest.mark.parametrize("text", ["", "\n \n"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_an_empty_file_holds_no_examples(tmp_path, name, text):
    with pytest.raises(ValueError, match=r"holds no examples$"):
        jsonl_examples(_write(tmp_path / name, text), Fields())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^data\.eval_path: .*none\.jsonl: no such file$"):
        jsonl_examples(tmp_path / "none.jsonl", Fields(), field="data.eval_path")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(tmp_path / "rows.jsonl", '{"question": "1+1=", "answer": "2"}\n')
    assert jsonl_examples("~/rows.jsonl", Fields())[0].answer == "2"


def _hub(name="openai/gsm8k", **options):
    fields = Fields(answer_marker="####")
    return hub_examples(name, fields, subset="main", split="train", **options)


def test_hub_rows(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list(RAW)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    examples = _hub(check_answer=validate_answer)
    assert calls == [(("openai/gsm8k", "main"), {"split": "train"})]
    assert [example.answer for example in examples] == ["72", "-1234"]
    assert _hub(size=1) == examples[:1]


def test_a_bad_hub_row_is_named(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [*RAW, {"question": "a", "answer": "b"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    with pytest.raises(
        ValueError, match=r'^openai/gsm8k train row 2: field "answer" has no "####"'
    ):
        _hub()


def test_an_unreachable_hub_points_to_files(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach it\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError) as raised:
        _hub()
    message = str(raised.value)
    assert message.startswith("data.name: openai/gsm8k (subset main, split train) cannot be loaded")
    assert "data.source: jsonl" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("package", "load"),
    [
        ("datasets", _hub),
        ("reasoning_gym", lambda: _gym("train")),
    ],
)
def test_a_missing_package_is_named(monkeypatch, package, load):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=r"^data\.source: .* needs the package"):
        load()


def _gym(part, *, name="chain_sum", size=40, seed=0, task=None):
    task = {"max_terms": 2, "max_digits": 1} if task is None else task
    return reasoning_gym_examples(name, size=size, seed=seed, task=task, part=part)


def test_gym_examples_depend_on_seed_and_index():
    pytest.importorskip("reasoning_gym")
    examples = _gym("train")
    assert len(examples) == 40
    assert examples == _gym("train")
    assert examples[:7] == _gym("train", size=7)
    for example in examples:
        problem = example.question.partition(": ")[2].removesuffix("=")
        assert int(example.answer) == eval(problem)


def test_gym_parts_and_neighbouring_seeds_share_nothing():
    """The package makes item i of seed s from s + i: seeds 0 and 1 share all items but one."""
    pytest.importorskip("reasoning_gym")
    train = {e.question for seed in range(3) for e in _gym("train", seed=seed, size=150)}
    held_out = {e.question for seed in range(3) for e in _gym("eval", seed=seed, size=60)}
    assert not train & held_out
    wide = {"min_digits": 6, "max_digits": 6}
    first, second = (set(_gym("train", seed=seed, task=wide)) for seed in (0, 1))
    assert not first & second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "chain_sums"}, 'data.name: "chain_sums" is unknown; the nearest is "chain_sum"'),
        ({"task": {"max_term": 2}}, 'data.task: "max_term" is unknown; the nearest is "max_terms"'),
        ({"task": {"seed": 2}}, 'data.task: "seed" is unknown'),
        ({"task": {"min_terms": 0}}, "data.task: chain_sum refuses {'min_terms': 0}: min_terms"),
        ({"size": None}, "data.train_size: null"),
    ],
)
def test_bad_gym_arguments(options, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=f"^{message}"):
        _gym("train", **options)
