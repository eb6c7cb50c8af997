"""How a sample is asked: what is fed in which order, chat templates, truncation, likelihoods."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import kvtool
from kvtool import generation
from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError
from kvtool.evaluation.bench.ask import ask
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.bench.prompts import first_prompt
from kvtool.evaluation.samples.sample import Sample, Turn
from kvtool.evaluation.tasks.scbench import SharedContext
from kvtool.models.chat import make_frame
from kvtool.planning.variants import Variant
from tests.chat_templates import CHANGED, WHOLE
from tests.evaluation.variants import make_variants

CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TEXT = " The old lamp was near the school." * 12
CODES = " The secret code for falcon: 7429103. The secret code for tiger: 55812."


class Questions(SharedContext):
    """Asks; `mode` and `golden` are SCBench's."""

    metric: ClassVar[str] = "em"

    def draw(self, tokens):
        return []

    def score_answer(self, prediction, references, facts):
        return float(references[0] in prediction)


def question(key: str) -> str:
    return f"\n Question: What is the secret code for {key}? Answer:"


def cue(key: str) -> str:
    return f" The secret code for {key}:"


SAMPLE = Sample(
    "one",
    TEXT + CODES + TEXT,
    (
        Turn(question("falcon"), ("7429103",), 9, cue("falcon")),
        Turn(question("tiger"), ("55812",), 9, cue("tiger")),
    ),
)
FULL, H2O, SNAPKV, CALIDROP = make_variants(["h2o", "snapkv(window=8)", "h2o+calidrop"], ["60"])


@dataclass
class Recorder:
    """A bench that notes every text that is fed, as text."""

    fed: list

    def bench(self, loaded, variant, protocol=None) -> Bench:
        bench = Bench(loaded, variant, protocol or Protocol())
        feed = bench.feed

        def spy(cache, ids, **settings):
            self.fed.append(loaded.tokenizer.decode(ids[0], skip_special_tokens=True))
            return feed(cache, ids, **settings)

        bench.feed = spy
        return bench


def asked_of(bench, sample, task):
    return ask(bench, sample, task)


def asked_cache(bench, sample, task):
    """The cache that a sample has been asked of."""
    made, new = [], bench.new_cache
    bench.new_cache = lambda: made.append(new()) or made[-1]
    asked_of(bench, sample, task)
    return made[0]


def first_turn(sample):
    return Sample(sample.id, sample.context, sample.turns[:1])


def test_a_question_is_asked_as_a_plain_generation_asks_it(loaded):
    for variant in (FULL, H2O, SNAPKV, CALIDROP):
        bench = Bench(loaded, variant, Protocol())
        (answer,) = asked_of(bench, first_turn(SAMPLE), Questions(name="q"))
        text = SAMPLE.context + question("falcon") + cue("falcon")
        ids = loaded.tokenizer(text, return_tensors="pt").input_ids
        cache = kvtool.build_cache(loaded.model, variant.policy, variant.budget)
        plain = generation.generate(loaded.model, loaded.tokenizer, cache, ids, max_new_tokens=9)
        assert answer["prediction"] == plain.text[0]
        assert answer["references"] == ["7429103"]
        assert answer["new_tokens"] == plain.new_tokens
        assert bench.meter.prompt_tokens == ids.shape[1]
        assert bench.meter.decoded == plain.new_tokens - 1
        assert bench.meter.bytes["kv_bytes"] == plain.report.kv_bytes
        assert bench.meter.bytes["state_bytes"] == plain.report.state_bytes
        assert bench.meter.bytes["full_bytes"] == plain.report.full_bytes
        assert bench.meter.bytes["allocated_bytes"] == plain.report.allocated_bytes
        assert bench.meter.bytes["host_bytes"] == plain.report.host_bytes
        assert (plain.report.host_bytes > 0) == (variant is CALIDROP)
        assert bench.meter.kept_per_layer == plain.report.kept_per_layer


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(loaded):
    asked = Sample("one", SAMPLE.context, SAMPLE.turns[1:])
    bench = Bench(loaded, FULL, Protocol(stop=("1", "8")))
    (answer,) = asked_of(bench, asked, Questions(name="q"))
    assert answer["prediction"].strip() == "55"

    class Patient(Questions):
        @property
        def min_new_tokens(self):
            return 4

    (answer,) = asked_of(bench, asked, Patient(name="q"))
    assert answer["prediction"].strip().startswith("558")  # what must be there ends nothing


