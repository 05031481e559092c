import numpy as np
import pytest

from qerl_jax.data import Example, Prompt, build_prompt, encode_prompts, left_pad

CHAT = (
    "{% for m in messages %}<|start|>{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
PLAIN = {"prompt_template": "{question}", "chat_template": False, "system_prompt": None}


@pytest.fixture
def tokenizer():
    """A tokenizer of single characters with two special tokens and a chat template."""
    pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    vocab = {token: i for i, token in enumerate(["<|start|>", "<|end|>", "?", *characters])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    # Adds <|start|> to every text unless special tokens are off.
    inner.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 0)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", additional_special_tokens=["<|start|>"]
    )
    made.chat_template = CHAT
    return made


def _build(tokenizer, question="1+1=", **options):
    example = Example(question=question, answer="2")
    return build_prompt(example, **{**PLAIN, **options}, tokenizer=tokenizer)


def test_plain_prompt_adds_no_special_token(tokenizer):
    text, ids = _build(tokenizer)
    assert text == "1+1="
    assert ids == tokenizer.convert_tokens_to_ids(list("1+1="))


@pytest.mark.parametrize("question", ["{x} {question} {}", "%s \\1 {0}"])
def test_braces_stay_as_they_are(tokenizer, question):
    text, _ = _build(tokenizer, question, prompt_template='{"a": {question}}')
    assert text == f'{{"a": {question}}}'


@pytest.mark.parametrize("template", ["", "What?", "{question} {question}", "{Question}"])
def test_template_holds_the_question_once(tokenizer, template):
    with pytest.raises(ValueError, match=r"^data\.prompt_template: holds {question} \d times"):
        _build(tokenizer, prompt_template=template)


def test_chat_prompt_ends_where_the_model_speaks(tokenizer):
    pytest.importorskip("jinja2")
    text, ids = _build(tokenizer, chat_template=True, prompt_template="Q: {question}")
    assert text == "<|start|>user:Q: 1+1=<|end|><|start|>assistant:"
    assert (ids[0], ids.count(0), ids.count(1)) == (0, 2, 1)
    text, _ = _build(tokenizer, chat_template=True, system_prompt="Be {brief}.")
    assert text.startswith("<|start|>system:Be {brief}.<|end|><|start|>user:1+1=")


def test_chat_needs_a_template_that_works(tokenizer):
    pytest.importorskip("jinja2")
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(
        ValueError, match=r"^data\.chat_template: the template fails: no system turn"
    ):
        _build(tokenizer, chat_template=True)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"^data\.chat_template: .* has no chat template"):
        _build(tokenizer, chat_template=True)
    with pytest.raises(ValueError, match=r"^data\.system_prompt: "):
        _build(tokenizer, system_prompt="Be brief.")


def _encode(tokenizer, *questions, max_prompt_tokens=5):
    examples = [Example(question=q, answer=str(i)) for i, q in enumerate(questions)]
    return encode_prompts(examples, tokenizer, **PLAIN, max_prompt_tokens=max_prompt_tokens)


def test_long_prompts_are_dropped_and_counted(tokenizer):
    prompts, dropped = _encode(tokenizer, "1+1=", "100+100=", "12+3=", "12+34=")
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("1+1=", "0"), ("12+3=", "2")]
    assert dropped == 2
    assert prompts[0] == Prompt(text="1+1=", ids=tuple(_build(tokenizer)[1]), answer="0")


def test_no_prompt_left_is_an_error(tokenizer):
    message = (
        r"^data\.max_prompt_tokens: all 2 prompts are longer than 5 tokens; the shortest has 6$"
    )
    with pytest.raises(ValueError, match=message):
        _encode(tokenizer, "100+100=", "12+34=")


def test_a_prompt_without_tokens_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="no token for the prompt ''"):
        _encode(tokenizer, "1+1=", "")


def test_left_pad():
    ids, mask = left_pad([(5, 6), (7,), (0, 0, 0)], 3, 0)
    assert ids.dtype == np.int32
    assert ids.tolist() == [[0, 5, 6], [0, 0, 7], [0, 0, 0]]
    assert mask.tolist() == [[False, True, True], [False, False, True], [True, True, True]]


def test_left_pad_never_cuts():
    with pytest.raises(ValueError, match=r"^left_pad: row 1 has 3 tokens, over 2$"):
        left_pad([(1,), (1, 2, 3)], 2, 0)
