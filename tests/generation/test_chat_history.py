"""Conversations in a chat template: the cache has read what the template makes of all messages."""

import copy
import functools
import re
from datetime import datetime, timedelta

import pytest
import torch
import transformers.utils.chat_template_utils as rendering
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvtool
from kvtool.cache.features.repetition import Repetition
from kvtool.documents.messages import UserTurn
from kvtool.errors import UsageError
from kvtool.generation import Conversation
from tests.chat_templates import (
    CHANGED,
    CHATML,
    DROPS_THOUGHTS,
    LLAMA_2,
    NUMBERED,
    SYSTEM_BEFORE_THE_LAST,
    VICUNA,
    WHOLE,
)

SPECIAL = ["<pad>", "<s>", "</s>"]
GIVEN = [UserTurn("What is it?", answer="It is this."), UserTurn("And now? ", answer=" Now. ")]
NO_SYSTEM = ("gemma",)


@functools.cache
def trained(merged):
    """One token a byte, or (`merged`) merges of what often comes together, over any border."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merged)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400 if merged else 0,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "? [/INST] ASSISTANT: It is this. USER: And now?\nWhat is it? Now.\nassistant\n"
    core.train_from_iterator([text] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


@functools.cache
def make_model(merged, answer, end="</s>"):
    """A model that says `answer`, whose characters differ, and then `end` until it is stopped."""
    tokenizer = trained(merged)
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=512,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(size, 512))
    said = tokenizer(answer, add_special_tokens=False).input_ids
    assert len(set(said)) == len(said)
    says = dict(zip(said, [*said[1:], tokenizer.convert_tokens_to_ids(end)], strict=True))
    weight = model.lm_head.weight.zero_()
    for token in range(size):
        weight[says.get(token, said[0]), token] = 1.0
    return model


def talk(template, answer="So.", system=None, merged=False, policy="full", budget=None):
    tokenizer = copy.copy(trained(merged))
    tokenizer.chat_template = template
    model = make_model(merged, answer)
    cache = kvtool.build_cache(model, policy, budget)
    return Conversation(model, tokenizer, cache, system=system)


def read(conversation):
    return conversation.cache.input_ids[0].tolist()


def text(conversation):
    return conversation.tokenizer.decode(read(conversation), clean_up_tokenization_spaces=False)


def render(conversation, *messages, system=None, tokenize=False):
    """What the template makes of messages, of user and assistant in turn."""
    told = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    told += [{"role": roles[i % 2], "content": said} for i, said in enumerate(messages)]
    return conversation.tokenizer.apply_chat_template(
        told, tokenize=tokenize, add_generation_prompt=True, return_dict=False
    )


SYSTEMS = [(name, None if name in NO_SYSTEM else "Be brief") for name in WHOLE]
SYSTEMS += [("llama-2", None), ("vicuna", None)]  # which word the first message by it


def tight(text):
    """A text without the space around the model's answers."""
    return re.sub(r"\s*(So\.?)\s*", r"\1", text)


@pytest.mark.parametrize(("name", "system"), SYSTEMS)
def test_a_prompt_is_what_the_template_makes_of_it(name, system):
    for merged in (False, True):
        conversation = talk(WHOLE[name], system=system, merged=merged, answer="q")
        for said in ("hello there", "  What is it?\n "):
            ids = conversation.turn_ids(UserTurn(said))
            assert ids[0].tolist() == render(conversation, said, system=system, tokenize=True)


@pytest.mark.parametrize(("name", "system"), SYSTEMS)
def test_answers_that_are_given_leave_the_text_of_the_whole(name, system):
    conversation = talk(WHOLE[name], system=system, merged=True, answer="q")
    for turn in GIVEN:
        conversation.hear(turn)
    last = conversation.say(UserTurn("Well?"), max_new_tokens=1)
    said = [part for turn in GIVEN for part in (turn.text, turn.answer)]
    whole = render(conversation, *said, "Well?", system=system)
    assert text(conversation) == whole + "q"
    if name != "llama-2":  # which has space behind an answer, to merge with its last token
        ids = render(conversation, *said, "Well?", system=system, tokenize=True)
        assert read(conversation) == ids + last.token_ids[0]


@pytest.mark.parametrize("case", range(len(SYSTEMS)))
def test_answers_of_the_model_stay_and_the_rest_is_that_of_the_whole(case):
    """Ended by the model or broken off: only space that a template sets around them may differ."""
    (name, system), new_tokens = SYSTEMS[case], (9, 2)[case % 2]
    conversation = talk(WHOLE[name], system=system)
    asked = ["What is it?", "And now? ", "Well?"]
    told = [conversation.say(UserTurn(each), max_new_tokens=new_tokens).text[0] for each in asked]
    assert told == ["So." if new_tokens == 9 else "So"] * 3
    whole = render(conversation, asked[0], told[0], asked[1], told[1], asked[2], system=system)
    last = "So.</s>" if new_tokens == 9 else "So"
    assert tight(text(conversation)) == tight(whole + last)
    if name not in ("llama-2", "mistral", "vicuna"):
        assert text(conversation) == whole + last


