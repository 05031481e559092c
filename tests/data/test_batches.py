import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_jax.data import DataState, epoch_order, next_batch

# (examples, batch size): even, odd and ragged ends, a batch as large as the data, and larger.
SHAPES = [(12, 4), (13, 4), (5, 5), (7, 1), (1, 1), (3, 8), (4, 9)]


def _batches(num_examples, batch_size, steps, *, start=None, seed=3):
    state, batches = start or DataState(), []
    for _ in range(steps):
        batch, state = next_batch(num_examples, state, batch_size=batch_size, seed=seed)
        batches.append((batch.tolist(), state))
    return batches


@given(num_examples=st.integers(1, 60), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(num_examples, seed, epoch):
    order = epoch_order(num_examples, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(num_examples))


def test_order_stays_the_same_in_every_version():
    """Made by epoch_order itself; another order would break the resumption of older runs."""
    assert epoch_order(8, seed=0, epoch=0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert epoch_order(8, seed=0, epoch=1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]


def test_epochs_and_seeds_differ():
    orders = {
        tuple(epoch_order(20, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_order_is_uniform():
    firsts = [int(epoch_order(4, seed=0, epoch=epoch)[0]) for epoch in range(2000)]
    assert np.all(np.abs(np.bincount(firsts, minlength=4) - 500) < 100)  # 5 standard deviations


@pytest.mark.parametrize(("num_examples", "batch_size"), SHAPES)
def test_no_example_is_lost_or_repeated_within_an_epoch(num_examples, batch_size):
    steps = 3 * num_examples
    used = [i for batch, _ in _batches(num_examples, batch_size, steps) for i in batch]
    assert len(used) == steps * batch_size
    for start in range(0, len(used), num_examples):
        epoch = used[start : start + num_examples]
        order = epoch_order(num_examples, seed=3, epoch=start // num_examples)
        assert epoch == order[: len(epoch)].tolist()


@pytest.mark.parametrize(("num_examples", "batch_size"), SHAPES)
def test_resuming_anywhere_gives_the_same_batches(num_examples, batch_size):
    whole = _batches(num_examples, batch_size, 12)
    for stop, (_, state) in enumerate(whole[:-1], start=1):
        saved = DataState(**json.loads(json.dumps(asdict(state))))
        assert saved == state
        assert _batches(num_examples, batch_size, 12 - stop, start=saved) == whole[stop:]


def test_the_last_batch_of_an_epoch_ends_it():
    (*_, (_, state)) = _batches(12, 4, 3)
    assert state == DataState(epoch=1, index=0)
    (*_, (_, state)) = _batches(3, 9, 1)
    assert state == DataState(epoch=3, index=0)


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "state"),
    [
        (0, 4, DataState()),
        (4, 0, DataState()),
        (4, 4, DataState(index=4)),
        (4, 4, DataState(index=-1)),
        (4, 4, DataState(epoch=-1)),
    ],
)
def test_impossible_batches_are_refused(num_examples, batch_size, state):
    with pytest.raises(ValueError, match=r"^next_batch: .* examples$"):
        next_batch(num_examples, state, batch_size=batch_size, seed=0)


def test_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed -1"):
        epoch_order(4, seed=-1, epoch=0)
