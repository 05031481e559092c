"""Checkpoints: everything comes back bit for bit, and nothing else is ever taken for one."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qerl_jax.checkpoint import open_checkpoints, restore, save
from qerl_jax.learner import TrainState
from qerl_jax.lora import LoraAdapter, Trainable

# A restore that fails leaves unfinished reads of orbax behind.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
META = {"data": {"epoch": 1, "index": 3}, "config": "seed: 0\nname: é\n", "config_hash": "0a"}


def state_of(step, *, rank=2, norms=True):
    """Return a state with another value in every leaf."""
    rng = np.random.default_rng(step)

    def draw(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    pairs = {
        "q_proj": {"a": draw(2, 8, rank), "b": draw(2, rank, 4)},
        "o_proj": {"a": draw(2, 4, rank, dtype=jnp.bfloat16), "b": draw(2, rank, 8)},
    }
    scales = {"input_layernorm": draw(2, 8)} if norms else None
    trainable = Trainable(adapter=LoraAdapter(pairs=pairs, scale=0.3), norm_scales=scales)
    opt_state = OPTIMIZER.init(trainable)
    _, opt_state = OPTIMIZER.update(trainable, opt_state, trainable)
    return TrainState(
        step=jnp.int32(step),
        trainable=trainable,
        opt_state=opt_state,
        key=jax.random.key(40 + step),
    )


def raw(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)  # static fields as well
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(raw(a)).tobytes() == np.asarray(raw(b)).tobytes()


@pytest.fixture
def folder(tmp_path):
    """Return a folder with checkpoints of steps 1 and 2."""
    manager = open_checkpoints(tmp_path / "checkpoints", max_to_keep=2)
    for step in (1, 2):
        save(manager, state_of(step), META | {"data": {"epoch": 0, "index": step}})
    manager.close()
    return tmp_path / "checkpoints"


def steps(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("norms", [True, False])
def test_a_state_comes_back_bit_for_bit(tmp_path, norms):
    state = state_of(3, norms=norms)
    manager = open_checkpoints(tmp_path / "checkpoints", max_to_keep=2)
    save(manager, state, META)
    restored = restore(manager, state_of(0, norms=norms))
    assert restored.step == 3
    assert {name: restored.meta[name] for name in META} == META
    assert_same(restored.state, state)
    key, again = (jax.random.fold_in(s.key, 5) for s in (state, restored.state))
    assert jax.random.normal(key) == jax.random.normal(again)


def test_a_restored_state_runs_in_the_same_program(folder):
    program = jax.jit(lambda state: state.step + state.trainable.adapter.pairs["q_proj"]["a"].sum())
    program(state_of(2))
    program(restore(open_checkpoints(folder, max_to_keep=2), state_of(0)).state)
    assert program._cache_size() == 1


def test_shapes_alone_are_enough_to_restore(folder):
    restored = restore(
        open_checkpoints(folder, read_only=True), jax.eval_shape(lambda: state_of(0))
    )
    assert_same(restored.state, state_of(2))


def test_the_latest_or_a_named_step(folder):
    manager = open_checkpoints(folder, max_to_keep=2)
    assert restore(manager, state_of(0)).step == 2
    first = restore(manager, state_of(0), step=1)
    assert first.meta["data"] == {"epoch": 0, "index": 1}
    assert_same(first.state, state_of(1))
    with pytest.raises(ValueError) as error:
        restore(manager, state_of(0), step=3)
    assert str(error.value) == f"{folder}: holds no step 3; there are 1, 2"


def test_only_the_last_ones_are_kept(folder):
    manager = open_checkpoints(folder, max_to_keep=2)
    save(manager, state_of(7), META)
    assert steps(folder) == ["2", "7"]


def test_no_checkpoint_yet(tmp_path):
    manager = open_checkpoints(tmp_path / "checkpoints", max_to_keep=2)
    assert restore(manager, state_of(0)) is None
    reader = open_checkpoints(tmp_path / "absent", read_only=True)
    assert restore(reader, state_of(0)) is None
    assert not (tmp_path / "absent").exists()


def cut_off(folder):
    """Leave what a save of step 3 that was killed leaves: a temporary folder."""
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp-0")


def test_an_interrupted_save_is_cleared_away(folder):
    cut_off(folder)
    manager = open_checkpoints(folder, max_to_keep=2)
    assert restore(manager, state_of(0)).step == 2
    assert steps(folder) == ["1", "2"]
    save(manager, state_of(3), META)
    assert_same(restore(manager, state_of(0)).state, state_of(3))


def test_a_reader_leaves_a_save_under_way_alone(folder, caplog):
    cut_off(folder)
    reader = open_checkpoints(folder, read_only=True)
    assert caplog.records == []
    assert restore(reader, state_of(0)).step == 2
    assert steps(folder) == ["1", "2", "3.orbax-checkpoint-tmp-0"]


def truncate_data(step):
    for path in (step / "state/d").iterdir():
        path.write_bytes(path.read_bytes()[:100])


DAMAGE = {
    "no data": lambda step: shutil.rmtree(step / "state/d"),
    "data cut short": truncate_data,
    "no meta": lambda step: shutil.rmtree(step / "meta"),
    "meta is not JSON": lambda step: (step / "meta/metadata").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named(folder, damage):
    DAMAGE[damage](folder / "2")
    with pytest.raises(ValueError) as error:
        restore(open_checkpoints(folder, max_to_keep=2), state_of(0))
    assert str(error.value).startswith(f"{folder}/2: cannot be read (")
    assert "\n" not in str(error.value) and len(str(error.value)) < len(str(folder)) + 250


def test_a_changed_data_cursor_is_noticed(folder):
    path = folder / "2/meta/metadata"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"data": {"epoch": 0, "index": 7}}))
    with pytest.raises(ValueError, match="/2: is damaged "):
        restore(open_checkpoints(folder, max_to_keep=2), state_of(0))


def test_a_save_that_fails_is_one_line(folder, monkeypatch):
    manager = open_checkpoints(folder, max_to_keep=2)

    def disk_full(*arguments, **settings):
        raise ValueError("RESOURCE_EXHAUSTED: no space\nwhile writing")

    monkeypatch.setattr(manager, "save", disk_full)
    with pytest.raises(OSError, match=r"/3: cannot be written \(RESOURCE_EXHAUSTED: no space\)$"):
        save(manager, state_of(3), META)


def test_a_changed_byte_is_noticed(folder):
    """Orbax itself reads on; here it is the hash that is changed, which is as good."""
    path = folder / "2/meta/metadata"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"sha256": meta["sha256"][::-1]}))
    manager = open_checkpoints(folder, max_to_keep=2)
    with pytest.raises(ValueError, match="/2: is damaged "):
        restore(manager, state_of(0))
    del meta["config"]
    path.write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"/2: cannot be read .meta is not complete"):
        restore(manager, state_of(0))


@pytest.mark.parametrize("like", [{"rank": 3}, {"norms": False}])
def test_a_checkpoint_of_another_shape_is_refused(folder, like):
    with pytest.raises(ValueError, match="/2: cannot be read "):
        restore(open_checkpoints(folder, max_to_keep=2), state_of(0, **like))


@pytest.mark.parametrize("lost", ["_CHECKPOINT_METADATA", "state", "meta", "state/_METADATA"])
def test_an_interrupted_deletion_of_an_old_one_does_no_harm(folder, lost):
    path = folder / "1" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    manager = open_checkpoints(folder, max_to_keep=2)
    assert_same(restore(manager, state_of(0)).state, state_of(2))
    save(manager, state_of(3), META)
    assert steps(folder) == ["2", "3"]
