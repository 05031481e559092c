"""Batches of shuffled examples from a cursor of two numbers, so that a run resumes exactly."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True)
class DataState:
    """Where the next batch starts; `dataclasses.asdict` makes it JSON."""

    epoch: int = 0
    index: int = 0  # examples of this epoch already used


def epoch_order(num_examples: int, *, seed: int, epoch: int) -> Int[np.ndarray, " examples"]:
    """Return the permutation of the examples that an epoch goes through.

    It depends on its arguments alone. Sorting the raw words of a bit generator, whose stream is
    fixed, keeps it the same in every version of NumPy; `Generator.permutation` promises less.
    Source: NumPy enhancement proposal 19.

    Raises:
        ValueError: a negative seed or epoch.
    """
    if seed < 0 or epoch < 0:
        raise ValueError(f"epoch_order: seed {seed} or epoch {epoch} is negative")
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_examples)
    return np.argsort(words, kind="stable")


def next_batch(
    num_examples: int, state: DataState, *, batch_size: int, seed: int
) -> tuple[Int[np.ndarray, " batch"], DataState]:
    """Return the indices of the next `batch_size` examples and the state after them.

    Every epoch uses every example once. A batch goes on into the next epoch, or through
    several, where one ends; the state after the last example of epoch e is (e + 1, 0).

    Raises:
        ValueError: no examples, a batch size below 1, a state outside the data.
    """
    epoch, index = state.epoch, state.index
    if num_examples < 1 or batch_size < 1:
        raise ValueError(f"next_batch: batches of {batch_size} from {num_examples} examples")
    if epoch < 0 or not 0 <= index < num_examples:
        raise ValueError(f"next_batch: {state} is outside {num_examples} examples")
    parts, missing = [], batch_size
    while missing:
        part = epoch_order(num_examples, seed=seed, epoch=epoch)[index : index + missing]
        parts.append(part)
        missing -= len(part)
        index += len(part)
        if index == num_examples:
            epoch, index = epoch + 1, 0
    return np.concatenate(parts), DataState(epoch=epoch, index=index)
