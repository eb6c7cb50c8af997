"""The text around messages, and how a text goes on from another."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from kvtool.errors import UsageError
from kvtool.models.chat import Frame, continued_ids, make_frame
from kvtool.models.load import load

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def loaded():
    return load()


def test_a_frame_is_what_the_template_sets_around_messages(loaded):
    assert make_frame(loaded.tokenizer, "auto", True) == Frame()
    loaded.tokenizer.chat_template = CHAT
    frame = make_frame(loaded.tokenizer, "auto", True)
    talk = [("user", "How?"), ("assistant", "So."), ("user", "Why?")]
    messages = [{"role": role, "content": text} for role, text in talk]
    whole = loaded.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    parts = [frame.opening, "How?", frame.closing, "So.", frame.next, "Why?", frame.closing]
    assert "".join(parts) == whole
    assert not frame.special
    assert make_frame(loaded.tokenizer, "auto", False) == Frame()
    assert make_frame(loaded.tokenizer, "off", True) == Frame()


@pytest.mark.exhaustive
@pytest.mark.parametrize("loops", [False, True])
def test_a_template_that_makes_a_text_without_end_of_a_word_is_refused(loaded, loops):
    many = "{{ 'x' * 70000000 }}"
    if loops:
        many = "{% for i in range(70) %}{{ 'x' * 1000000 }}{% endfor %}"
    loaded.tokenizer.chat_template = CHAT + many
    told = "the tokenizer's chat template cannot be used: it makes 66 MiB of a message, 64 at most"
    with pytest.raises(UsageError, match=told) as caught:
        make_frame(loaded.tokenizer, "on", True)
    assert caught.value.hint == "--chat-template off"
    loaded.tokenizer.chat_template = CHAT + many.replace("70", "60")
    assert len(make_frame(loaded.tokenizer, "on", True).closing) > 60_000_000


def test_a_template_that_is_not_there_or_does_not_work_is_refused(loaded):
    with pytest.raises(UsageError, match="no chat template"):
        make_frame(loaded.tokenizer, "on", True)
    loaded.tokenizer.chat_template = "{{ raise_exception('only tools') }}"
    with pytest.raises(UsageError, match="cannot be used"):
        make_frame(loaded.tokenizer, "auto", True)


def render(tokenizer, *talk):
    messages = [{"role": role, "content": text} for role, text in talk]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_system_message_is_part_of_the_opening(loaded):
    loaded.tokenizer.chat_template = CHAT
    frame = make_frame(loaded.tokenizer, "auto", True, "Be brief.")
    whole = render(loaded.tokenizer, ("system", "Be brief."), ("user", "How?"))
    assert frame.opening + "How?" + frame.closing == whole
    assert frame.next == make_frame(loaded.tokenizer, "auto", True).next


def test_a_system_message_that_has_no_place_is_refused(loaded):
    with pytest.raises(UsageError, match="and the tokenizer has none"):
        make_frame(loaded.tokenizer, "auto", True, "Be brief.")
    loaded.tokenizer.chat_template = CHAT
    with pytest.raises(UsageError, match="needs a chat template, and it is off"):
        make_frame(loaded.tokenizer, "off", True, "Be brief.")
    loaded.tokenizer.chat_template = "{% set messages = messages[1:] %}" + CHAT
    with pytest.raises(UsageError, match="leaves out the system message"):
        make_frame(loaded.tokenizer, "auto", True, "Be brief.")


def test_messages_lose_the_space_around_them_where_the_template_has_it_so(loaded):
    loaded.tokenizer.chat_template = CHAT
    frame = make_frame(loaded.tokenizer, "auto", True)
    assert frame.message("\n How? ") == "\n How? "
    loaded.tokenizer.chat_template = CHAT.replace("m.content", "m.content | trim")
    frame = make_frame(loaded.tokenizer, "auto", True)
    text = frame.opening + frame.message("\n How? ") + frame.closing
    assert text == render(loaded.tokenizer, ("user", "\n How? "))


def test_an_answer_that_is_given_may_begin_otherwise_than_one_that_is_generated(loaded):
    thinking = "{% if add_generation_prompt %}[assistant] <think>{% endif %}"
    loaded.tokenizer.chat_template = CHAT[: CHAT.index("{% if add")] + thinking
    frame = make_frame(loaded.tokenizer, "auto", True)
    talk = [("user", "How?"), ("assistant", "So."), ("user", "Why?")]
    parts = [frame.opening, "How?", frame.given, "So.", frame.next, "Why?", frame.closing]
    assert "".join(parts) == render(loaded.tokenizer, *talk)
    assert frame.closing != frame.given


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_text_that_goes_on_gets_no_space_in_front_of_it(scheme):
    vocabulary = ["<unk>", "\n", "▁", *map(chr, range(33, 127))]
    model = BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token="<unk>")
    letters = Tokenizer(model)
    letters.pre_tokenizer = Metaspace(prepend_scheme=scheme, split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>")

    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    for text in (" 7429\n Question: Why?", "\n Question: Why?", "It", ""):
        assert encode("Some text.") + continued_ids(tokenizer, text) == encode("Some text." + text)


def test_other_tokenizers_encode_a_text_that_goes_on_as_any_other(loaded):
    for text in (" 7429103\n Question: Why?", "\n Question: Why?", "\n\nWhy", "It", "  a", ""):
        plain = loaded.tokenizer(text, add_special_tokens=False).input_ids
        assert continued_ids(loaded.tokenizer, text) == plain


def test_a_template_that_can_be_told_is_told_whether_to_think(loaded):
    """As Qwen3's: thoughts by default, an empty one where they are not wanted."""
    thinks = "{% if enable_thinking is false %}<think></think>{% endif %}"
    loaded.tokenizer.chat_template = CHAT + thinks
    plain = make_frame(loaded.tokenizer, "auto", True)
    assert plain == make_frame(loaded.tokenizer, "auto", True, thinking=True)
    quick = make_frame(loaded.tokenizer, "auto", True, thinking=False)
    assert quick.closing == plain.closing + "<think></think>"
    loaded.tokenizer.chat_template = CHAT
    assert make_frame(loaded.tokenizer, "auto", True, thinking=False) == plain


@pytest.mark.parametrize(
    ("closing", "thinks"),
    [("[assistant] <think>\n", True), ("[assistant] <think>\n\n</think>\n", False), ("", False)],
)
def test_a_frame_that_opens_a_thought_says_so(closing, thinks):
    assert Frame(closing=closing).thinks is thinks
