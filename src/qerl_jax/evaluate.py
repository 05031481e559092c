"""The one evaluation harness: accuracy of a policy on held-out problems, never with noise."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from qerl_jax.data import Prompt
from qerl_jax.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """Accuracy over problems and what it cost."""

    accuracy: float  # mean over problems of the share of right completions
    low: float  # 95% interval of the accuracy
    high: float
    num_problems: int
    num_distinct: int  # of them; a small task repeats its questions
    num_samples: int  # completions per problem
    reward: float  # mean
    length_mean: float  # completion tokens
    truncated: float  # share of completions cut by the limit
    tokens_per_second: float  # generated; the first batch, which compiles, counts if alone
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    """One completion of the evaluation."""

    index: int
    sample: int
    prompt: str
    completion: str
    answer: str
    reward: float
    correct: bool
    tokens: int
    finished: bool


def evaluate(
    prompts: Sequence[Prompt],
    roll_out_fn: Callable[[Sequence[Prompt], np.ndarray], Rollout],
    *,
    correct_name: str,
    num_samples: int,
    batch_size: int,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[EvalReport, list[EvalRow]]:
    """Score `num_samples` completions of every prompt.

    `roll_out_fn(prompts, sample_ids)` samples one completion a row. A completion is right if
    the reward function `correct_name` gives it 1. Every batch has `batch_size` rows (the last
    one is filled up with repeats, which are thrown away), so one program serves all.
    """
    jobs = [(i, s) for i in range(len(prompts)) for s in range(num_samples)]
    rows, times, started = [], [], time.perf_counter()
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        filled = batch + [batch[-1]] * (batch_size - len(batch))
        sample_ids = np.array([i * num_samples + s for i, s in filled], np.int32)
        before = time.perf_counter()
        rollout = roll_out_fn([prompts[i] for i, _ in filled], sample_ids)
        times.append((time.perf_counter() - before, int(rollout.lengths[: len(batch)].sum())))
        rows += _rows(batch, prompts, rollout, correct_name)
        on_batch(len(rows), len(jobs))
    return _report(rows, times, num_samples, time.perf_counter() - started), rows


def _rows(batch, prompts, rollout: Rollout, correct_name: str) -> list[EvalRow]:
    return [
        EvalRow(
            index=index,
            sample=sample,
            prompt=prompts[index].text,
            completion=rollout.texts[row],
            answer=prompts[index].answer,
            reward=float(rollout.rewards[row]),
            correct=bool(rollout.reward_parts[correct_name][row] == 1.0),
            tokens=int(rollout.lengths[row]),
            finished=bool(rollout.finished[row]),
        )
        for row, (index, sample) in enumerate(batch)
    ]


def _report(rows, times, num_samples: int, seconds: float) -> EvalReport:
    shares = np.array([row.correct for row in rows], float).reshape(-1, num_samples).mean(axis=1)
    repeats = Counter(row.prompt for row in rows[::num_samples])
    low, high = accuracy_interval(
        shares, num_samples=num_samples, num_independent=independent_problems(repeats.values())
    )
    timed = times[1:] or times
    return EvalReport(
        accuracy=float(shares.mean()),
        low=low,
        high=high,
        num_problems=len(shares),
        num_distinct=len(repeats),
        num_samples=num_samples,
        reward=float(np.mean([row.reward for row in rows])),
        length_mean=float(np.mean([row.tokens for row in rows])),
        truncated=float(np.mean([not row.finished for row in rows])),
        tokens_per_second=sum(n for _, n in timed) / max(sum(t for t, _ in timed), 1e-9),
        seconds=seconds,
    )


def independent_problems(repeats: Iterable[int]) -> float:
    """Return how many distinct problems would tell as much: (sum r)^2 / sum r^2.

    `repeats` says how often each distinct problem occurs. A greedy completion of the same
    question is the same one, so that its repeats add weight and no knowledge (Kish's effective
    sample size).
    """
    counts = np.array(list(repeats), float)
    return float(counts.sum() ** 2 / np.sum(counts**2))


def accuracy_interval(
    shares: np.ndarray, *, num_samples: int, num_independent: float | None = None
) -> tuple[float, float]:
    """95% interval of a mean over problems.

    One sample a problem: Wilson's score interval, (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) /
    (1 + z^2/n) with z = 1.96. Several: normal, p -+ z s / sqrt(n), s over problems; Wilson's
    again where all problems have the same share, as their spread then says nothing. n is
    `num_independent`, by default the number of problems.
    """
    p, z = float(np.mean(shares)), 1.959964
    n = len(shares) if num_independent is None else num_independent
    if num_samples > 1 and np.ptp(shares) > 0:
        half = z * float(np.std(shares, ddof=1)) / math.sqrt(n)
        return max(p - half, 0.0), min(p + half, 1.0)
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max((centre - half) / (1 + z * z / n), 0.0), min((centre + half) / (1 + z * z / n), 1.0)
