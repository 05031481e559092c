"""A user's function that does not keep its contract is refused by name before anything runs."""

import jax.numpy as jnp
import pytest

from qerl_jax.aqn import AQN_SCHEDULES
from qerl_jax.config_io import load_config
from qerl_jax.contracts import check_reward, check_token_loss, make_advantage, make_schedule
from qerl_jax.parts import build_parts
from qerl_jax.rewards import REWARDS
from qerl_jax.rl import ADVANTAGES


def per_token(logprobs, old, ref, advantages, mask):
    return -logprobs * advantages[:, None], {"mask": mask}


def one_number(*arguments):
    losses, _ = per_token(*arguments)
    return losses.mean(), {}


def one_statistic(*arguments):
    losses, statistics = per_token(*arguments)
    return losses, statistics | {"mean": losses.mean()}


def whole_numbers(*arguments):
    return jnp.zeros((2, 3), jnp.int32), {}


def no_statistics(*arguments):
    return per_token(*arguments)[0]


def three_parts(*arguments):
    return *per_token(*arguments), 1


def rows_against_tokens(logprobs, old, ref, advantages, mask):
    return logprobs * advantages, {}


def named_like_ours(*arguments):
    return per_token(*arguments)[0], {"reward": arguments[0]}


def named_by_number(*arguments):
    return per_token(*arguments)[0], {1: arguments[0]}


def leaves(*arguments):
    raise SystemExit(3)


def with_reference(logprobs, old, ref, advantages, mask):
    return logprobs - ref, {}


def nothing(*arguments):
    return None, {}


def listed(*arguments):
    losses, statistics = per_token(*arguments)
    return [losses], statistics


def listed_statistic(*arguments):
    return per_token(*arguments)[0], {"some": [arguments[0]]}


def for_one_shape(logprobs, old, ref, advantages, mask):
    return logprobs.reshape(4, 4), {}


