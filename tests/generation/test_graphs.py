"""Steps recorded once and replayed: the answers, caches and files of eager steps."""

import logging
import threading

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, generate, graphs, prefill
from kvtool.generation.graphs import StaticDecoding
from kvtool.models.load import load
from tests import tape
from tests.models_for_tests import family_model, peaky_model, random_ids

POLICIES = ["h2o+caote", "full", "snapkv(window=4)", "rocketkv", "h2o+int8", "adakv(window=4)"]


@pytest.fixture
def recordings(monkeypatch):
    """What is recorded, on a CPU."""
    made = []
    monkeypatch.setattr(graphs, "recorder", tape.recorder(made))
    monkeypatch.setattr(graphs, "_told", set())
    monkeypatch.setattr(graphs, "_refused", set())
    return made


@pytest.fixture(scope="module")
def loaded():
    found = load()
    kvtool.attach(found.model)
    return found


def filled(model, policy, batch=2):
    cache = kvtool.build_cache(model, policy, None if policy == "full" else 20)
    prefill(model, cache, random_ids(60, batch=batch))
    return cache


def small():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=1, head_dim=32))


def check_same(cache, other):
    layers = range(len(cache.slot_layers))
    assert all(torch.equal(cache.kept_positions(i), other.kept_positions(i)) for i in layers)


@pytest.mark.parametrize("policy", POLICIES)
def test_fifty_steps_find_everything_where_the_first_ones_left_it(recordings, policy):
    """One recording serves them all: no host number is in it, no tensor takes another's place."""
    model = small()
    eager, static = filled(model, policy), filled(model, policy)
    steps = StaticDecoding(model, 64)
    for i in range(50):
        token = torch.tensor([i + 2, i + 3])
        found, expected = steps(model, static, token), decode_step(model, eager, token)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    check_same(eager, static)
    report = steps.steps
    assert report.replayed_steps == 50 - report.eager_steps >= 48
    assert [each.replays for each in recordings] == [report.replayed_steps]


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "deepseek_v3", "falcon_h1", "falcon"])
def test_families_are_recorded(recordings, name):
    model = kvtool.attach(family_model(name))
    eager, static = filled(model, "snapkv(window=4)"), filled(model, "snapkv(window=4)")
    steps = StaticDecoding(model, 64)
    for i in range(6):
        token = torch.tensor([i + 2, i + 3])
        found, expected = steps(model, static, token), decode_step(model, eager, token)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert steps.steps.replayed_steps >= 4


def answer(loaded, policy="h2o", ids=None, **options):
    """Everything that a user sees of a run, and the cache."""
    cache = kvtool.build_cache(loaded.model, policy, None if policy == "full" else 24)
    text = "The old lamp was near the school. The cat sat on the mat. The old lamp was"
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"] if ids is None else ids
    shown = []
    if len(ids) == 1:
        options["on_text"] = shown.append
    options = {"max_new_tokens": 24} | options
    found = generate(loaded.model, loaded.tokenizer, cache, ids, **options)
    return found, "".join(shown), cache


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 5},
        {"stop": ("the",), "min_new_tokens": 2},
        {"min_new_tokens": 9},
        {"compare_full": True, "max_new_tokens": 6},
        {"policy": "full"},
    ],
    ids=str,
)
def test_answers_are_those_without_recordings(loaded, recordings, options):
    expected, told, _ = answer(loaded, graphs=False, **options)
    found, shown, cache = answer(loaded, **options)
    assert (found.token_ids, found.text, shown) == (expected.token_ids, expected.text, told)
    assert recordings
    assert torch.equal(found.input_ids, expected.input_ids)
    if expected.fidelity is not None:
        assert found.fidelity == expected.fidelity
    report = found.steps
    assert report.eager_steps + report.replayed_steps >= found.new_tokens - 1
    assert cache.tokens_seen()[0] in (found.input_ids.shape[1] - 1, found.input_ids.shape[1])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("repetition_penalty", 2.0), ("no_repeat_ngram_size", 2), ("top_k", 2)],
)
def test_settings_that_look_at_the_text_are_followed(
    loaded, recordings, monkeypatch, setting, value
):
    monkeypatch.setattr(loaded.model.generation_config, setting, value)
    options = {"temperature": 0.7, "seed": 3}
    expected, *_ = answer(loaded, graphs=False, **options)
    found, *_ = answer(loaded, **options)
    assert found.token_ids == expected.token_ids
    drawn = any("exponential" in name for each in recordings for name in each.operations)
    assert drawn == (setting == "top_k")  # in the recording, where nothing looks at the text


