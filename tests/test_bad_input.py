"""What cannot be trained is refused in one line that names the place, and no run folder changes.

Every refusal is tried twice: where there is no run yet, and with --overwrite on one that exists.
"""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qerl_jax.cli import main
from qerl_jax.config_io import load_config
from qerl_jax.run_folder import CONFIG, open_run

UP = "model.layers.1.mlp.up_proj.weight"


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def qerl(capsys, *arguments):
    """Run `qerl train`, which has to fail; returns the error line without its head."""
    assert main(["train", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    *warnings, line = printed.err.splitlines()
    assert all(warning.startswith("qerl: warning: ") for warning in warnings)
    assert line.startswith("qerl: error: ")
    return line.removeprefix("qerl: error: ")


@pytest.fixture
def refused(tiny_home, tmp_path, capsys):
    """Return a function that trains with some arguments and gives the line that refuses them."""
    parent = tmp_path / "runs"
    parent.mkdir()

    def attempt(*arguments, config=tiny_home / "config.yaml"):
        fresh = qerl(capsys, config, f"--run_dir={parent}/new", *arguments)
        assert list(parent.iterdir()) == []
        path = parent / "old"
        with open_run(load_config(tiny_home / "config.yaml", [f"--run_dir={path}"])):
            pass
        (path / "metrics.jsonl").write_text('{"step": 1}\n')
        (path / "checkpoints/1").mkdir(parents=True)
        (path / "checkpoints/1/state").write_text("weeks of work")
        before = contents(path)
        again = qerl(capsys, config, f"--run_dir={path}", "--overwrite", *arguments)
        assert contents(path) == before
        assert [p.name for p in parent.iterdir()] == ["old"]
        assert again == fresh
        return fresh

    return attempt


FIELDS = {
    "--rollout.num_generation=4": "--rollout.num_generation is unknown (nearest: "
    "--rollout.num_generations)",
    "--lora.rank=many": '--lora.rank: expected int, got "many"',
    "--loss.name=grop": 'loss.name: "grop" is not one of dapo, dr_grpo, grpo (nearest: grpo), '
    "nor a module:function",
    "--loss.name=no_such_module:loss": 'loss.name: module "no_such_module" is neither on the '
    "Python path nor in ",
    "--reward.functions=[tiny_rewards:eights]": 'reward.functions: module "tiny_rewards" has no '
    '"eights"',
    "--eval.correct=exact": 'eval.correct: "exact" is not one of exact_number, ',
    "--rollout.num_generations=1": "rollout.num_generations: expected >= 2, got 1",
    "--lora.rank=33": "lora.rank: 33 exceeds 32, the smaller side of k_proj",
    "--aqn.targets=[q_norm]": 'aqn.targets: "q_norm" matches no norm; this model has '
    "input_layernorm, norm, post_attention_layernorm",
    "--rollout.max_completion_tokens=27": "rollout.max_completion_tokens: 27 after prompts of up "
    "to 6 tokens exceeds the model's context of 32 tokens",
    "--eval.max_completion_tokens=99": "eval.max_completion_tokens: 99 after prompts of up to 6",
    "--model.path=/no/such/model": "model.path: /no/such/model: no such model folder",
    "--lora.init_from=/no/such/adapter": "lora.init_from: /no/such/adapter: no such adapter folder",
    "--optimizer.micro_batch_size=3": "optimizer.micro_batch_size: 3 does not divide 8 ",
    "--data.max_prompt_tokens=3": "data.max_prompt_tokens: all 6 prompts are longer than 3 tokens",
}


@pytest.mark.parametrize("flag", FIELDS)
def test_a_field(refused, flag):
    assert refused(flag).startswith(FIELDS[flag])


FILES = {
    "seed: 1\nrolout: {top_k: 1}\n": "rolout is unknown (nearest: rollout)",
    "rollout: {topk: 1}\n": "rollout.topk is unknown (nearest: rollout.top_k)",
    "lora: {rank: many}\n": 'lora.rank: expected int, got "many"',
    "lora: {rank: 1.5}\n": "lora.rank: expected int, got 1.5",
    "lora: [1]\n": "lora: expected ",
    "model: {compute_dtype: float16}\n": "model.compute_dtype: expected ",
    "seed: 1\nseed: 2\n": ":2: seed is already set on line 1",
    "seed: [1\n": ":2: invalid YAML",
}


@pytest.mark.parametrize("text", FILES)
def test_a_config_file(refused, tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    line = refused(config=path)
    assert line.startswith(f"{path}:") and FILES[text] in line


def edit_json(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensor(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors.get(name))
    save_file(tensors, folder / "model.safetensors")


def edit_embedding(folder, rows):
    edit_json(folder, vocab_size=rows)
    edit_tensor(folder, "model.embed_tokens.weight", lambda tensor: tensor[:rows])


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def narrow(folder):
    """Make the MLP 100 wide, which 16 does not divide."""
    edit_json(folder, intermediate_size=100)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "mlp" in name:
            tensors[name] = np.resize(tensor, [100 if n == 96 else n for n in tensor.shape])
    save_file(tensors, folder / "model.safetensors")


def new_tensor(_):
    return np.zeros((96, 64), np.float32)


def put_nan(tensor):
    tensor[3, 5] = np.nan
    return tensor


MODELS = {
    "of another architecture": (
        lambda folder: edit_json(folder, architectures=["GPT2LMHeadModel"], model_type="gpt2"),
        "config.json: architecture 'GPT2LMHeadModel' is not one of LlamaForCausalLM, ",
    ),
    "with a key missing": (
        lambda folder: edit_json(folder, hidden_size=None),
        "config.json: hidden_size is missing",
    ),
    "whose config.json is not JSON": (
        lambda folder: (folder / "config.json").write_text("{\n"),
        "config.json:2: not valid JSON",
    ),
    "without config.json": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    "without weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "model: holds neither model.safetensors nor model.safetensors.index.json",
    ),
    "with a token beyond its embedding": (
        lambda folder: edit_embedding(folder, rows=15),
        "model: prompt '.*': token id 15 is not one of 0 to 14",
    ),
    "whose end token is beyond its embedding": (
        lambda folder: edit_json(folder, eos_token_id=99),
        "model: eos_token_id 99 is not one of 0 to 15",
    ),
    "whose end token is no number": (
        lambda folder: edit_json(folder, eos_token_id="<eos>"),
        "model/config.json: eos_token_id: <eos> is not a token id",
    ),
    "whose config.json is nested without end": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        "config.json: not valid JSON",
    ),
    "without a tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "model: holds no tokenizer",
    ),
    "cut short": (truncate, "model.safetensors: not a complete safetensors file"),
    "with a wrong shape": (
        lambda folder: edit_tensor(folder, UP, lambda tensor: tensor[:-16]),
        rf"model.safetensors: {UP}: shape \[80, 64\]",
    ),
    "with an unknown tensor": (
        lambda folder: edit_tensor(folder, "model.layers.2.mlp.up_proj.weight", new_tensor),
        "model.safetensors: model.layers.2.mlp.up_proj.weight: ",
    ),
    "with NaN": (
        lambda folder: edit_tensor(folder, UP, put_nan),
        f"model.safetensors: {UP}: holds NaN or infinity",
    ),
    "of a width that 16 does not divide": (
        narrow,
        "model.layers.0.mlp.down_proj.weight: .*100 .*multiple of 16",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model(refused, tiny_home, tmp_path, kind):
    damage, message = MODELS[kind]
    shutil.copytree(tiny_home / "model", tmp_path / "model")
    damage(tmp_path / "model")
    flag = f"--model.path={tmp_path}/model"
    line = refused(flag)
    assert re.search(message, line), line
    if kind != "with NaN":  # which only the values tell
        shutil.rmtree(tmp_path / "runs/old")
        assert refused(flag, "--dry-run") == line


GOOD = '{"question": "1+2=", "answer": "3"}\n'
DATA = {
    "": "data.jsonl: holds no examples",
    "\n\n": "data.jsonl: holds no examples",
    GOOD + "\n" + "{'question': 1}\n": "data.jsonl:3: not valid JSON",
    GOOD + "[1, 2]\n": "data.jsonl:2: ",
    GOOD + '{"question": "1+1="}\n': "data.jsonl:2: .*answer",
}


@pytest.mark.parametrize("text", DATA)
@pytest.mark.parametrize("field", ["train_path", "eval_path"])
def test_a_data_set(refused, tmp_path, text, field):
    (tmp_path / "good.jsonl").write_text(GOOD)
    (tmp_path / "data.jsonl").write_text(text)
    paths = {"train_path": "good.jsonl", "eval_path": "good.jsonl"} | {field: "data.jsonl"}
    flags = [f"--data.{name}={tmp_path}/{file}" for name, file in paths.items()]
    line = refused("--data.source=jsonl", *flags)
    assert line.startswith(f"{tmp_path}/data.jsonl") and re.search(DATA[text], line), line


def test_a_data_file_that_is_not_there(refused, tmp_path):
    paths = f"--data.train_path={tmp_path}/a.jsonl", f"--data.eval_path={tmp_path}/a.jsonl"
    assert refused("--data.source=jsonl", *paths) == (
        f"data.train_path: {tmp_path}/a.jsonl: no such file"
    )


def test_a_gold_answer_that_no_completion_can_match(refused, tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD + '{"question": "1+1=", "answer": "two"}\n')
    paths = f"--data.train_path={tmp_path}/a.jsonl", f"--data.eval_path={tmp_path}/a.jsonl"
    for field in ("--reward.functions=[exact_number]", "--eval.correct=exact_number"):
        line = refused("--data.source=jsonl", *paths, field)
        assert line.startswith(f"{tmp_path}/a.jsonl:2: ") and "two" in line
        shutil.rmtree(tmp_path / "runs/old")


@pytest.fixture
def run(tiny_home, tmp_path):
    """Return the folder of a run that has just begun."""
    config = load_config(tiny_home / "config.yaml", [f"--run_dir={tmp_path}/run"])
    with open_run(config) as (path, _):
        return path


RUN_FOLDERS = {
    "exists": (("--run_dir={run}",), "exists; --resume continues it, --overwrite replaces it"),
    "belongs to another config": (
        ("--run_dir={run}", "--resume", "--seed=5"),
        "belongs to another config: seed: 0 -> 5",
    ),
    "is not there": (("--run_dir={run}/no", "--resume"), f"holds no run to resume (no {CONFIG})"),
    "is not a run": (
        ("--run_dir={run}/..", "--overwrite"),
        f"is not a run folder (no {CONFIG}), so it stays",
    ),
    "is a file": (("--run_dir={run}/" + CONFIG, "--overwrite"), "is a file"),
    "lies below a file": (("--run_dir={run}/" + CONFIG + "/deep/run",), "is a file"),
}


@pytest.mark.parametrize("kind", RUN_FOLDERS)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["train", "dry run"])
def test_a_run_folder(run, tiny_home, capsys, kind, dry):
    arguments, message = RUN_FOLDERS[kind]
    before = contents(run.parent)
    flags = [argument.format(run=run) for argument in arguments]
    line = qerl(capsys, tiny_home / "config.yaml", *flags, *dry)
    assert line.startswith("run_dir: ") and line.endswith(message)
    assert contents(run.parent) == before


def test_a_reward_that_fails_in_the_run_is_named(tiny_home, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_rewards.py").write_text("def none(prompt, completion, answer): return None\n")
    flags = ("--reward.functions=[odd_rewards:none]", f"--run_dir={tmp_path}/run")
    line = qerl(capsys, tiny_home / "config.yaml", *flags)
    assert line == "reward odd_rewards:none: gave None, not a finite number"
