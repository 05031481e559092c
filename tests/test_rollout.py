"""From prompts to scored rows: order, masks, texts and rewards, with a generator made by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from qerl_jax.data import Prompt
from qerl_jax.models import TokenBatch
from qerl_jax.rollout import roll_out
from qerl_jax.sampling import Completions

PAD = 9  # may also be a token of a completion
PROMPTS = (
    Prompt(text="p0", ids=(1, 2, 3), answer="a0"),
    Prompt(text="p1", ids=(4,), answer="a1"),
)
# Rows of two completions each: length 2 with a pad token inside, cut, 1 and 3 tokens.
IDS = np.array([[5, 9, 9, 9], [5, 6, 7, 8], [9, 9, 9, 9], [7, 9, 6, 9]], np.int32)
LENGTHS = np.array([2, 4, 1, 3])
FINISHED = np.array([True, False, True, True])


def decode(ids, **_):
    return "".join(f"<{token}>" for token in ids)


TOKENIZER = SimpleNamespace(decode=decode)


def score_by_name(prompt, text, answer):
    length = float(text.count("<"))
    return length + 0.5, {"length": length, "own": float(prompt[1:] == answer[1:])}


@pytest.fixture
def run():
    """Return a function that rolls out, and the list of what the generator received."""
    received = []

    def generate_fn(ids, mask, sample_ids):
        received.append(tuple(map(np.asarray, (ids, mask, sample_ids))))
        logprobs = -np.arange(16.0, dtype=np.float32).reshape(4, 4)
        return Completions(ids=IDS, logprobs=logprobs, lengths=LENGTHS, finished=FINISHED)

    def run(**options):
        settings = {"num_generations": 2, "prompt_width": 5, "pad_id": PAD} | options
        return roll_out(PROMPTS, generate_fn, score_by_name, TOKENIZER, **settings), received

    return run


def test_prompts_are_repeated_and_padded_on_the_left(run):
    rollout, [(ids, mask, sample_ids)] = run()
    assert ids.tolist() == [[9, 9, 1, 2, 3]] * 2 + [[9, 9, 9, 9, 4]] * 2
    assert mask.sum(axis=1).tolist() == [3, 3, 1, 1] and mask[:, -1].all()
    assert sample_ids.tolist() == [0, 1, 2, 3]
    assert np.array_equal(rollout.prompt_ids, ids) and np.array_equal(rollout.prompt_mask, mask)


def test_given_sample_ids_reach_the_generator(run):
    _, [(_, _, sample_ids)] = run(sample_ids=np.array([7, 5, 3, 1], np.int32))
    assert sample_ids.tolist() == [7, 5, 3, 1]


def test_masks_come_from_lengths_not_from_ids(run):
    rollout, _ = run()
    assert rollout.completion_mask.tolist() == [
        [True, True, False, False],
        [True, True, True, True],
        [True, False, False, False],
        [True, True, True, False],
    ]
    assert rollout.lengths.tolist() == LENGTHS.tolist()
    assert rollout.finished.tolist() == FINISHED.tolist()
    assert rollout.sampler_logprobs[1].tolist() == [-4.0, -5.0, -6.0, -7.0]


def test_texts_and_rewards_belong_to_their_rows(run):
    rollout, _ = run()
    assert rollout.texts == ("<5><9>", "<5><6><7><8>", "<9>", "<7><9><6>")
    assert rollout.rewards.tolist() == [2.5, 4.5, 1.5, 3.5]
    assert rollout.reward_parts["length"].tolist() == [2.0, 4.0, 1.0, 3.0]
    assert rollout.reward_parts["own"].tolist() == [1.0, 1.0, 1.0, 1.0]


def test_tokens_are_the_same_rows_as_arrays(run):
    rollout, _ = run()
    assert isinstance(rollout.tokens, TokenBatch)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        assert np.array_equal(getattr(rollout.tokens, name), getattr(rollout, name)), name


def test_a_prompt_over_the_width_is_refused(run):
    with pytest.raises(ValueError, match="row 0 has 3 tokens, over 2"):
        run(prompt_width=2)
