import json

import pytest

from qerl_jax.data import arithmetic_examples, load_examples
from qerl_jax.rewards import validate_answer


def _load(**options):
    defaults = {
        "source": "arithmetic",
        "name": "addition",
        "subset": None,
        "path": None,
        "split": "train",
        "size": 10,
        "seed": 0,
        "task": {},
        "question_field": "question",
        "answer_field": "answer",
        "answer_marker": None,
        "part": "train",
    }
    return load_examples(**{**defaults, **options})


def test_arithmetic_takes_the_next_seed_for_eval():
    for part, seed in (("train", 5), ("eval", 6)):
        expected = arithmetic_examples(
            "chain", size=10, seed=seed, task={"max_digits": 1}, part=part
        )
        assert _load(name="chain", task={"max_digits": 1}, seed=5, part=part) == expected


def test_jsonl_passes_everything_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"q": f"question {i}", "solution": f"so #### {i},000"} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = {"question_field": "q", "answer_field": "solution", "answer_marker": "####"}
    examples = _load(source="jsonl", path=str(path), **options, check_answer=validate_answer)
    assert [example.answer for example in examples] == ["0000", "1000", "2000"]
    assert len(_load(source="jsonl", path=str(path), **options, size=2)) == 2


def test_unusable_gold_is_refused_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "one"}\n')
    assert len(_load(source="jsonl", path=str(path))) == 2
    with pytest.raises(
        ValueError, match=r"rows\.jsonl:2: the gold answer 'one' is not one number$"
    ):
        _load(source="jsonl", path=str(path), check_answer=validate_answer)


def test_a_source_without_examples_is_refused(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: [])
    with pytest.raises(ValueError, match=r"^data: hub some/set gave no examples for eval$"):
        _load(source="hub", name="some/set", split="test", part="eval")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "jsnl"}, 'data.source: "jsnl" is unknown; the nearest is "jsonl"'),
        ({"source": "jsonl"}, "data.train_path: data.source jsonl needs the path of a file"),
        ({"size": 0}, "data.train_size: 0 is not positive"),
        ({"size": 0, "part": "eval"}, "data.eval_size: 0 is not positive"),
        ({"seed": -1}, "data.data_seed: -1 is negative"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        _load(**options)
