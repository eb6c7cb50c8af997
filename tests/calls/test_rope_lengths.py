"""Calls over a model whose RoPE depends on the length: each says how long its text gets."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

import kvtool
from kvtool.cache.whole.settings import RopeLengths
from kvtool.calls.prompts import generate_many
from kvtool.documents.settings import Protocol
from kvtool.errors import UsageError
from kvtool.evaluation.bench.ask import ask
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.bench.shared import SharedPrompts
from kvtool.evaluation.samples.sample import Sample, Turn
from kvtool.evaluation.tasks.fidelity import compare_with_full
from kvtool.evaluation.tasks.scbench import KeyValue
from kvtool.generation import Conversation
from kvtool.identity import config_hash
from kvtool.models.load import Loaded, load
from kvtool.planning.variants import Variant
from kvtool.policies.grammar import parse_policy
from kvtool.profiling.output_error import output_error
from kvtool.sizes import Budget
from tests.calls.conftest import timeless

TRAINED = 100  # tokens; longer texts are turned by other factors
TEXT = "The old lamp was near the school. The quiet falcon was behind the tower. " * 5
QUESTION = "Where was the falcon? It was"


@pytest.fixture(scope="module")
def long_rope() -> Loaded:
    """The bundled model with other factors for texts of more than 100 tokens."""
    loaded = load()
    config = copy.deepcopy(loaded.model.config)
    pairs = config.head_dim // 2
    config.rope_parameters = dict(config.rope_parameters) | {
        "rope_type": "longrope",
        "short_factor": [1.0] * pairs,
        "long_factor": [1.0 + i / pairs for i in range(pairs)],
        "original_max_position_embeddings": TRAINED,
        "factor": 1.0,
    }
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(loaded.model.state_dict())
    model.generation_config = loaded.model.generation_config
    return replace(loaded, model=model, name="long", config_hash=config_hash(config))


SHORT, LONG = RopeLengths((TRAINED,)), RopeLengths((TRAINED + 1,))


def test_a_compressed_prompt_is_read_for_what_follows(long_rope):
    loaded = long_rope
    cache = kvtool.compress(loaded, TEXT, "full", max_new_tokens=64, save="long.safetensors")
    assert cache.rope.chosen == LONG
    whole = kvtool.generate(loaded, TEXT + QUESTION, "full", max_new_tokens=40)
    answer = kvtool.generate(loaded, QUESTION, cache="long.safetensors", max_new_tokens=40)
    assert answer.token_ids == whole.token_ids
    with pytest.raises(UsageError):
        kvtool.compress(loaded, TEXT, "full", max_new_tokens=-1)
    cache = kvtool.compress(loaded, TEXT, "full", save="short.safetensors")
    assert cache.rope.chosen == SHORT
    with pytest.raises(UsageError, match="compress with a larger --max-new-tokens"):
        kvtool.generate(loaded, QUESTION, cache="short.safetensors", max_new_tokens=40)
    assert kvtool.generate(loaded, cache="short.safetensors", max_new_tokens=2).new_tokens == 2


def test_all_turns_of_a_conversation_have_the_factors_of_the_whole(long_rope):
    said = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Near."}]
    turns = [TEXT, QUESTION, *said, QUESTION]
    document = kvtool.generate(long_rope, None, "full", turns=turns, max_new_tokens=12)
    assert len(document.turns) == 3
    model, tokenizer = long_rope.model, long_rope.tokenizer
    kvtool.attach(model)
    talk = Conversation(model, tokenizer, kvtool.build_cache(model, "full"))
    talk.cache.expect_length(999)
    said = [talk.say(turn, max_new_tokens=12) for turn in read(turns[:2])]
    assert [each.token_ids for each in document.turns[:2]] == [each.token_ids[0] for each in said]
    assert talk.cache.rope.chosen == LONG


def read(turns):
    from kvtool.documents.messages import make_turns

    return make_turns(turns).turns


def test_a_conversation_of_which_nobody_says_the_length_ends_in_one_line(long_rope):
    model = kvtool.attach(long_rope.model)
    talk = Conversation(model, long_rope.tokenizer, kvtool.build_cache(model, "full"))
    begins, goes_on = read([TEXT, QUESTION])
    talk.say(begins, max_new_tokens=5)
    with pytest.raises(UsageError, match="RoPE factors of texts of up to 100 tokens"):
        talk.say(goes_on, max_new_tokens=30)


def test_prompts_of_a_batch_are_what_they_are_alone(long_rope):
    prompts = [{"prompt": TEXT}, {"prompt": QUESTION}, {"prompt": TEXT + QUESTION}]
    together = generate_many(long_rope, prompts, "full", max_new_tokens=12)
    alone = [
        kvtool.generate(long_rope, each["prompt"], "full", max_new_tokens=12) for each in prompts
    ]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


def test_a_comparison_with_the_full_cache_compares_the_same(long_rope):
    document = kvtool.generate(long_rope, TEXT, "full", max_new_tokens=30, compare_full=True)
    assert document.fidelity.agreement == 1.0
    assert document.fidelity.kl < 1e-6


# ---- evaluation


MODES = {False: "multi_turn", True: "scdq"}


def bench_of(loaded, policy="full", budget=None, prompts=None, **protocol):
    kvtool.attach(loaded.model)
    size = None if budget is None else Budget.parse(str(budget))
    return Bench(loaded, Variant(parse_policy(policy), size), Protocol(**protocol), prompts=prompts)


class Watched:
    """Notes for which lengths the caches of a bench have chosen."""

    def __init__(self, bench):
        self.caches, make = [], bench.new_cache
        bench.new_cache = lambda: self.caches.append(make()) or self.caches[-1]

    @property
    def chosen(self):
        return [cache.rope.chosen for cache in self.caches]


@pytest.mark.few(1)
@pytest.mark.parametrize(("aware", "same"), [(True, False), (False, True), (False, False)])
def test_questions_are_asked_of_a_text_with_room_for_them(aware, same, long_rope):
    sample = Sample("one", TEXT, (Turn(QUESTION, ("a",), 9), Turn(QUESTION, ("b",), 9)))
    bench = bench_of(long_rope, query_aware=aware)
    watched = Watched(bench)
    answers = ask(bench, sample, KeyValue(name="scbench/kv", mode=MODES[same], golden=False))
    assert len(answers) == 2
    assert watched.chosen[0] == LONG


@pytest.mark.exhaustive
def test_variants_that_share_a_prompt_share_its_factors(long_rope):
    prompts = SharedPrompts()
    later = {"query_aware": False}
    policies = (("full",), ("h2o", 40))
    benches = [bench_of(long_rope, *each, prompts=prompts, **later) for each in policies]
    prompts.begin(benches)
    sample = Sample("one", TEXT, (Turn(QUESTION, ("a",), 9), Turn(QUESTION, ("b",), 9)))
    task = KeyValue(name="scbench/kv", golden=False)
    shared = [ask(bench, sample, task) for bench in benches]
    alone = [ask(bench_of(long_rope, *each, **later), sample, task) for each in policies]
    assert shared == alone


@pytest.mark.exhaustive
def test_likelihoods_go_by_the_length_of_each_whole_text(long_rope):
    """A short continuation and a long one of the same context have factors of their own."""
    bench = bench_of(long_rope)
    for continuation in (" behind", " behind the tower" * 12):
        found, _ = bench.loglikelihood(TEXT.rstrip(), continuation)
        ids = bench.encode(TEXT.rstrip() + continuation, special=True)
        start = len(long_rope.tokenizer(TEXT.rstrip())["input_ids"])
        with torch.no_grad():
            logits = bench.model(ids).logits.log_softmax(-1)
        right = logits[0, start - 1 : -1].gather(-1, ids[0, start:, None]).sum()
        assert found == pytest.approx(right.item(), abs=1e-2)


@pytest.mark.exhaustive
def test_texts_and_answers_of_other_harnesses(long_rope):
    bench = bench_of(long_rope)
    answer = kvtool.generate(long_rope, TEXT, "full", max_new_tokens=30, chat_template="off")
    kvtool.attach(long_rope.model)
    assert bench.generate(TEXT, max_new_tokens=30) == answer.text
    assert bench.rolling(TEXT * 2) < 0


@pytest.mark.exhaustive
def test_the_full_cache_is_followed_through_its_whole_answer(long_rope):
    bench = bench_of(long_rope)
    later = SimpleNamespace(knows_query=lambda _: False, keeps_question=lambda _: False)
    found = compare_with_full(later, bench, Sample("", TEXT, (Turn(QUESTION, (), 30),)))
    assert found["agreement"] == 1.0
    assert found["kl"] < 1e-6


@pytest.mark.exhaustive
def test_output_errors_are_measured_past_the_length(long_rope):
    model = kvtool.attach(long_rope.model)
    ids = torch.tensor([long_rope.tokenizer(TEXT)["input_ids"]])
    errors = output_error(model, kvtool.build_cache(model, "full"), ids, ids[:, :40], "end_to_end")
    assert max(errors) < 1e-6


def test_a_short_answer_has_short_factors(long_rope):
    short = kvtool.generate(long_rope, QUESTION, "full", max_new_tokens=4)
    assert timeless(short) == timeless(
        kvtool.generate(load(), QUESTION, "full", max_new_tokens=4)
    ) | {"model": short.model}