def test_an_unknown_query_comes_after_the_context_is_compressed(loaded):
    recorder = Recorder([])
    bench = recorder.bench(loaded, H2O, Protocol(query_aware=False))
    (answer,) = asked_of(bench, first_turn(SAMPLE), Questions(name="q"))
    assert recorder.fed == [SAMPLE.context, question("falcon") + cue("falcon")]
    cache = kvtool.build_cache(loaded.model, H2O.policy, H2O.budget)
    ids = bench.encode(SAMPLE.context, special=True)
    generation.prefill(loaded.model, cache, ids)
    more = bench.encode(recorder.fed[1], special=False)
    logits = generation.prefill(loaded.model, cache, more)
    first = loaded.tokenizer.decode(logits.argmax(-1))
    assert answer["prediction"].startswith(first)
    full = Bench(loaded, FULL, Protocol(query_aware=False))
    (answer,) = asked_of(full, first_turn(SAMPLE), Questions(name="q"))
    assert answer["prediction"].strip() == "7429103."


def test_a_kept_question_is_not_compressed(loaded):
    bench = Recorder([]).bench(loaded, H2O, Protocol(query_aware=False, keep_question=True))
    (answer,) = asked_of(bench, first_turn(SAMPLE), Questions(name="q"))
    cache = kvtool.build_cache(loaded.model, H2O.policy, H2O.budget)
    generation.prefill(loaded.model, cache, bench.encode(SAMPLE.context, special=True))
    context = cache.kept_positions(0)[0, 0].tolist()
    more = bench.encode(question("falcon") + cue("falcon"), special=False)
    with cache.budgets.raising():
        logits = generation.prefill(loaded.model, cache, more)
    seen = cache.tokens_seen()[0]
    kept = [*context, *range(seen - more.shape[1], seen)]
    assert cache.kept_positions(0)[0, 0].tolist() == kept
    assert answer["prediction"].startswith(loaded.tokenizer.decode(logits.argmax(-1)))


def test_what_earlier_versions_lack_is_told_only_if_it_is_set():
    assert "keep_question" not in Protocol(query_aware=False).identity()
    assert Protocol(query_aware=False, keep_question=True).identity()["keep_question"]


def test_turns_follow_each_other_after_the_reference_answer(loaded):
    recorder = Recorder([])
    answers = asked_of(recorder.bench(loaded, FULL), SAMPLE, Questions(name="q"))
    assert recorder.fed == [
        SAMPLE.context + question("falcon") + cue("falcon"),
        " 7429103" + question("tiger") + cue("tiger"),
    ]
    assert [answer["prediction"].strip() for answer in answers] == ["7429103.", "55812."]


def test_turns_can_follow_the_models_own_answer(loaded):
    recorder = Recorder([])
    bench = recorder.bench(loaded, FULL)
    answers = asked_of(bench, SAMPLE, Questions(name="q", golden=False))
    assert len(recorder.fed) == 2
    assert recorder.fed[1].endswith(question("tiger") + cue("tiger"))
    assert "7429103" not in recorder.fed[1]  # it is in the cache already
    assert [answer["prediction"].strip() for answer in answers] == ["7429103.", "55812."]


def test_questions_about_one_context_do_not_see_each_other(loaded):
    recorder = Recorder([])
    bench = recorder.bench(loaded, H2O)
    task = Questions(name="q", mode="scdq")
    assert not task.knows_query(bench.protocol)
    both = asked_of(bench, SAMPLE, task)
    assert recorder.fed == [
        SAMPLE.context,
        question("falcon") + cue("falcon"),
        question("tiger") + cue("tiger"),
    ]
    swapped = Sample("one", SAMPLE.context, SAMPLE.turns[::-1])
    again = asked_of(Bench(loaded, H2O, Protocol()), swapped, task)
    assert [a["prediction"] for a in both] == [a["prediction"] for a in again[::-1]]


@pytest.fixture
def chatty(loaded):
    before = loaded.tokenizer.chat_template
    loaded.tokenizer.chat_template = CHAT
    yield loaded
    loaded.tokenizer.chat_template = before


def test_a_chat_template_goes_around_the_question_and_before_the_cue(chatty):
    recorder = Recorder([])
    asked_of(recorder.bench(chatty, FULL), SAMPLE, Questions(name="q"))
    assert recorder.fed == [
        f"[user] {SAMPLE.context}{question('falcon')}\n[assistant] {cue('falcon')}",
        f" 7429103\n[user] {question('tiger')}\n[assistant] {cue('tiger')}",
    ]


