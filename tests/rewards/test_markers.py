import pytest

from qerl_jax.rewards.markers import last_marker, visible_text


@pytest.mark.parametrize(
    ("prompt", "completion", "seen"),
    [
        ("q", "a <think>b</think> c", " c"),
        ("q", "b</think> c </think> d", " d"),
        ("q", "a <think>b", "a "),
        ("q", "<think>a</think> b <think>c", " b "),
        ("q", "a", "a"),
        ("q <think>\n", "a</think>b", "b"),
        ("q <think>\n", "a", ""),
    ],
)
def test_thinking_is_not_visible(prompt, completion, seen):
    assert visible_text(prompt, completion) == seen


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("none", None),
        ("<answer>1</answer>", "1"),
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1</answer> 2</answer>", "1"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer>1", None),
        ("1</answer>", None),
        ("</answer><answer>", None),
        (r"\boxed{1}", "1"),
        (r"\boxed {1}", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1\}2}", r"1\}2"),
        (r"} { \boxed{1} }", "1"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{\boxed{1}}", r"\boxed{1}"),
        (r"\boxed{1", None),
        ("#### 1\n2", " 1"),
        ("#### 1 #### 2", " 2"),
        ("#### 1\n####", ""),
        (r"#### 1 \boxed{2}", "2"),
        (r"\boxed{1}" + "\n#### 2", " 2"),
        ("#### 1\n<answer>2</answer>", "2"),
        (r"<answer>1 or \boxed{2}</answer>", r"1 or \boxed{2}"),
        ("<answer>1 #### 2</answer>", "1 #### 2"),
        (r"<answer>1</answer> \boxed{2}", "2"),
    ],
)
def test_last_marker(text, content):
    assert last_marker(text) == content