def test_rows_of_a_batch_end_where_they_do_alone(loaded, recordings):
    texts = ["The old lamp was near the school. The", "The cat sat on the old mat near. The"]
    rows = [loaded.tokenizer(text, return_tensors="pt")["input_ids"][:, :8] for text in texts]
    for options in ({}, {"stop": ("the", "was")}):
        expected = [answer(loaded, ids=ids, graphs=False, **options)[0] for ids in rows]
        found, *_ = answer(loaded, ids=torch.cat(rows), **options)
        for own, alone in zip(found.token_ids, expected, strict=True):
            assert own[: len(alone.token_ids[0])] == alone.token_ids[0]


@pytest.mark.parametrize("policy", ["h2o", "full"])
def test_a_text_that_ends_by_itself_goes_on_as_without_recordings(loaded, recordings, policy):
    """Its last token has been fed by then; what comes next is the same."""
    whole, *_ = answer(loaded, policy, graphs=False)
    stop = (loaded.tokenizer.decode(whole.token_ids[0][8:11]),)
    plain, _, before = answer(loaded, policy, graphs=False, stop=stop)
    found, _, cache = answer(loaded, policy, stop=stop)
    assert cache.tokens_seen()[0] == before.tokens_seen()[0] + 1 == found.input_ids.shape[1]
    assert torch.equal(cache.input_ids, before.input_ids)
    going = {"max_new_tokens": 6, "graphs": False}
    model, tokenizer = loaded.model, loaded.tokenizer
    expected = generate(model, tokenizer, before, None, **going)
    assert generate(model, tokenizer, cache, None, **going).token_ids == expected.token_ids
    assert plain.token_ids == found.token_ids


def test_a_run_of_known_length_leaves_the_cache_of_eager_steps(loaded, recordings, tmp_path):
    for name, graphs_too in (("eager", False), ("replayed", True)):
        found, _, cache = answer(loaded, graphs=graphs_too, min_new_tokens=24)
        assert cache.tokens_seen()[0] == found.input_ids.shape[1] - 1
        kvtool.save_cache(cache, tmp_path / name, model=loaded.model)
    assert (tmp_path / "eager").read_bytes() == (tmp_path / "replayed").read_bytes()


class Refusing(tape.TapeRecording):
    """A device that cannot record, or has no memory left to do so."""

    error: type[Exception] = RuntimeError

    def record(self, run, generators):
        super().record(run, generators)
        raise self.error("operation not permitted when stream is capturing")


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_what_cannot_be_recorded_runs_as_it_is_and_says_so_once(
    recordings, monkeypatch, caplog, error
):
    monkeypatch.setattr(graphs, "recorder", lambda model: Refusing)
    monkeypatch.setattr(Refusing, "error", error)
    model = small()
    for _ in range(2):
        eager, static = filled(model, "h2o"), filled(model, "h2o")
        steps = StaticDecoding(model, 64)
        with caplog.at_level(logging.WARNING):
            for i in range(6):
                token = torch.tensor([i + 2, i + 3])
                assert torch.equal(steps(model, static, token), decode_step(model, eager, token))
        check_same(eager, static)
        assert steps.steps.eager_steps == 6
    (line,) = [each.getMessage() for each in caplog.records if "CUDA graph" in each.getMessage()]
    assert "`h2o` on `llama`" in line
    assert "not permitted when stream is capturing" in line