@pytest.mark.few(4)
@pytest.mark.parametrize("query_aware", [True, False])
@pytest.mark.parametrize("template", ["chatml", "llama-2", "numbered", "zephyr"])
def test_what_is_fed_is_what_the_template_makes_of_all_messages(chatty, template, query_aware):
    """With trimmed messages the cue, which no template knows, is the only text around them."""
    tokenizer = chatty.tokenizer
    tokenizer.chat_template = WHOLE[template]
    recorder = Recorder([])
    bench = recorder.bench(chatty, FULL, Protocol(query_aware=query_aware))
    cache = asked_cache(bench, SAMPLE, Questions(name="q"))
    told = cue("falcon") + " 7429103"
    messages = [
        {"role": "user", "content": SAMPLE.context + question("falcon")},
        {"role": "assistant", "content": told},
        {"role": "user", "content": question("tiger")},
    ]
    first, whole = (
        tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=True)
        for part in (messages[:1], messages)
    )
    fed = tokenizer.decode(cache.input_ids[0], clean_up_tokenization_spaces=False)
    assert fed.startswith(f"{first}{cue('falcon')}")
    assert fed.startswith(f"{whole}{cue('tiger')}")
    if not query_aware:
        assert recorder.fed[0].rstrip().endswith(SAMPLE.context.rstrip())


def test_questions_of_one_context_are_each_put_into_the_template(chatty):
    chatty.tokenizer.chat_template = WHOLE["llama-2"]
    recorder = Recorder([])
    asked_of(recorder.bench(chatty, FULL), SAMPLE, Questions(name="q", mode="scdq"))
    for fed, key in zip(recorder.fed[1:], ("falcon", "tiger"), strict=True):
        message = {"role": "user", "content": SAMPLE.context + question(key)}
        whole = chatty.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        whole = whole.removeprefix("<bos>")
        assert recorder.fed[0] + fed == whole + cue(key)


@pytest.mark.parametrize("name", ["last is marked", "opens thoughts"])
def test_a_template_that_changes_earlier_messages_is_refused_in_the_second_turn(chatty, name):
    chatty.tokenizer.chat_template = CHANGED[name]
    bench = Recorder([]).bench(chatty, FULL)
    (answer,) = asked_of(bench, first_turn(SAMPLE), Questions(name="q"))
    assert answer["prediction"]
    with pytest.raises(KvtoolError, match="changes messages that the cache has read"):
        asked_of(bench, SAMPLE, Questions(name="q"))


def test_a_task_can_do_without_the_template_and_so_can_a_run(chatty):
    class Plain(Questions):
        @property
        def chat(self):
            return False

    for task, protocol in [
        (Plain(name="q"), Protocol()),
        (Questions(name="q"), Protocol(chat_template="off")),
    ]:
        recorder = Recorder([])
        asked_of(recorder.bench(chatty, FULL, protocol), first_turn(SAMPLE), task)
        assert recorder.fed == [SAMPLE.context + question("falcon") + cue("falcon")]


@pytest.mark.parametrize("truncate", ["middle", "left"])
def test_long_prompts_lose_their_middle_or_their_beginning(loaded, truncate):
    words = "".join(f" {number}" for number in range(10, 99))
    sample = Sample("one", words, (Turn("\n What?", (), 4, " It is"),))
    frame = make_frame(loaded.tokenizer, "auto", True)

    def cut(length):
        return first_prompt(loaded.tokenizer, frame, sample, max_length=length, truncate=truncate)

    def count(text):
        return len(loaded.tokenizer(text, add_special_tokens=False).input_ids)

    whole = cut(1000)
    assert (whole.context, whole.question) == (words, "\n What? It is")
    short = cut(60)
    assert short.question == "\n What? It is"
    assert count(short.context + short.question) == 60
    assert words.endswith(short.context[-20:])
    assert short.context.startswith(" 10 11 12") == (truncate == "middle")
    assert len(short.context) < len(words)
    with pytest.raises(KvtoolError, match="question alone"):
        cut(4)
    with pytest.raises(KvtoolError, match="tokens, above the 60 allowed"):
        first_prompt(loaded.tokenizer, frame, sample, max_length=60, truncate="error")


def test_a_question_of_more_than_half_the_length_keeps_all_of_itself(loaded):
    words = "".join(f" {number}" for number in range(10, 99))
    asked = "\n" + "".join(f" {number}" for number in range(10, 30)) + " What?"
    sample = Sample("one", words, (Turn(asked, (), 4),))
    frame = make_frame(loaded.tokenizer, "auto", True)

    def count(text):
        return len(loaded.tokenizer(text, add_special_tokens=False).input_ids)

    need = count(asked)
    length = need + 20
    assert need > length // 2
    for truncate, kept in (("middle", words.startswith), ("left", words.endswith)):
        cut = first_prompt(loaded.tokenizer, frame, sample, max_length=length, truncate=truncate)
        assert cut.question == asked
        assert count(cut.context) == 20
        assert kept(cut.context)