def test_space_that_a_template_sets_around_an_answer_may_be_the_models_own():
    conversation = talk(LLAMA_2, answer=" So~")
    assert conversation.say(UserTurn("What is it?"), max_new_tokens=9).text == [" So~"]
    conversation.say(UserTurn("Well?"), max_new_tokens=1)
    whole = render(conversation, "What is it?", " So~", "Well?")
    assert text(conversation) == whole.replace("~ </s>", "~</s>") + " "
    conversation = talk(VICUNA, answer=" So~")
    conversation.say(UserTurn("What is it?"), max_new_tokens=9)
    conversation.say(UserTurn("Well?"), max_new_tokens=1)
    assert text(conversation) == render(conversation, "What is it?", " So~", "Well?") + " "


@pytest.mark.parametrize(
    ("template", "end", "space"),
    [(CHATML, " ", ""), (NUMBERED, "\n", ""), (LLAMA_2, "\n", " "), (LLAMA_2, " ", "")],
)
def test_space_that_a_broken_off_answer_ends_with_is_not_said_twice(template, end, space):
    conversation = talk(template, answer=f"So{end}")
    conversation.say(UserTurn("What is it?"), max_new_tokens=3)
    conversation.say(UserTurn("Well?"), max_new_tokens=1)
    whole = render(conversation, "What is it?", f"So{end}", "Well?")
    if template == LLAMA_2:
        whole = whole.replace(" So ", f"So{end}{space}")
    assert text(conversation) == whole + "S"


@pytest.mark.parametrize("name", ["llama-2", "mistral", "gemma", "numbered"])
def test_a_saved_conversation_goes_on_with_the_text_of_the_whole(name, tmp_path):
    system = None if name in NO_SYSTEM else "Be brief"
    conversation = talk(WHOLE[name], system=system)
    conversation.read("A book. \n")

    def reload():
        kvtool.save_cache(conversation.cache, tmp_path / "a.st", model=conversation.model)
        cache = kvtool.load_cache(tmp_path / "a.st", conversation.model)
        return Conversation(conversation.model, conversation.tokenizer, cache)

    conversation = reload()
    conversation.say(UserTurn("What is it?"), max_new_tokens=2)
    said = ["A book. \n\nWhat is it?"]
    assert text(conversation) == render(conversation, *said, system=system) + "So"
    conversation = reload()
    conversation.say(UserTurn("Well?"), max_new_tokens=2)
    said += ["So", "Well?"]
    whole = render(conversation, *said, system=system) + "So"
    assert tight(text(conversation)) == tight(whole)
    conversation = reload()
    conversation.hear(UserTurn("And?", answer="Then."))
    said += ["So", "And?", "Then."]
    conversation = reload()
    conversation.say(UserTurn("Why?"), max_new_tokens=1)
    whole = render(conversation, *said, "Why?", system=system) + "S"
    assert tight(text(conversation)) == tight(whole)


@pytest.mark.parametrize("name", ["llama-2", "vicuna", "zephyr", "gemma", "numbered"])
def test_an_open_message_is_closed_as_the_template_closes_it(name):
    conversation = talk(WHOLE[name])
    conversation.read("A book. \n")
    opened = text(conversation)
    whole = render(conversation, "A book. \n")
    assert whole.startswith(opened)
    assert opened.rstrip().endswith("A book.")
    conversation.answer(max_new_tokens=1)
    assert text(conversation) == whole + "S"


@pytest.mark.parametrize("name", CHANGED)
def test_a_template_that_changes_what_was_read_is_refused(name):
    conversation = talk(CHANGED[name])
    conversation.say(UserTurn("What is it?"), max_new_tokens=9)
    whole = render(conversation, "What is it?")
    assert text(conversation) == f"{whole}So.</s>"
    with pytest.raises(UsageError, match="changes messages that the cache has read"):
        conversation.say(UserTurn("Well?"), max_new_tokens=9)


def test_a_system_message_that_moves_is_refused_and_without_one_the_template_works():
    conversation = talk(SYSTEM_BEFORE_THE_LAST, system="Be brief")
    conversation.say(UserTurn("What is it?"), max_new_tokens=2)
    with pytest.raises(UsageError, match="changes messages that the cache has read"):
        conversation.say(UserTurn("Well?"), max_new_tokens=2)
    conversation = talk(SYSTEM_BEFORE_THE_LAST)
    conversation.say(UserTurn("What is it?"), max_new_tokens=2)
    conversation.say(UserTurn("Well?"), max_new_tokens=1)
    assert tight(text(conversation)) == tight(
        render(conversation, "What is it?", "So", "Well?") + "S"
    )


