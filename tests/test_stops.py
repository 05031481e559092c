"""What ends a run before its time: signals, numbers that are not finite, rewards that fail."""

import json
import os
import shutil
import signal
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qerl_jax.base_model import model_path
from qerl_jax.config_io import load_config
from qerl_jax.experiment import build_experiment
from qerl_jax.step import _check_finite
from qerl_jax.train import run_training, stop_signals


def test_signals_are_noted_once_and_then_act_as_usual(capfd):
    # A shell that starts this in the background has SIGINT ignored.
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with stop_signals() as stopped:
            assert not stopped.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped.wait(5)
            assert "saves and stops after this step" in capfd.readouterr().err
            assert signal.getsignal(signal.SIGTERM) == before[0]
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                stopped.wait(5)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    finally:
        signal.signal(signal.SIGINT, ours)


def test_outside_the_main_thread_signals_are_left_alone():
    seen = []

    def enter():
        with stop_signals() as stopped:
            seen.append(stopped.is_set())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_is_saved(tiny_home, tmp_path):
    (tiny_home / "odd_losses.py").write_text(
        "import jax.numpy as jnp\n"
        "def kink(logprobs, old, ref, advantages, completion_mask):\n"
        "    return 0 * jnp.sqrt(logprobs - logprobs), {}\n"
    )
    flags = ["--loss.name=odd_losses:kink", f"--run_dir={tmp_path}/run"]
    flags.append("--train.checkpoint_every=1")
    with pytest.raises(ValueError, match=r"^step 1: loss 0\.0, grad_norm nan, .*; stopped"):
        run_training(load_config(tiny_home / "config.yaml", flags), say=lambda line: None)
    assert not (tmp_path / "run").exists()


def test_an_update_that_is_not_finite_is_as_bad():
    sound = {"loss": 0.0, "grad_norm": 1.0, "update_norm": 1.0}
    _check_finite(sound, 3)
    for name in sound:
        with pytest.raises(ValueError, match=f"^step 3: .*{name} inf.*; stopped"):
            _check_finite(sound | {name: np.float32(np.inf)}, 3)


def test_a_failing_first_step_leaves_the_run_that_it_would_replace(tiny_home, tmp_path):
    path = tmp_path / "run"
    run_training(load_config(tiny_home / "config.yaml", [f"--run_dir={path}"]), say=lambda x: None)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    flags = [f"--run_dir={path}", "--reward.functions=[odd_rewards_late:late]"]
    (tiny_home / "odd_rewards_late.py").write_text(
        "def late(p, c, a):\n"
        "    if c in (a, '', p):\n        return 1.0\n"
        "    raise OSError('disk')\n"
    )
    with pytest.raises(ValueError, match=r"^reward odd_rewards_late:late: OSError: disk"):
        run_training(load_config(tiny_home / "config.yaml", flags), overwrite=True)
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_reward_that_fails_on_a_wrong_answer_is_met_before_the_weights(tiny_home, tmp_path):
    (tiny_home / "odd_rewards_wrong.py").write_text(
        "def wrong(p, c, a):\n    if c == a:\n        return 1.0\n"
    )
    flags = ["--reward.functions=[odd_rewards_wrong:wrong]", f"--run_dir={tmp_path}/run"]
    with pytest.raises(ValueError, match=r"^reward odd_rewards_wrong:wrong: gave None, not"):
        build_experiment(load_config(tiny_home / "config.yaml", flags), load=False)


def test_a_reward_that_always_fails_is_met_before_the_weights(tiny_home, tmp_path):
    (tiny_home / "odd_rewards_at_once.py").write_text("def at_once(p, c, a):\n    return None\n")
    flags = ["--reward.functions=[odd_rewards_at_once:at_once]", f"--run_dir={tmp_path}/run"]
    with pytest.raises(ValueError, match=r"^reward odd_rewards_at_once:at_once: gave None, not"):
        build_experiment(load_config(tiny_home / "config.yaml", flags), load=False)


def test_a_run_does_not_go_on_with_other_prompts(tiny_home, tmp_path):
    data = tmp_path / "train.jsonl"
    rows = ['{"question": "1+1=", "answer": "2"}\n', '{"question": "2+3=", "answer": "5"}\n']
    data.write_text("".join(rows))
    flags = [f"--data.train_path={data}", f"--data.eval_path={data}", "--data.source=jsonl"]
    config = load_config(tiny_home / "config.yaml", [*flags, f"--run_dir={tmp_path}/run"])
    run_training(config, stop_after=1, say=lambda line: None)
    data.write_text("".join(rows[::-1]))
    with pytest.raises(
        ValueError, match=r"^data: the training or held-out prompts are not those that .*run"
    ):
        run_training(config, resume=True, say=lambda line: None)
    data.write_text("".join(rows))
    assert run_training(config, resume=True, stop_after=1, say=lambda line: None).step == 2


def negate_down_proj(model):
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file({**tensors, name: -tensors[name]}, model / "model.safetensors")


def change_rope(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 100.0}))


@pytest.mark.parametrize("change", [negate_down_proj, change_rope])
def test_a_run_does_not_go_on_with_another_model(tiny_home, tmp_path, change):
    model = tmp_path / "model"
    shutil.copytree(model_path("tiny"), model)
    flags = [f"--model.path={model}", f"--run_dir={tmp_path}/run"]
    config = load_config(tiny_home / "config.yaml", flags)
    run_training(config, stop_after=1, say=lambda line: None)
    change(model)
    with pytest.raises(ValueError, match=r"^model.path: the model is not the one that .*run"):
        run_training(config, resume=True, say=lambda line: None)


def test_a_run_does_not_go_on_with_other_held_out_prompts(tiny_home, tmp_path):
    row = '{"question": "1+1=", "answer": "2"}\n'
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "eval")}
    for file in files.values():
        file.write_text(row)
    flags = [f"--data.{name}_path={file}" for name, file in files.items()]
    flags += ["--data.source=jsonl", f"--run_dir={tmp_path}/run"]
    config = load_config(tiny_home / "config.yaml", flags)
    run_training(config, stop_after=1, say=lambda line: None)
    files["eval"].write_text(row * 2)
    with pytest.raises(ValueError, match=r"^data: the training or held-out prompts are not those"):
        run_training(config, resume=True, say=lambda line: None)