def test_an_answer_and_its_prompt_fit_the_model(loaded, monkeypatch):
    monkeypatch.setattr(loaded.model.config, "max_position_embeddings", 200)
    recorder = Recorder([])
    asked_of(recorder.bench(loaded, FULL), first_turn(SAMPLE), Questions(name="q"))
    fed = loaded.tokenizer(recorder.fed[0]).input_ids
    assert 180 < len(fed) <= 200 - 9 + 1
    assert recorder.fed[0].endswith(question("falcon") + cue("falcon"))


# ---- likelihoods


def plain_logprobs(loaded, ids) -> torch.Tensor:
    logits = loaded.model(ids).logits.double().log_softmax(-1)
    return logits[:, :-1].gather(2, ids[:, 1:, None])[0, :, 0]


def test_likelihoods_of_the_full_cache_are_the_models(loaded):
    bench = Bench(loaded, FULL, Protocol())
    context, continuation = SAMPLE.context + question("tiger") + cue("tiger"), " 55812."
    ids = loaded.tokenizer(context + continuation, return_tensors="pt").input_ids
    new = len(loaded.tokenizer(continuation, add_special_tokens=False).input_ids)
    value, greedy = bench.loglikelihood(context, continuation)
    assert greedy
    assert value == pytest.approx(plain_logprobs(loaded, ids)[-new:].sum().item(), abs=1e-4)
    assert bench.loglikelihood(context, " 55813.")[1] is False
    spaced = bench.loglikelihood(context + " ", continuation[1:])
    assert spaced[0] == pytest.approx(value, abs=1e-4)
    rolled = bench.rolling(SAMPLE.context)
    ids = loaded.tokenizer(SAMPLE.context, return_tensors="pt").input_ids
    assert rolled == pytest.approx(plain_logprobs(loaded, ids).sum().item(), abs=1e-3)


def test_likelihoods_go_through_the_evicting_cache(loaded):
    context, continuation = SAMPLE.context + question("tiger") + cue("tiger"), " 55812."
    tiny = Variant(kvtool.parse_policy("streaming"), make_variants(["h2o"], ["12"])[1].budget)
    full = Bench(loaded, FULL, Protocol()).loglikelihood(context, continuation)
    bench = Bench(loaded, tiny, Protocol())
    cut = bench.loglikelihood(context, continuation)
    assert cut[0] < full[0] - 1
    assert bench.meter.bytes["kept_tokens"] == 12
    assert Bench(loaded, tiny, Protocol()).rolling(TEXT) < Bench(loaded, FULL, Protocol()).rolling(
        TEXT
    )


def test_only_tokens_that_are_fed_count_as_decoded(loaded):
    context = SAMPLE.context + question("tiger") + cue("tiger")
    bench = Bench(loaded, FULL, Protocol())
    new = len(loaded.tokenizer(" 55812.", add_special_tokens=False).input_ids)
    bench.loglikelihood(context, " 55812.")
    assert bench.meter.prompt_tokens == len(loaded.tokenizer(context).input_ids)
    assert (bench.meter.decoded, bench.meter.new_tokens) == (new - 1, new)


def test_a_context_is_read_once_for_all_its_continuations_and_then_let_go(loaded):
    class Choice(Questions):
        def run(self, bench, sample):
            said = [bench.loglikelihood(TEXT, text) for text in (" The lamp", " A lamp")]
            held.append(len(bench._contexts))
            return {"said": said}

    held = []
    shared = {}
    bench = Bench(loaded, H2O, Protocol(), shared)
    record = Choice(name="q").measure(bench, SAMPLE)
    assert record["cost"]["prompt_tokens"] == len(loaded.tokenizer(TEXT).input_ids)
    assert held == [1]
    assert (shared, bench._contexts) == ({}, {})  # no variant's cache stays while another runs


def test_text_beyond_the_trained_length_begins_anew(loaded, monkeypatch):
    monkeypatch.setattr(loaded.model.config, "max_position_embeddings", 50)
    bench = Bench(loaded, FULL, Protocol())
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    expected = sum(
        plain_logprobs(loaded, ids[:, start : start + 50]).sum().item()
        for start in range(0, ids.shape[1] - 1, 49)
    )
    assert bench.rolling(TEXT) == pytest.approx(expected, abs=1e-3)


def test_generated_text_ends_before_the_stop_text(loaded):
    bench = Bench(loaded, FULL, Protocol())
    prompt = SAMPLE.context + question("tiger") + cue("tiger")
    assert bench.generate(prompt, max_new_tokens=9).strip() == "55812."
    assert bench.generate(prompt, max_new_tokens=9, stop=("1", "8")).strip() == "55"