def test_samples_go_on_where_recording_has_failed(loaded, recordings, monkeypatch):
    options = {"temperature": 0.9, "seed": 5}
    expected, *_ = answer(loaded, graphs=False, **options)
    monkeypatch.setattr(graphs, "recorder", lambda model: Refusing)
    found, *_ = answer(loaded, **options)
    assert (found.token_ids, found.steps) == (expected.token_ids, None)


def test_a_step_that_asks_the_host_cannot_be_recorded(recordings, caplog):
    """Which the stand-in for a device refuses, as a device does."""

    class Asking:
        token, generators = torch.tensor([2, 3]), []

        def __call__(self, logits):
            assert logits.max().item() > -1

    model, draw = small(), Asking()
    cache, steps = filled(model, "h2o"), StaticDecoding(model, 64)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            steps.feed(cache, draw.token, draw)
    assert "no CUDA graph could be recorded" in caplog.text
    assert cache.tokens_seen() == [64, 64]


class Interrupted(tape.TapeRecording):
    def replay(self):
        raise KeyboardInterrupt


def test_an_interrupted_replay_leaves_a_cache_that_says_so(recordings, monkeypatch):
    monkeypatch.setattr(graphs, "recorder", lambda model: Interrupted)
    model = small()
    cache, steps = filled(model, "h2o"), StaticDecoding(model, 64)
    for _ in range(2):
        steps(model, cache, torch.tensor([2, 3]))
    with pytest.raises(KeyboardInterrupt):
        steps(model, cache, torch.tensor([2, 3]))
    with pytest.raises(kvtool.KvtoolError, match="interrupted"):
        steps(model, cache, torch.tensor([2, 3]))


@pytest.mark.parametrize("policy", ["h2o", "full", "rocketkv"])
def test_going_back_copies_and_new_turns_are_seen(recordings, policy):
    """A recording is of tensors in their places: where these change, another is made."""
    model, token = small(), torch.tensor([2, 3])
    cache, steps = filled(model, policy), StaticDecoding(model, 64)
    for _ in range(4):
        steps(model, cache, token)
    other = cache.copy()
    with cache.rollback():
        inside = [steps(model, cache, token) for _ in range(4)]
    after = [steps(model, cache, token) for _ in range(4)]
    torch.testing.assert_close(after, inside)
    expected = [decode_step(model, other, token) for _ in range(4)]
    torch.testing.assert_close(after, expected)
    check_same(cache, other)
    more = random_ids(30, seed=3, batch=2)
    torch.testing.assert_close(prefill(model, cache, more), prefill(model, other, more))
    for _ in range(4):
        found, plain = steps(model, cache, token), decode_step(model, other, token)
        torch.testing.assert_close(found, plain)
    assert len(recordings) >= 3


def test_steps_outside_and_inside_take_turns(recordings):
    model, token = small(), torch.tensor([2, 3])
    eager, mixed = filled(model, "full"), filled(model, "full")
    steps = StaticDecoding(model, 9)
    for i in range(24):  # in which the room is used up twice
        take = decode_step if i % 5 == 4 else steps
        found, expected = take(model, mixed, token), decode_step(model, eager, token)
        torch.testing.assert_close(found, expected)
    check_same(eager, mixed)


def test_two_answers_at_once_keep_to_their_own(loaded, recordings):
    """One model, a cache and recordings for each thread."""
    expected, found = {}, {}

    def run(seed, into=found, graphs=True):
        into[seed] = answer(loaded, graphs=graphs, temperature=0.9, seed=seed)[0].token_ids

    for seed in (1, 2):
        run(seed, expected, graphs=False)
    threads = [threading.Thread(target=run, args=(seed,)) for seed in expected]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == expected


def test_a_cpu_records_nothing(loaded):
    found, *_ = answer(loaded)
    assert found.steps is None
    assert not StaticDecoding(loaded.model, 64).replays
