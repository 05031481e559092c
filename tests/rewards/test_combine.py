import numpy as np
import pytest

from qerl_jax.rewards import REWARDS, combine_rewards


def test_weighted_sum_and_parts():
    score = combine_rewards(
        {"marked_number": REWARDS["marked_number"], "format_hash": REWARDS["format_hash"]},
        (1.0, 0.25),
    )
    assert score("", "#### 18", "18") == (1.25, {"marked_number": 1.0, "format_hash": 1.0})
    assert score("", "#### 17", "18") == (0.25, {"marked_number": 0.0, "format_hash": 1.0})
    assert score("", "17", "18") == (0.0, {"marked_number": 0.0, "format_hash": 0.0})


def test_order_and_negative_weights():
    score = combine_rewards({"b": lambda p, c, a: 1.0, "a": lambda p, c, a: 0.5}, (-1.0, 4.0))
    total, parts = score("p", "c", "a")
    assert (total, list(parts)) == (1.0, ["b", "a"])


def test_users_reward_sees_prompt_completion_and_answer():
    score = combine_rewards({"user": lambda p, c, a: float((p, c, a) == ("p", "c", "a"))}, (1.0,))
    assert score("p", "c", "a")[0] == 1.0


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1), np.array(1.0)])
def test_any_scalar_will_do(value):
    total, parts = combine_rewards({"user": lambda p, c, a: value}, (2.0,))("", "", "")
    assert total == 2.0
    assert type(total) is float
    assert type(parts["user"]) is float


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), None, "1.0", [1.0, 2.0], 10**400],
    ids=["nan", "inf", "minus inf", "None", "text", "list", "overflow"],
)
def test_what_is_no_finite_number_names_the_reward(value):
    score = combine_rewards(
        {"fine": lambda p, c, a: 1.0, "mine:f": lambda p, c, a: value}, (1.0, 1.0)
    )
    with pytest.raises(ValueError, match=r"^reward mine:f: gave .*, not a finite number$"):
        score("", "", "")


def test_a_reward_that_fails_is_named():
    score = combine_rewards({"mine:f": lambda p, c, a: float(a)}, (1.0,))
    message = r"^reward mine:f: ValueError: could not convert string to float: 'two'$"
    with pytest.raises(ValueError, match=message):
        score("", "", "two")


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        ((), (), "0 for 0 reward functions"),
        (("exact_number",), (), "0 for 1 reward functions"),
        (("exact_number",), (1.0, 2.0), "2 for 1 reward functions"),
        (("exact_number",), (float("nan"),), "nan is not finite"),
    ],
)
def test_weights_must_fit(names, weights, message):
    with pytest.raises(ValueError, match=f"^reward.weights: {message}$"):
        combine_rewards({name: REWARDS[name] for name in names}, weights)