def test_a_thought_that_the_template_drops_is_refused():
    conversation = talk(DROPS_THOUGHTS, answer="<think>1</think>So.")
    said = conversation.say(UserTurn("What is it?"), max_new_tokens=9)
    assert said.text == ["<think>1</think>So."]
    with pytest.raises(UsageError, match="changes messages that the cache has read"):
        conversation.say(UserTurn("Well?"), max_new_tokens=9)


def test_a_date_is_that_of_the_day_on_which_the_text_was_read(monkeypatch):
    conversation = talk(WHOLE["dated"])
    conversation.say(UserTurn("What is it?"), max_new_tokens=2)
    before = text(conversation)

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=1)

    monkeypatch.setattr(rendering, "datetime", Tomorrow)
    conversation.say(UserTurn("Well?"), max_new_tokens=2)
    rest = render(conversation, "What is it?", "So", "Well?").split("So")[1]
    assert not before.startswith(render(conversation, "What is it?"))
    assert text(conversation) == f"{before}{rest}So"


def test_a_cache_of_another_template_is_refused(tmp_path):
    conversation = talk(CHATML)
    conversation.read("A book.")
    kvtool.save_cache(conversation.cache, tmp_path / "a.st")
    cache = kvtool.load_cache(tmp_path / "a.st", conversation.model)
    conversation.tokenizer.chat_template = VICUNA
    with pytest.raises(UsageError, match="not the one that the cached text was put into"):
        Conversation(conversation.model, conversation.tokenizer, cache)


@pytest.mark.parametrize(
    ("template", "regular", "behind"),
    [(CHATML, True, "open"), (LLAMA_2, True, "answer"), (NUMBERED, False, "answer")],
)
def test_a_file_without_messages_goes_on_where_the_template_words_all_alike(
    template, regular, behind
):
    """Files of earlier versions say where a conversation ended, and not what was said."""
    conversation = talk(template)
    conversation.read("A book.")
    if behind == "answer":
        conversation.answer(max_new_tokens=9)
    conversation.cache.end_with(behind)
    again = Conversation(conversation.model, conversation.tokenizer, conversation.cache)
    if not regular:
        with pytest.raises(UsageError, match="words a message by what was said before"):
            again.say(UserTurn("Well?"), max_new_tokens=1)
        return
    again.say(UserTurn("Well?"), max_new_tokens=1)
    if behind == "open":
        assert text(again) == render(again, "A book.\nWell?") + "S"
    else:
        whole = render(again, "A book.", "So.", "Well?")
        assert text(again).endswith(whole[whole.index("</s>") :] + "S")
        assert text(again).count("</s>") == whole.count("</s>")


def test_text_as_it_stands_becomes_part_of_the_answer_before_it():
    conversation = talk(NUMBERED)
    conversation.say(UserTurn("What is it?"), max_new_tokens=2)
    conversation.say(UserTurn(" Hm", verbatim=True), max_new_tokens=2)
    conversation.say(UserTurn("Well?"), max_new_tokens=1)
    assert text(conversation) == render(conversation, "What is it?", "So HmSo", "Well?") + "S"
    assert conversation.cache.text.history.messages[1].content == "So HmSo"


def test_kvzip_asks_in_the_words_of_the_template():
    conversation = talk(LLAMA_2, policy="kvzip", budget=60)
    conversation.say(UserTurn("A book. " * 20), max_new_tokens=1)
    asked = Repetition.of(conversation.cache).instructions.first
    asked = conversation.tokenizer.decode(asked, clean_up_tokenization_spaces=False)
    assert asked.startswith(" </s><s>[INST] ")
    assert asked.endswith(" [/INST]")


@pytest.mark.parametrize("context", [None, "A book."])
def test_turns_that_a_template_cannot_put_behind_each_other_are_known_before(context):
    turns = [UserTurn("What is it?"), UserTurn("Well?")]
    for template in CHANGED.values():
        conversation = talk(template)
        conversation.foresee(turns[:1], context)
        with pytest.raises(UsageError, match="changes messages that the cache has read"):
            conversation.foresee(turns, context)
        assert conversation.cache.get_seq_length() == 0
    for template in WHOLE.values():
        talk(template).foresee([*GIVEN, *turns, GIVEN[0], turns[0]], context)


def test_each_answer_is_recorded_as_it_was_said():
    conversation = talk(CHATML)
    for asked, new_tokens in (("One?", 1), ("Two of them?", 2), ("Three?", 2)):
        conversation.say(UserTurn(asked), max_new_tokens=new_tokens)
    history = conversation.cache.text.history
    said = [each.content for each in history.messages]
    assert said == ["One?", "S", "Two of them?", "So", "Three?"]
    assert history.answer_tokens == 2
