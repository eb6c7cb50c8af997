"""Turns on one cache: what is fed, in which words, and that it is what one long text would be."""

import pytest
import torch

import kvtool
from kvtool.documents.messages import UserTurn
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation import Conversation, decode_step, prefill
from kvtool.models.load import load

pytestmark = pytest.mark.few(2)

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONTEXT = "The secret code for falcon: 7429103. The old lamp was near the school."
SAID = [UserTurn(f"The secret code for {name}:") for name in ("falcon", "lamp", "falcon")]


@pytest.fixture(scope="module", params=[None, CHAT], ids=["lines", "chat"])
def loaded(request):
    loaded = load()
    kvtool.attach(loaded.model)
    loaded.tokenizer.chat_template = request.param
    return loaded


def talk(loaded, policy="full", budget=None, prefill="full", **options):
    cache = kvtool.build_cache(loaded.model, policy, budget, prefill=prefill)
    return Conversation(loaded.model, loaded.tokenizer, cache, **options)


def text_of(conversation):
    ids = conversation.cache.input_ids[0]
    return conversation.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(("context", "new_tokens"), [(CONTEXT, 12), (None, 3)])
def test_the_text_is_that_of_the_whole_conversation(loaded, context, new_tokens):
    conversation = talk(loaded)
    if context is not None:
        conversation.read(context)
    answers = [conversation.say(turn, max_new_tokens=new_tokens) for turn in SAID]
    said = [turn.text for turn in SAID]
    if context is not None:
        said[0] = f"{context}\n{said[0]}"
    tokenizer, chat = loaded.tokenizer, loaded.tokenizer.chat_template is not None
    told = [
        tokenizer.decode(answer.token_ids[0], clean_up_tokenization_spaces=False)
        for answer in answers
    ]
    if chat:
        messages = []
        for user, assistant in zip(said, told, strict=True):
            messages.append({"role": "user", "content": user})
            messages.append({"role": "assistant", "content": assistant.removesuffix("<eos>")})
        expected = tokenizer.apply_chat_template(messages[:-1], tokenize=False)
        assert text_of(conversation) == f"{expected}[assistant]{told[-1]}"
    else:
        pairs = zip(said, told, strict=True)
        assert text_of(conversation) == "<bos>" + "\n".join(a + b for a, b in pairs)
    assert text_of(conversation).count("<bos>") == 1


@pytest.mark.parametrize(
    ("policy", "budget", "mode"), [("h2o+caote", 24, "block:7"), ("snapkv(window=4)", 24, "full")]
)
def test_an_answer_is_what_feeding_by_hand_gives(loaded, policy, budget, mode):
    conversation = talk(loaded, policy, budget, mode)
    conversation.read(CONTEXT)
    by_hand = kvtool.build_cache(loaded.model, policy, budget, prefill=mode)
    prefill(loaded.model, by_hand, conversation.cache.input_ids)
    unfed = torch.zeros(1, 0, dtype=torch.long)
    for turn in SAID:
        new = torch.cat([unfed, conversation.turn_ids(turn)], 1)
        answer = conversation.say(turn, max_new_tokens=6)
        logits, tokens = prefill(loaded.model, by_hand, new), []
        while True:
            tokens.append(logits.argmax(-1))
            if len(tokens) == len(answer.token_ids[0]):
                break
            logits = decode_step(loaded.model, by_hand, tokens[-1])
        assert torch.cat(tokens).tolist() == answer.token_ids[0]
        assert answer.prompt_tokens == new.shape[1] - unfed.shape[1]
        assert answer.report.kept_per_layer == by_hand.report().kept_per_layer
        assert answer.report.tokens_seen == max(by_hand.tokens_seen())
        unfed = tokens[-1][None]


def test_the_full_cache_answers_as_the_model_does_on_the_whole_text(loaded):
    conversation = talk(loaded)
    conversation.read(CONTEXT)
    for turn in SAID:
        answer = conversation.say(turn, max_new_tokens=6)
        count = len(answer.token_ids[0])
        everything = answer.input_ids
        with torch.no_grad():
            logits = loaded.model(everything[:, :-1], use_cache=False).logits
        assert logits[0, -count:].argmax(-1).tolist() == answer.token_ids[0]


