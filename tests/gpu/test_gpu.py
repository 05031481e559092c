"""What must hold on a GPU: sampler and trainer agree, steps train, runs resume bit for bit.

The golden NVFP4 vectors and logits run on the GPU by the same mark where they are tested
(tests/quant, tests/kernels_pallas, tests/models/test_golden_logits.py).
"""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qerl_jax.aqn import perturb_norm_scales
from qerl_jax.base_model import load_weights, open_model
from qerl_jax.config import (
    AqnConfig,
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from qerl_jax.config_io import dump_config
from qerl_jax.data import DataState, left_pad
from qerl_jax.experiment import build_experiment
from qerl_jax.models import TokenBatch, completion_logprobs
from qerl_jax.sampling import SamplingConfig, generate
from qerl_jax.state import init_state
from qerl_jax.step import train_step
from qerl_jax.testing import random_tokens, tiny_adapter, toy_prompts

pytestmark = pytest.mark.gpu

NORMS = ("input_layernorm", "post_attention_layernorm")
ROWS, COMPLETION = 64, 6
GAPS = {"float32": 1e-5, "bfloat16": 5e-3}  # mean over tokens of |sampled - teacher-forced|


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def noisy(request):
    """Return (model, noisy NVFP4 parameters, adapter) of the embedded model in a dtype."""
    model = open_model("tiny", dtype=request.param)
    params = load_weights(model, quantize=True, scale_rounding="float32")
    adapter = jax.tree.map(lambda x: x / 4, tiny_adapter(jax.random.key(1), params))
    sigma = jnp.float32(0.01)
    return model, perturb_norm_scales(params, jax.random.key(2), sigma, targets=NORMS), adapter


@pytest.mark.parametrize("weights", ["expanded", "packed"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_equal_the_teacher_forced_ones(noisy, key, temperature, weights):
    """Left padding, ends inside the batch, adapter and noise on; means over tokens."""
    model, params, adapter = noisy
    problems = toy_prompts(model.tokenizer, size=ROWS)
    ids, mask = map(jnp.asarray, left_pad([p.ids for p in problems], 8, model.pad_id))
    sampling = SamplingConfig(
        max_completion_tokens=COMPLETION,
        end_ids=model.end_ids,
        pad_id=model.pad_id,
        temperature=temperature,
    )
    settings = {"config": model.config, "sampling": sampling, "weights": weights}
    out = generate(params, adapter, ids, mask, key, jnp.arange(ROWS), **settings)
    inside = jnp.arange(COMPLETION)[None, :] < out.lengths[:, None]
    assert 2 * ROWS < int(inside.sum()) < COMPLETION * ROWS
    read = partial(completion_logprobs, config=model.config, temperature=temperature)
    forced, _ = jax.jit(read)(params, adapter, TokenBatch(ids, mask, out.ids, inside))
    gap = float(jnp.abs(forced - out.logprobs)[inside].mean())
    assert gap <= GAPS[model.config.dtype]
    print(f"mean gap {gap:.1e}")


def test_float32_is_float32(key):
    """Values and gradients equal those of the CPU: products do not fall back to TF32."""
    model = open_model("tiny", dtype="float32", text=False)
    values = {}
    for name, device in (("cpu", jax.devices("cpu")[0]), ("default", jax.devices()[0])):
        with jax.default_device(device):
            params = load_weights(model, quantize=True, scale_rounding="float32")
            adapter = tiny_adapter(key, params)
            rows = random_tokens(key, model.config, batch=8, prompt=12, completion=12)

            def loss(adapter, params=params, rows=rows):
                logprobs, _ = completion_logprobs(
                    params, adapter, rows, config=model.config, temperature=1.0
                )
                return jnp.mean(jnp.where(rows.completion_mask, logprobs, 0.0)), logprobs

            (_, logprobs), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapter)
            values[name] = jax.tree.map(np.asarray, (logprobs, gradient))
    (logprobs, gradient), (expected, expected_gradient) = values["default"], values["cpu"]
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-4)
    for got, want in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def experiment_config(folder, dtype="float32"):
    return ExperimentConfig(
        run_dir=str(folder),
        model=ModelConfig(compute_dtype=dtype, remat=False),
        aqn=AqnConfig(num_stages=3),
        data=DataConfig(train_size=200, eval_size=32),
        rollout=RolloutConfig(prompts_per_step=8, num_generations=4, max_completion_tokens=6),
        optimizer=OptimizerConfig(learning_rate=1e-3, micro_batch_size=16),
        train=TrainConfig(total_steps=4, checkpoint_every=2, log_samples_every=0),
        eval=EvalConfig(batch_size=32),
    )


@pytest.mark.parametrize("dtype", GAPS)
def test_steps_train_with_one_program_each(tmp_path, dtype):
    """Noise changes from step to step; nothing is compiled again and the base stays as it was."""
    config = experiment_config(tmp_path / "run", dtype)
    experiment = build_experiment(config)
    base = jax.tree.map(np.array, experiment.params)
    state = init_state(config, experiment.parts.optimizer, experiment.params)
    first = jax.tree.map(np.array, state.trainable)
    cursor, programs, sigmas = DataState(epoch=0, index=0), [], set()
    for _ in range(4):
        state, cursor, record, _ = train_step(experiment, state, cursor)
        assert record["logprob_gap"] <= GAPS[dtype]
        assert np.isfinite([record["loss"], record["grad_norm"], record["entropy"]]).all()
        sigmas.add(record["sigma"])
        programs.append((generate._cache_size(), experiment.update_step._cache_size()))
    assert len(sigmas) > 1
    assert programs[1:] == programs[:-1]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), experiment.params, base
    )
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), state.trainable, first)
    assert max(jax.tree.leaves(moved)) > 1e-4


def test_two_and_two_steps_are_four_bit_for_bit(tmp_path):
    """Each part in a process of its own, as after a crash.

    Without XLA's flag two processes may time the candidates for a product differently and choose
    kernels that add up in another order.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true",
    }
    for name, calls in (("whole", ([],)), ("halves", (["--stop-after", "2"], ["--resume"]))):
        config = experiment_config(tmp_path / name)
        (tmp_path / f"{name}.yaml").write_text(dump_config(config))
        for flags in calls:
            command = [sys.executable, "-m", "qerl_jax", "train", f"{tmp_path / name}.yaml", *flags]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        whole, halves = (untimed(tmp_path / name / file) for name in ("whole", "halves"))
        assert whole == halves and len(whole) >= 2
    whole, halves = (
        load_file(tmp_path / name / "adapter/adapter_model.safetensors")
        for name in ("whole", "halves")
    )
    assert whole.keys() == halves.keys()
    for name, tensor in whole.items():
        assert tensor.tobytes() == halves[name].tobytes(), name


def untimed(path):
    rows = map(json.loads, path.read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def test_dtypes_of_the_decoder_reach_the_device(key):
    """A bfloat16 model samples in bfloat16, and its logits differ from the float32 ones."""
    model = open_model("tiny", dtype="float32", text=False)
    params = load_weights(model, quantize=True, scale_rounding="float32")
    rows = random_tokens(key, model.config, batch=8, prompt=12, completion=12)
    wide, narrow = (
        completion_logprobs(
            params,
            None,
            rows,
            config=dataclasses.replace(model.config, dtype=dtype),
            temperature=1.0,
        )[0]
        for dtype in ("float32", "bfloat16")
    )
    gap = jnp.abs(wide - narrow)[rows.completion_mask]
    assert 0 < gap.mean() < 0.2
