import pytest

from qerl_jax.rewards import format_boxed, format_hash, format_tags


@pytest.mark.parametrize(
    ("prompt", "completion", "score"),
    [
        ("", "<think>a</think><answer>1</answer>", 1.0),
        ("", " <think>a\nb</think>\n<answer>\n1\n</answer>\n", 1.0),
        ("", "<think></think><answer></answer>", 1.0),
        ("Think. <think>\n", "a</think><answer>1</answer>", 1.0),
        ("Think. <think>\n", "<think>a</think><answer>1</answer>", 0.0),
        ("", "a</think><answer>1</answer>", 0.0),
        ("", "<answer>1</answer><think>a</think>", 0.0),
        ("", "<think>a<answer>1</answer></think>", 0.0),
        ("", "<think>a</think> so <answer>1</answer>", 0.0),
        ("", "<think>a</think><answer>1</answer> done", 0.0),
        ("", "ok <think>a</think><answer>1</answer>", 0.0),
        ("", "<think>a</think><answer>1</answer><answer>2</answer>", 0.0),
        ("", "<think>a</think><answer>1", 0.0),
        ("", "</think><think><answer>1</answer>", 0.0),
        ("", "<think><answer>1</think></answer>", 0.0),
        ("", "", 0.0),
    ],
)
def test_tags(prompt, completion, score):
    assert format_tags(prompt, completion, "1") == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("#### 18", 1.0),
        ("steps\n  #### $1,800 dollars\nbye", 1.0),
        ("#### 1\n#### ", 1.0),
        ("steps #### 18", 0.0),
        ("#### many", 0.0),
        ("####", 0.0),
        ("#### 1 or 2", 0.0),
        ("<think>\n#### 18\n</think> 18", 0.0),
        ("", 0.0),
    ],
)
def test_hash(completion, score):
    assert format_hash("", completion, "7") == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (r"so \boxed{18}", 1.0),
        (r"\boxed{x^{2}}", 1.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{ }", 0.0),
        (r"\boxed{18", 0.0),
        ("18", 0.0),
        (r"<think>\boxed{18}</think> 18", 0.0),
    ],
)
def test_boxed(completion, score):
    assert format_boxed("", completion, "7") == score