LOSSES = {
    nothing: "f: the loss is NoneType, not a float of each token",
    listed: "f: the loss is list, not a float of each token",
    listed_statistic: "f: some is list, not a float of each token",
    for_one_shape: "f: TypeError: ",
    one_number: r"f: the loss is float32\[\], not a float of each token, \[batch, completion\] = ",
    one_statistic: r"f: mean is float32\[\], not",
    whole_numbers: r"f: the loss is int32\[2, 3\], not a float",
    no_statistics: "f: gave one array, not a pair of a loss and a dict of statistics",
    three_parts: "f: gave a tuple of 3, not a pair",
    rows_against_tokens: "f: [A-Za-z]*Error: .*shapes",
    named_like_ours: "f: a statistic cannot be named 'reward'",
    named_by_number: "f: a statistic is named 1, not by a string",
    leaves: "f: SystemExit: 3",
    with_reference: "f: needs ref_logprobs, which are None unless loss.beta or loss.log_kl is set$",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is_not_one_of_each_token(loss):
    with pytest.raises(ValueError, match=f"^{LOSSES[loss]}"):
        check_token_loss(loss, place="f", reference=False, shape=(2, 3))


def test_a_sound_loss():
    check_token_loss(per_token, place="f", reference=False, shape=(2, 3))
    check_token_loss(with_reference, place="f", reference=True, shape=(2, 3))


ADVANTAGE_FAULTS = {
    (
        lambda rewards: rewards.mean()
    ): r"f: gave shape \[\] for rewards \[prompts, group\] = \[2, 3\]",
    (lambda rewards: rewards.mean(1)): r"f: gave shape \[2\] for",
    (lambda rewards: rewards / (rewards - rewards)): r"f: gave \[\[nan, inf",
    (lambda rewards: {}): "f: [A-Za-z]*Error: ",
    (lambda rewards: rewards + 1j): r"f: gave \[\[\(?1j",
    (lambda rewards: rewards.reshape(2, 4)): "f: TypeError: ",
    (lambda: 0): "f: TypeError: .*takes 0 positional arguments",
}


@pytest.mark.parametrize("advantage", ADVANTAGE_FAULTS)
def test_an_advantage_that_is_not_one_of_each_completion(advantage):
    with pytest.raises(ValueError, match=f"^{ADVANTAGE_FAULTS[advantage]}"):
        make_advantage(advantage, place="f", shape=(2, 3))


def test_an_advantage_may_give_a_list_and_is_checked_at_every_call():
    advantage = make_advantage(lambda rewards: rewards.tolist(), place="f", shape=(2, 3))
    assert advantage(jnp.ones((2, 3))).tolist() == [[1.0] * 3] * 2
    with pytest.raises(ValueError, match=r"^f: gave \[\[nan"):
        advantage(jnp.full((2, 3), jnp.nan))


SCHEDULE_FAULTS = {
    (lambda step: -0.1): "f: gave -0.1 at step 0, not a sigma >= 0",
    (lambda step: 0.1 / (9 - step)): "f: ZeroDivisionError: ",
    (lambda step: float("inf") if step == 9 else 0.0): "f: gave inf at step 9",
    (lambda step: None): "f: TypeError: ",
    (lambda step: "0.1"): "f: gave '0.1' at step 0, not a sigma >= 0",
}


@pytest.mark.parametrize("schedule", SCHEDULE_FAULTS)
def test_a_schedule_that_gives_no_sigma(schedule):
    with pytest.raises(ValueError, match=f"^{SCHEDULE_FAULTS[schedule]}"):
        make_schedule(lambda: schedule, total_steps=10, place="f")


def test_a_schedule_is_checked_at_every_call():
    sigma = make_schedule(
        lambda: lambda step: -1.0 if step == 1 else 0.5, total_steps=3000, place="f"
    )
    assert sigma(0) == 0.5
    with pytest.raises(ValueError, match=r"^f: gave -1\.0 at step 1, not a sigma >= 0"):
        sigma(1)


def test_a_reward_of_other_parameters():
    with pytest.raises(ValueError, match=r"^f cannot take \(prompt, .*'gold'"):
        check_reward(lambda prompt, completion, answer, gold: 0.0, place="f")
    with pytest.raises(ValueError, match=r"^f cannot take .*: too many positional arguments"):
        check_reward(lambda completion: 0.0, place="f")


def test_our_own_keep_them():
    for reward in REWARDS.values():
        check_reward(reward, place="f")
    for advantage in ADVANTAGES.values():
        make_advantage(advantage, place="f", shape=(2, 3))
    for maker in AQN_SCHEDULES.values():
        settings = {"sigma_start": 1e-2, "sigma_end": 1e-3, "num_stages": 2, "total_steps": 10}
        make_schedule(maker, place="f", **settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss.name=odd:one"], "loss.name: odd:one: the loss is float32[]"),
        (["--loss.name=odd:ref"], "loss.name: odd:ref: needs ref_logprobs, "),
        (["--loss.advantage=odd:mean"], "loss.advantage: odd:mean: gave shape [2]"),
        (["--reward.functions=[odd:mean]"], "reward.functions: odd:mean cannot take ("),
        (["--aqn.schedule=odd:no_maker"], "aqn.schedule: odd:no_maker: TypeError: "),
        (["--aqn.schedule=odd:wants"], 'aqn.schedule: odd:wants: needs "gain"'),
        (["--loss.advantage=odd:scaled"], 'loss.advantage: odd:scaled: needs "scale"'),
        (["--reward.functions=[odd:order]"], 'reward.functions: odd:order has "completion" where'),
        (
            ["--loss.name=odd:extra", "--loss.advantage=odd:late", "--loss.extra={alpha: 2}"],
            'loss.advantage: odd:late takes "alpha" by position',
        ),
        (
            ["--loss.advantage=odd:scaled", "--loss.extra={scale: 2, eps: 1}"],
            'loss.extra: "eps" of an advantage is set by loss.advantage_eps',
        ),
        (
            ["--loss.advantage=odd:scaled", "--loss.extra={scale: 2, beta: 1}"],
            'loss.extra: "beta" has a field of its own',
        ),
        (
            ["--loss.advantage=odd:scaled", "--loss.extra={scale: 2, skale: 1}"],
            'loss.extra: "skale" is a keyword-only parameter of neither grpo nor odd:scaled '
            "(nearest: scale)",
        ),
        (["--aqn.schedule=odd:negative"], "aqn.schedule: odd:negative: gave -1.0 at step 0"),
    ],
)
def test_a_config_that_names_one(tiny_home, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(
        "def one(logprobs, old, ref, advantages, mask):\n    return logprobs.mean(), {}\n"
        "def ref(logprobs, old, ref, advantages, mask):\n    return logprobs - ref, {}\n"
        "def mean(rewards):\n    return rewards.mean(1)\n"
        "def no_maker(step):\n    return 0.1\n"
        "def wants(*, gain):\n    return lambda step: gain\n"
        "def scaled(rewards, *, scale, eps):\n    return rewards - rewards.mean(1)[:, None]\n"
        "def order(completion, prompt, answer):\n    return 0.0\n"
        "def extra(logprobs, old, ref, advantages, mask, *, alpha):\n    return logprobs, {}\n"
        "def late(rewards, alpha=1.0):\n    return rewards\n"
        "def negative(*, sigma_start, sigma_end, num_stages, total_steps):\n"
        "    return lambda step: -1.0\n"
    )
    with pytest.raises(ValueError) as error:
        build_parts(load_config(tiny_home / "config.yaml", flags))
    assert str(error.value).startswith(message)


def test_the_advantage_is_that_of_the_loss_unless_named(tiny_home):
    rewards = jnp.array([[1.0, 0.0, 0.0, 0.0]])
    for flags, first in (
        (["--loss.name=dr_grpo"], 0.75),
        (["--loss.name=dapo"], 1.5),
        (["--loss.name=dr_grpo", "--loss.advantage=leave_one_out"], 1.0),
    ):
        parts = build_parts(load_config(tiny_home / "config.yaml", flags))
        assert abs(float(parts.advantage_fn(rewards)[0, 0]) - first) < 1e-3


@pytest.mark.parametrize(
    "flags",
    [
        ["--loss.name=flat:loss", "--optimizer.micro_batch_size=8", "--rollout.num_generations=8",
         "--rollout.prompts_per_step=8", "--rollout.max_completion_tokens=8"],
        ["--loss.advantage=flat:advantage", "--rollout.prompts_per_step=4",
         "--rollout.num_generations=4"],
    ],
)  # fmt: skip
def test_a_forgotten_axis_is_met_in_a_square_too(tiny_home, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flat.py").write_text(
        "def loss(logprobs, old, ref, advantages, mask):\n    return -logprobs * advantages, {}\n"
        "def advantage(rewards):\n    return rewards - rewards.mean(1)\n"
    )
    with pytest.raises(ValueError, match=r"^loss\.(name|advantage): flat:.*shapes"):
        build_parts(load_config(tiny_home / "config.yaml", flags))


def test_functions_are_given_what_they_take(tiny_home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good_ones.py").write_text(
        "def scaled(rewards, *, scale, eps):\n"
        "    return scale * (rewards - rewards.mean(1)[:, None]) / (1 + eps)\n"
        "def halving(*, sigma_start):\n    return lambda step: sigma_start / 2**step\n"
    )
    flags = ["--loss.advantage=good_ones:scaled", "--loss.extra={scale: 3}"]
    flags += ["--loss.advantage_eps=0.5", "--aqn.schedule=good_ones:halving"]
    parts = build_parts(load_config(tiny_home / "config.yaml", flags))
    assert parts.advantage_fn(jnp.array([[1.0, 0.0]])).tolist() == [[1.0, -1.0]]
    assert [parts.schedule(step) for step in (0, 1)] == [0.01, 0.005]


def test_an_advantage_is_offered_what_a_loss_is(tiny_home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asking.py").write_text(
        "def advantage(rewards, *, advantage_eps=9.0, epsilon_low=9.0, alpha=9.0):\n"
        "    return 0 * rewards + advantage_eps + epsilon_low + alpha\n"
        "def loss(logprobs, old, ref, advantages, mask, *, alpha):\n    return logprobs, {}\n"
    )
    flags = ["--loss.advantage=asking:advantage", "--loss.name=asking:loss"]
    flags += ["--loss.advantage_eps=0.5", "--loss.epsilon_low=0.25", "--loss.extra={alpha: 2}"]
    parts = build_parts(load_config(tiny_home / "config.yaml", flags))
    assert parts.advantage_fn(jnp.array([[1.0, 0.0]])).tolist() == [[2.75, 2.75]]


def test_with_a_reference_a_loss_may_use_it(tiny_home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_with.py").write_text(
        "def ref(logprobs, old, ref, advantages, mask):\n    return logprobs - ref, {}\n"
    )
    flags = ["--loss.name=odd_with:ref", "--loss.log_kl=true"]
    assert build_parts(load_config(tiny_home / "config.yaml", flags)).token_loss
