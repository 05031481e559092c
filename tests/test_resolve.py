import functools
import inspect
import os
import sys

import pytest

from qerl_jax.resolve import bind_keywords, keyword_names, load_function

TABLE = {"dapo": 1, "dr_grpo": 2, "grpo": 3}

MODULE = """
import helper_of_a_user

BETA = 0.5

def my_loss(logprobs, *, beta, gamma=2.0):
    return helper_of_a_user.double(logprobs) + beta * gamma
"""


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """Return a working directory with a user's module that imports its neighbour."""
    (tmp_path / "losses_of_a_user.py").write_text(MODULE)
    (tmp_path / "helper_of_a_user.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.endswith("of_a_user")]:
        del sys.modules[name]


def load(spec):
    return load_function(spec, field="loss.name", table=TABLE)


def scaled(x, *, beta, gamma=2.0):
    return x * beta * gamma


def test_a_name_of_the_table():
    assert load("dr_grpo") == 2


def test_a_function_of_an_installed_module():
    assert load("json:dumps") is sys.modules["json"].dumps


def test_a_function_from_the_working_directory(user_folder):
    path = list(sys.path)
    my_loss = load("losses_of_a_user:my_loss")
    assert my_loss(1.0, beta=0.5) == 3.0
    # Last, so that it hides nothing: functions may import what lies beside their module.
    assert [p for p in sys.path if p not in path] == sys.path[-1:] == [os.getcwd()]


def test_the_path_is_restored_after_a_failure(user_folder):
    path = list(sys.path)
    with pytest.raises(ValueError, match="neither on the Python path"):
        load("missing_of_a_user:f")
    assert sys.path == path


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "gpro",
            'loss.name: "gpro" is not one of dapo, dr_grpo, grpo (nearest: grpo), '
            "nor a module:function",
        ),
        ("zzz", 'loss.name: "zzz" is not one of dapo, dr_grpo, grpo, nor a module:function'),
        (":f", 'loss.name: ":f" is not one of dapo, dr_grpo, grpo, nor a module:function'),
        ("json:", 'loss.name: "json:" is not one of dapo, dr_grpo, grpo, nor a module:function'),
        (
            "losses_of_a_user:my_los",
            'loss.name: module "losses_of_a_user" has no "my_los" (nearest: my_loss)',
        ),
        (
            "losses_of_a_user:BETA",
            'loss.name: "losses_of_a_user:BETA" is not callable but float',
        ),
    ],
)
def test_messages(user_folder, spec, message):
    with pytest.raises(ValueError) as error:
        load(spec)
    assert str(error.value) == message


@pytest.mark.parametrize("spec", ["nowhere_of_a_user:f", "json.nowhere:f", "nowhere_of_a_user.b:f"])
def test_a_missing_module_says_where_it_was_looked_for(user_folder, spec):
    with pytest.raises(ValueError) as error:
        load(spec)
    module = spec.partition(":")[0]
    assert str(error.value).startswith(
        f'loss.name: module "{module}" is neither on the Python path'
    )
    assert str(user_folder) in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def f(:\n    pass", "SyntaxError: "),
        ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line"),
    ],
)
def test_a_module_that_fails_says_why_in_one_line(user_folder, text, message):
    (user_folder / "broken_of_a_user.py").write_text(text)
    with pytest.raises(ValueError) as error:
        load("broken_of_a_user:f")
    assert str(error.value).startswith(
        f'loss.name: module "broken_of_a_user" fails to import: {message}'
    )
    assert "\n" not in str(error.value)


def test_keyword_names():
    assert keyword_names(scaled, field="f") == {"beta", "gamma"}
    assert keyword_names(lambda x, y=1: x, field="f") == frozenset()
    with pytest.raises(ValueError, match=r"^f: no signature found for builtin"):
        keyword_names(dict, field="f")


def bind(fn, available, data=("x",)):
    return bind_keywords(fn, available, data=data, place="loss.name: m:f")


def test_binds_what_is_taken_and_leaves_the_rest():
    available = {"beta": 3.0, "epsilon_low": 0.2}
    assert bind(scaled, available)(1.0) == 6.0
    assert bind(scaled, {**available, "gamma": 5.0})(1.0) == 15.0
    assert bind(abs, {})(-1) == 1


def test_a_missing_value_is_named():
    with pytest.raises(ValueError, match=r'^loss.name: m:f: needs "beta", which nothing sets$'):
        bind(scaled, {})


def test_what_a_partial_fixes_stays_fixed():
    """Its signature shows the fixed value like a default, which the config would replace."""
    fixed = functools.partial(scaled, beta=7.0)
    assert keyword_names(fixed, field="f") == {"gamma"}
    assert bind(fixed, {"beta": 3.0})(1.0) == 14.0
    twice = functools.wraps(fixed)(lambda *data, **keywords: fixed(*data, **keywords))
    assert bind(twice, {"beta": 3.0, "gamma": 5.0})(1.0) == 35.0
    by_position = functools.partial(lambda x, beta=1.0: x * beta, beta=7.0)
    assert bind(by_position, {"beta": 3.0})(1.0) == 7.0


@pytest.mark.parametrize(
    "fn", [lambda old, new: 0, lambda a, new: 0, lambda new, b: 0], ids=["right", "one", "other"]
)
def test_data_by_other_names(fn):
    if list(inspect.signature(fn).parameters) == ["new", "b"]:
        with pytest.raises(ValueError, match=r'^loss.name: m:f has "new" where it is given old: '):
            bind(fn, {}, data=("old", "new"))
    else:
        bind(fn, {}, data=("old", "new"))


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (lambda x, beta=1.0: x, 'takes "beta" by position: only keyword-only parameters get'),
        (lambda x, beta: x, 'takes "beta" by position: only keyword-only parameters get'),
        (lambda x, **rest: x, "takes **rest: name the hyperparameters, after a bare *"),
    ],
)
def test_a_value_that_would_not_arrive_is_refused(fn, problem):
    with pytest.raises(ValueError) as error:
        bind(fn, {"beta": 3.0})
    assert str(error.value).startswith(f"loss.name: m:f {problem}")


def test_a_positional_default_that_no_field_sets_stays():
    assert bind(lambda x, power=2: x**power, {"beta": 3.0})(3) == 9


def test_data_may_have_the_name_of_a_field():
    """A loss may call its fourth argument advantage, which is also a field of the loss section."""
    assert bind(lambda beta: beta, {"beta": 3.0})(2.0) == 2.0
    with pytest.raises(ValueError, match=r'^loss.name: m:f takes "beta" by position'):
        bind(lambda beta: beta, {"beta": 3.0}, data=())
