"""How a prompt is repeated: in which words, in a chat template and without, and what is fed."""

import pytest

import kvtool
from kvtool.documents.messages import UserTurn
from kvtool.documents.settings import Protocol
from kvtool.evaluation.bench.ask import ask
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.samples.sample import Sample, Turn
from kvtool.evaluation.tasks.qa import Questions
from kvtool.generation import Conversation
from kvtool.models.load import load
from tests.evaluation.variants import make_variants
from tests.generation.test_conversation import CHAT

TEXT = "The secret code for falcon: 7429103. The old lamp was near the school. " * 6
FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@pytest.fixture(scope="module")
def loaded():
    loaded = load()
    kvtool.attach(loaded.model)
    loaded.tokenizer.chat_template = CHAT
    return loaded


@pytest.fixture
def fed(loaded):
    """The texts that the model is fed, one after another."""
    texts = []

    def note(module, args, kwargs):
        ids = kwargs.get("input_ids")
        texts.append(loaded.tokenizer.decode(ids[0], clean_up_tokenization_spaces=False))

    handle = loaded.model.register_forward_pre_hook(note, with_kwargs=True)
    yield texts
    handle.remove()


def talk(loaded, policy="kvzip(sinks=0)", budget=40, **options):
    cache = kvtool.build_cache(loaded.model, policy, budget)
    return Conversation(loaded.model, loaded.tokenizer, cache, **options)


def held_by_all(cache):
    """Positions that every head of every layer keeps."""
    heads = [head for layer in range(4) for head in cache.kept_positions(layer)[0].tolist()]
    return set.intersection(*map(set, heads))


def test_an_open_message_is_closed_behind_the_instruction(loaded, fed):
    conversation = talk(loaded)
    conversation.read(TEXT)
    whole, repeated = fed
    assert whole == f"<bos>[user]{TEXT}"
    assert repeated == f"{FIRST}<eos>\n[assistant]{TEXT}"
    opening = len(loaded.tokenizer("<bos>[user]", add_special_tokens=False).input_ids)
    assert set(range(opening)) <= held_by_all(conversation.cache)


def test_a_closed_message_is_followed_by_one_that_instructs(loaded, fed):
    conversation = talk(loaded)
    conversation.hear(UserTurn(TEXT))
    whole, repeated = fed
    assert whole == f"<bos>[user]{TEXT}<eos>\n[assistant]"
    assert repeated == f"<eos>\n[user]{FIRST}<eos>\n[assistant]{TEXT}"
    behind = len(loaded.tokenizer("<eos>\n[assistant]", add_special_tokens=False).input_ids)
    (seen,) = conversation.cache.tokens_seen()
    assert set(range(seen - behind, seen)) <= held_by_all(conversation.cache)


def test_chunks_are_led_to_by_what_comes_before(loaded, fed):
    talk(loaded, "kvzip(sinks=4,chunk=50)", template="off").read(TEXT)
    tokenizer = loaded.tokenizer
    ids = tokenizer(TEXT).input_ids

    def text(start, stop):
        return tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False)

    repeated = [FIRST + text(4, 54)]
    for start in range(54, len(ids), 50):
        repeated.append(LATER + text(start - 8, min(start + 50, len(ids))))
    assert fed[1:] == repeated
    assert len(repeated) > 2


def test_evaluations_put_the_instruction_in_the_template_too(loaded, fed):
    (variant,) = make_variants(["kvzip"], ["40"], baseline=False)
    later, known = (Protocol(chat_template="on", query_aware=known) for known in (False, True))
    sample = Sample("a", TEXT, (Turn(" And the code?", ("7429103",), 4),))
    ask(Bench(loaded, variant, later), sample, Questions(name="qa"))
    assert fed[1].startswith(f"{FIRST}<eos>\n[assistant]")
    fed.clear()
    ask(Bench(loaded, variant, known), sample, Questions(name="qa"))
    assert fed[1].startswith(f"<eos>\n[user]{FIRST}<eos>\n[assistant]")
