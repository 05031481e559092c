"""The evaluation harness: which completions count, in what batches, and the interval."""

import json

import numpy as np
import pytest
from scipy import stats

from qerl_jax import evaluate as harness
from qerl_jax.data import Prompt
from qerl_jax.evaluate import accuracy_interval, evaluate, independent_problems
from qerl_jax.held_out import describe_report, report_record
from qerl_jax.rollout import Rollout

PROMPTS = tuple(Prompt(text=f"q{i}", ids=(i,), answer=str(i)) for i in range(5))


def interval(right, total):
    shares = np.repeat([1.0, 0.0], [right, total - right])
    return accuracy_interval(shares, num_samples=1)


def test_wilson_interval_of_the_textbook_case():
    assert interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=5e-5)


@pytest.mark.parametrize(
    ("right", "total"), [(8, 10), (0, 10), (10, 10), (1, 1), (256, 512), (1, 3)]
)
def test_wilson_interval_is_that_of_scipy(right, total):
    expected = stats.binomtest(right, total).proportion_ci(0.95, method="wilson")
    assert interval(right, total) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_interval_of_several_samples_comes_from_the_spread_over_problems():
    """Mean 0.5; deviation of (0, .25, .75, 1) with ddof 1 is sqrt(0.625 / 3)."""
    half = 1.959964 * np.sqrt(0.625 / 3) / 2
    got = accuracy_interval(np.array([0.0, 0.25, 0.75, 1.0]), num_samples=4)
    assert got == pytest.approx((0.5 - half, 0.5 + half))
    low, high = accuracy_interval(np.array([1.0, 1.0, 0.5]), num_samples=2)
    assert low < 5 / 6 and high == 1.0


def test_problems_without_spread_do_not_give_certainty():
    got = accuracy_interval(np.ones(10), num_samples=4)
    assert got == interval(10, 10)
    assert got[0] < 0.75
    assert accuracy_interval(np.array([0.5]), num_samples=2)[1] < 1.0


def test_repeats_of_a_question_do_not_narrow_the_interval(roll_out_fn):
    """Each problem four times over: the mean stays, and the interval is that of the problems."""
    report, _ = run(roll_out_fn[0], prompts=PROMPTS * 4, correct_name="shape")
    assert (report.num_problems, report.num_distinct) == (20, 5)
    assert (report.low, report.high) == pytest.approx(interval(5, 5))
    assert "20 problems (5 distinct) x 2" in describe_report(report)
    once, _ = run(roll_out_fn[0], correct_name="shape")
    assert (once.num_problems, once.num_distinct) == (5, 5)
    assert "5 problems x 2" in describe_report(once)


def test_uneven_repeats_count_as_the_problems_they_weigh_like():
    assert independent_problems([1] * 7) == 7
    assert independent_problems([3, 3]) == 2
    assert independent_problems([3, 1]) == 1.6  # 4^2 / (9 + 1)


@pytest.fixture
def roll_out_fn():
    """Return a function that makes rollouts by rule, with the list of its calls.

    With two samples a problem, sample s of problem i is row 2 i + s: it has s + 1 tokens, is right
    if i + s is even, and is finished unless i is 4.
    """
    calls = []

    def roll_out_fn(prompts, sample_ids):
        calls.append(([prompt.text for prompt in prompts], sample_ids.tolist()))
        problems, samples = np.divmod(sample_ids, 2)
        rows = len(prompts)
        right = ((problems + samples) % 2 == 0).astype(np.float32)
        return Rollout(
            prompt_ids=np.zeros((rows, 1), np.int32),
            prompt_mask=np.ones((rows, 1), bool),
            completion_ids=np.zeros((rows, 2), np.int32),
            completion_mask=np.arange(2)[None, :] <= samples[:, None],
            sampler_logprobs=np.zeros((rows, 2), np.float32),
            finished=problems != 4,
            texts=tuple(f"{i}.{s}" for i, s in zip(problems, samples, strict=True)),
            rewards=0.5 * right,
            reward_parts={"shape": np.ones(rows, np.float32), "right": right},
        )

    return roll_out_fn, calls


def run(roll_out_fn, prompts=PROMPTS, **options):
    settings = {"correct_name": "right", "num_samples": 2, "batch_size": 4} | options
    return evaluate(prompts, roll_out_fn, **settings)


def test_every_batch_has_the_same_size_and_the_filler_does_not_count(roll_out_fn):
    function, calls = roll_out_fn
    report, rows = run(function)
    assert calls == [
        (["q0", "q0", "q1", "q1"], [0, 1, 2, 3]),
        (["q2", "q2", "q3", "q3"], [4, 5, 6, 7]),
        (["q4", "q4", "q4", "q4"], [8, 9, 9, 9]),
    ]
    assert [(row.index, row.sample) for row in rows] == [(i, s) for i in range(5) for s in (0, 1)]
    assert (report.num_problems, report.num_samples) == (5, 2)


def test_the_report_is_the_mean_of_the_rows(roll_out_fn):
    report, rows = run(roll_out_fn[0])
    assert report.accuracy == 0.5  # one of two, for every problem
    assert (report.low, report.high) == accuracy_interval(np.full(5, 0.5), num_samples=2)
    assert report.reward == 0.25
    assert report.length_mean == 1.5
    assert report.truncated == pytest.approx(0.2)
    assert [row.correct for row in rows[:4]] == [True, False, False, True]
    first = rows[3]
    assert (first.prompt, first.completion, first.answer) == ("q1", "1.1", "1")
    assert (first.reward, first.tokens, first.finished) == (0.5, 2, True)
    assert not rows[-1].finished


def test_the_named_reward_decides_what_is_right_not_the_total(roll_out_fn):
    report, _ = run(roll_out_fn[0], correct_name="shape")
    assert (report.accuracy, report.reward) == (1.0, 0.25)


def test_progress_counts_completions(roll_out_fn):
    seen = []
    run(roll_out_fn[0], on_batch=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 10), (8, 10), (10, 10)]


def test_speed_leaves_out_the_batch_that_compiles(roll_out_fn, monkeypatch):
    """Batches take 100, 2 and 1 seconds and hold 6, 6 and (without filler) 3 tokens."""
    clock = iter([0.0, 0.0, 100.0, 100.0, 102.0, 102.0, 103.0, 104.0])
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(clock))
    report, _ = run(roll_out_fn[0])
    assert report.tokens_per_second == pytest.approx((6 + 3) / 3)
    assert report.seconds == 104.0


def test_a_single_batch_is_timed_although_it_compiles(roll_out_fn, monkeypatch):
    clock = iter([0.0, 0.0, 3.0, 3.0])
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(clock))
    report, _ = run(roll_out_fn[0], batch_size=10)
    assert report.tokens_per_second == pytest.approx(15 / 3)


def test_the_record_marks_wall_clock_fields(roll_out_fn):
    report, _ = run(roll_out_fn[0])
    record = json.loads(json.dumps(report_record(report)))
    assert {"accuracy", "low", "high", "num_problems", "truncated"} < set(record)
    assert {name for name in record if name.startswith("time/")} == {
        "time/seconds",
        "time/tokens_per_second",
    }
    assert not {"seconds", "tokens_per_second"} & set(record)