def test_a_saved_conversation_goes_on_as_if_it_had_not_been_broken_off(loaded, tmp_path):
    unbroken = talk(loaded, "h2o+caote", 24)
    unbroken.read(CONTEXT)
    expected = [unbroken.say(turn, max_new_tokens=5).token_ids for turn in SAID]
    first = talk(loaded, "h2o+caote", 24)
    first.read(CONTEXT)
    found = [first.say(SAID[0], max_new_tokens=5).token_ids]
    for turn in SAID[1:]:
        kvtool.save_cache(first.cache, tmp_path / "a.st")
        cache = kvtool.load_cache(tmp_path / "a.st", loaded.model)
        first = Conversation(loaded.model, loaded.tokenizer, cache)
        found.append(first.say(turn, max_new_tokens=5).token_ids)
    assert found == expected
    assert text_of(first) == text_of(unbroken)


def test_a_conversation_begins_behind_a_text_that_is_none(loaded):
    cache = kvtool.build_cache(loaded.model, "full")
    ids = loaded.tokenizer(CONTEXT, return_tensors="pt").input_ids
    kvtool.generation.compress(loaded.model, cache, ids)
    conversation = Conversation(loaded.model, loaded.tokenizer, cache)
    conversation.say(SAID[0], max_new_tokens=4)
    between = "\n" if loaded.tokenizer.chat_template is None else "[user]"
    assert text_of(conversation).startswith(f"<bos>{CONTEXT}{between}{SAID[0].text}")


def test_a_verbatim_turn_is_fed_as_it_stands(loaded):
    conversation = talk(loaded)
    as_is = UserTurn("The secret code for falcon: 7429103.", verbatim=True)
    conversation.say(as_is, max_new_tokens=3)
    before = text_of(conversation)
    assert before.startswith(f"<bos>{as_is.text}")
    conversation.say(as_is, max_new_tokens=3)
    assert text_of(conversation).startswith(before + as_is.text)
    before = text_of(conversation)
    conversation.say(SAID[0], max_new_tokens=3)
    between = "\n" if loaded.tokenizer.chat_template is None else "[user]"
    assert text_of(conversation).startswith(before + between + SAID[0].text)


def test_a_template_can_be_left_out(loaded):
    conversation = talk(loaded, template="off")
    conversation.say(SAID[0], max_new_tokens=3)
    conversation.say(SAID[1], max_new_tokens=3)
    assert "[user]" not in text_of(conversation)
    assert f"\n{SAID[1].text}" in text_of(conversation)


def test_a_cache_that_does_not_know_its_text_is_refused(loaded):
    cache = kvtool.build_cache(loaded.model, "full")
    prefill(loaded.model, cache, torch.tensor([[1, 5, 9]]))
    with pytest.raises(KvtoolError, match="does not know its text"):
        Conversation(loaded.model, loaded.tokenizer, cache)


@pytest.mark.parametrize("mode", ["full", "block:7"])
def test_a_given_answer_is_fed_with_its_turn(loaded, mode):
    conversation = talk(loaded, "h2o+caote", 24, mode)
    by_hand = kvtool.build_cache(loaded.model, "h2o+caote", 24, prefill=mode)
    given = UserTurn(CONTEXT, answer=" 7429103.")
    ids = conversation.turn_ids(given)
    assert conversation.hear(given).prompt_tokens == ids.shape[1]
    prefill(loaded.model, by_hand, ids)
    assert text_of(conversation).endswith(" 7429103.")
    new = conversation.turn_ids(SAID[0])
    answer = conversation.say(SAID[0], max_new_tokens=1)
    logits = prefill(loaded.model, by_hand, new)
    assert answer.token_ids == [[logits.argmax(-1).item()]]
    assert answer.report.kept_per_layer == by_hand.report().kept_per_layer
    assert conversation.cache.input_ids[0].tolist() == [
        *ids[0].tolist(),
        *new[0].tolist(),
        *answer.token_ids[0],
    ]


def test_an_answer_that_answers_nothing_is_refused(loaded):
    with pytest.raises(UsageError, match="answers a message of the user, and none is open"):
        talk(loaded).hear(UserTurn("", answer="So."))


def test_a_system_message_behind_a_text_is_refused(loaded):
    conversation = talk(loaded)
    conversation.read(CONTEXT)
    with pytest.raises(UsageError, match="goes before everything, and the cache holds a text"):
        Conversation(loaded.model, loaded.tokenizer, conversation.cache, system="Be brief.")
