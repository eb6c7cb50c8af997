"""`-p auto`: the first way of a plan for this prompt in the memory that there is."""

import copy
import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

import kvtool as package
from kvtool.calls.auto_policy import choose_way
from kvtool.documents.memory import DeviceMemory
from kvtool.models.load import load
from kvtool.plain_config import plain_config
from kvtool.planning.bytes import Text
from kvtool.planning.estimate import row_bytes
from kvtool.planning.fit import Run
from kvtool.planning.lost_answers import packaged
from kvtool.planning.variants import FULL_CACHE, Variant
from kvtool.planning.ways import list_ways
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget, bytes_in_words
from kvtool.watcher import Watcher
from tests.engines.serving import needs_serve, serving
from tests.models.published import LLAMA_3 as LLAMA

PROMPT = "The code is 12. " * 320
ASKED = ("--prompt", PROMPT, "-n", "2")


def chosen(done):
    """The words of the option that was chosen, and the note on what follows."""
    lines = {line.partition(": ")[0]: line.partition(": ")[2] for line in done.err.splitlines()}
    words = lines["auto"].partition(" keeps ")[0].split()
    return dict(zip(words[::2], words[1::2], strict=True)), lines


@pytest.fixture(scope="module")
def memory():
    """A memory, as it is typed, that holds a share of what the full cache takes beside weights."""
    document = package.plan(memory="1GiB", context=1700, max_new_tokens=2)
    weights = document.device.weights
    full = next(way for way in document.ways if way.policy == "full").peak_bytes - weights
    return lambda share: f"{weights + int(share * full)}B"


@pytest.mark.parametrize("share", [1.05, 0.6, 0.45, 0.3, 0.2])
def test_what_is_chosen_fits_and_comes_first_in_the_plan(kvtool, memory, share):
    size = memory(share)
    done = kvtool("generate", *ASKED, "-p", "auto", "--memory", size, "-f", "json")
    assert done.code == 0
    options, lines = chosen(done)
    document = json.loads(done.out)
    prompt = document["cache"]["tokens_seen"] - 1
    assert options["-p"] == document["policy"]
    if "-b" in options:
        assert document["budget"] == int(options["-b"]) < prompt
        assert max(document["cache"]["kept_per_layer"]) <= int(options["-b"]) + 2
    assert document["cache"]["kv_bytes"] <= int(size[:-1])
    plan = package.plan(memory=size, context=prompt + 2, max_new_tokens=2)
    fitting = [way for way in plan.ways if way.fits]
    least = min(way.loss.known for way in fitting)
    first = next(way for way in plan.ways if way.policy == options["-p"])
    assert first.loss.known <= least + 0.05
    assert f"lose {first.loss.known:.0%} of the answers (question in the prompt)" in lines["auto"]


def test_a_later_question_is_asked_of_another_policy(kvtool, memory):
    """`pyramidkv` and its like cut by the question, which a later one is not."""
    size = memory(0.3)
    known, later, turns = (
        chosen(kvtool("generate", *ASKED, "-p", "auto", "--memory", size, *more))
        for more in ((), ("--later",), ("--save", "kept.safetensors"))
    )
    assert "(question in the prompt)" in known[1]["auto"]
    assert "(question asked later)" in later[1]["auto"]
    assert turns[0] == later[0]


def test_compress_chooses_for_questions_that_come_later(kvtool, memory):
    size = memory(0.3)
    more = ("--memory", size, "--save", "kept.safetensors")
    done = kvtool("compress", "--prompt", PROMPT, "-p", "auto", *more, "-f", "json")
    options, lines = chosen(done)
    assert "(question asked later)" in lines["auto"]
    assert json.loads(done.out)["policy"] == options["-p"]
    again = kvtool("generate", "--cache", "kept.safetensors", "--prompt", "12?", "-n", "2")
    assert again.code == 0


def test_a_given_way_to_read_is_kept(kvtool, memory):
    size = memory(2)
    more = ("--prefill", "block:64", "--memory", size)
    done = kvtool("generate", *ASKED, "-p", "auto", *more, "--dry-run", "-f", "json")
    assert json.loads(done.out)["prefill"] == "block:64"
    assert json.loads(done.out)["policy"] == chosen(done)[0]["-p"]


def test_python_takes_it_too(memory):
    size = memory(0.3)
    told = []

    class Notes(Watcher):
        def note(self, text):
            told.append(text)

    document = package.generate(
        None, PROMPT, "auto", max_new_tokens=2, device_memory=size, watcher=Notes()
    )
    assert any(text.startswith(f"auto: -p {document.policy}") for text in told)


def test_a_loaded_model_counts_in_a_memory_that_is_named(memory):
    """What is free there is all that is named, so that weights are a part of it."""
    size, told = memory(0.3), []
    loaded = load(None)

    class Notes(Watcher):
        def note(self, text):
            told.append(text)

    for model in (None, loaded):
        asked = {"max_new_tokens": 2, "device_memory": size, "watcher": Notes()}
        package.generate(model, PROMPT, "auto", **asked)
    chosen_ones = [text for text in told if text.startswith("auto: ")]
    assert len(chosen_ones) == 2
    assert chosen_ones[0] == chosen_ones[1]


@pytest.mark.parametrize("words", [("hi",), ("a b",), ("12 12 12",)])
def test_prompts_of_a_few_tokens_keep_all(kvtool, words):
    done = kvtool("generate", "--prompt", *words, "-n", "2", "-p", "auto", "--memory", "1GiB")
    assert (done.code, chosen(done)[0]) == (0, {"-p": "full"})


def test_turns_go_by_no_policy_that_cuts_the_first_alone():
    """KVzip cuts the first turn; what follows is kept whole, which no memory is planned for."""
    run = Run(plain_config(LLAMA), "bfloat16", FULL_CACHE, Text(30_000, 100))
    there = DeviceMemory(device="cpu", free_bytes=17 * 2**30, weights_bytes=16 * 2**30)
    names = {
        turns: choose_way(run, there, Watcher(), later=True, turns=turns)[0].score.name
        for turns in (False, True)
    }
    assert names[False] == "kvzip"
    assert names[True] != "kvzip"


def test_a_model_of_windows_alone_keeps_them():
    config = copy.deepcopy(LLAMA) | {"model_type": "mistral", "sliding_window": 64}
    run = Run(AutoConfig.for_model(**config), "bfloat16", FULL_CACHE, Text(3_000, 100))
    there = DeviceMemory(device="cpu", free_bytes=18 * 2**30, weights_bytes=16 * 2**30)
    found = choose_way(run, there, Watcher(), later=False)
    assert (str(found[0]), found[1]) == ("full", None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-p", "auto", "-b", "64"), "-p auto chooses the budget, too; leave out -b"),
        (("-p", "auto", "--allocator", "uniform"), "leave out --allocator"),
        (("-p", "auto", "--memory", "1MiB"), "-p auto: nothing fits (weights "),
        (("-p", "h2o", "--later"), "--later goes with -p auto"),
        (("-p", "auto", "--compare-full"), "--compare-full holds a full cache, too"),
        (("-p", "auto+int8"), "policy `auto` is not offered"),
    ],
)
def test_refusals(kvtool, words, told):
    done = kvtool("generate", *ASKED, *words)
    assert done.code == 2
    assert told in done.err


@pytest.mark.parametrize("command", ["eval", "plan-budget"])
def test_other_commands_refuse_it(kvtool, command):
    done = kvtool(command, "-p", "auto", "--dry-run")
    assert done.code == 2
    assert "`generate`, `compress` and `serve` choose one for a memory; here name one" in done.err


def test_many_prompts_refuse_it(kvtool, tmp_path):
    (tmp_path / "many.jsonl").write_text('{"prompt": "12"}\n')
    done = kvtool("generate", "--prompts", "many.jsonl", "-p", "auto")
    assert done.code == 2
    assert "-p auto goes with one prompt" in done.err


def test_a_cache_brings_its_own(kvtool):
    assert kvtool("compress", "--prompt", PROMPT, "-p", "h2o", "--save", "a.safetensors").code == 0
    done = kvtool("generate", "--cache", "a.safetensors", "-p", "auto", "--prompt", "12?")
    assert done.code == 2
    assert "--cache goes on by the policy it was made with" in done.err
    done = kvtool("serve", "--cache", "a.safetensors", "-p", "auto", "--dry-run")
    assert (done.code, "--cache goes on by the policy" in done.err) == (2, True)


# ---- conversations, servers and Python


def first_for_turns(ways):
    """The first way of a plan that has no prompt repeated, which later turns are not."""
    return next(way for way in ways if way.fits and not way.policy.startswith("kvzip"))


def test_turns_are_chosen_for_as_later_questions(kvtool, memory, tmp_path):
    (tmp_path / "turns.txt").write_text("12?\n13?\n")
    more = ("--turns", "turns.txt", "--prompt-file", "prompt.txt", "-n", "2", "-f", "json")
    (tmp_path / "prompt.txt").write_text(PROMPT)
    done = kvtool("generate", *more, "-p", "auto", "--memory", memory(0.3))
    assert done.code == 0
    options, lines = chosen(done)
    assert "(question asked later)" in lines["auto"]
    document = json.loads(done.out)
    assert document["policy"] == options["-p"]
    assert len(document["turns"]) == 2


SERVED = ("--longest-prompt", "2000", "-n", "64")


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_server_takes_what_holds_all_rows(kvtool, rows):
    asked = ("--memory", "4MiB", "--rows", rows, *SERVED)
    done = kvtool("serve", "-p", "auto", *asked, "--dry-run", "-f", "json")
    assert done.code == 0
    options, lines = chosen(done)
    plan = package.plan(bytes="4MiB", context=2064, max_new_tokens=64, batch=rows)
    first = first_for_turns(plan.ways)
    assert options["-p"] == first.policy
    assert options.get("-b", str(first.tokens)) == str(first.tokens)
    served = json.loads(done.out)
    assert (served["policy"], served["rows"]) == (first.policy, rows)
    assert (
        f"lose {first.loss.worse:.0%} of the answers (question in the prompt or later)"
        in (lines["auto"])
    )
    assert lines["memory"].startswith(f"4.0 MiB for {rows} x (2,000 + 64) tokens")
    policy = parse_policy(first.policy)
    budget = Budget(tokens=first.tokens) if policy.takes_budget else None
    variant = Variant(policy, budget, served["prefill"])
    assert rows * row_bytes(load(None).model, variant, 2000, 64) <= 4 * 2**20


def test_a_server_has_half_of_what_weights_leave_where_nothing_is_said(kvtool, monkeypatch):
    weights = package.plan(memory="1GiB", context=1700).device.weights
    there = weights + 8 * 2**20
    monkeypatch.setattr("kvtool.models.placement._free_ram", lambda: there)
    done = kvtool("serve", "-p", "auto", "--rows", "3", *SERVED, "--dry-run")
    given = kvtool("serve", "-p", "auto", "--rows", "3", "--memory", "4MiB", *SERVED, "--dry-run")
    assert chosen(done)[1]["auto"] == chosen(given)[1]["auto"]


@needs_serve
def test_a_server_answers_by_it_and_runs_as_many_requests_as_it_has_rows(monkeypatch):
    from kvtool.calls import serve_loaded  # needs uvicorn

    limits = []

    def begin(*given, before=serve_loaded.LiveAnswers, **more):
        limits.append(more["most_sequences"])
        return before(*given, **more)

    monkeypatch.setattr(serve_loaded, "LiveAnswers", begin)
    given = {"longest_prompt": "2000", "max_new_tokens": 64, "memory": "4MiB"}
    with serving(policy="auto", rows=3, **given) as server:
        status, answer = server.ask("/v1/completions", {"prompt": "12 12", "max_tokens": 2})
    first = first_for_turns(
        package.plan(bytes="4MiB", context=2064, max_new_tokens=64, batch=3).ways
    )
    assert (status, limits) == (200, [3])
    assert answer["usage"]["kvtool"]["policy"] == first.policy


def test_weights_that_do_not_fit_leave_a_server_nothing(kvtool, monkeypatch):
    monkeypatch.setattr("kvtool.models.placement._free_ram", lambda: 2**20)
    done = kvtool("serve", "-p", "auto", *SERVED, "--dry-run")
    assert (done.code, "nothing fits (0 B for 1 x " in done.err) == (2, True)


def test_a_server_that_holds_no_row_names_what_is_too_large(kvtool):
    done = kvtool("serve", "-p", "auto", "--memory", "1KiB", *SERVED, "--dry-run")
    assert done.code == 2
    assert done.err.startswith("error: -p auto: nothing fits (1.0 KiB for 1 x (2,000 + 64) tokens)")
    assert "too large are -p " in done.err
    assert "hint: fewer --rows, a shorter --longest-prompt" in done.err


class Notes(Watcher):
    def __init__(self):
        super().__init__()
        self.told = []

    def note(self, text):
        self.told.append(text)


@pytest.mark.parametrize("later", [False, True])
def test_blocks_of_python_take_it(memory, later):
    loaded, notes = load(None), Notes()
    size = memory(0.3)
    with package.compressed(
        loaded.model, "auto", memory=size, longest_prompt=1574, later=later, watcher=notes
    ):
        ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        assert loaded.model.generate(ids, max_new_tokens=2).shape[1] == ids.shape[1] + 2
    run = Run(loaded.model.config, "float32", FULL_CACHE, Text(1574, 128), device="cpu")
    there = DeviceMemory(
        device="cpu",
        free_bytes=int(size[:-1]),
        weights_bytes=loaded.model.get_memory_footprint(),
    )
    own = Notes()
    policy, budget, _ = choose_way(run, there, own, later=later, turns=True)
    assert notes.told == own.told
    assert notes.told[0].startswith(f"auto: -p {policy} -b {budget} keeps ")
    assert notes.told[0].endswith("(question asked later)" if later else "(question in the prompt)")


def test_blocks_of_python_take_bytes_and_the_trained_length():
    loaded, notes = load(None), Notes()
    with package.compressed(loaded.model, "auto", memory=2**30, watcher=notes):
        pass
    assert notes.told[0].startswith("auto: -p full keeps all of 8,064 tokens")
    weights = bytes_in_words(loaded.model.get_memory_footprint())
    assert notes.told[-1].startswith(f"memory: weights {weights}; 1.0 GiB free on cpu")
    free = Notes()
    with package.compressed(loaded.model, "auto", longest_prompt=1000, watcher=free):
        pass
    assert free.told[-1].startswith("memory: weights 0 B; ")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"policy": "auto", "memory": "1MiB"}, "-p auto: nothing fits"),
        ({"policy": "auto", "budget": 64}, "chooses the budget, too"),
        ({"policy": "auto", "longest_prompt": 0}, "longest_prompt must be 1 or more"),
        ({"policy": "auto", "memory": "64"}, "memory is a number of bytes"),
        ({"policy": "h2o", "budget": 64, "memory": "1GiB"}, "go with the policy auto"),
        ({"policy": "h2o", "budget": 64, "later": True}, "go with the policy auto"),
    ],
)
def test_refusals_of_python(given, told):
    model = load(None).model
    with pytest.raises(package.UsageError) as error, package.compressed(model, **given):
        pass
    assert told in str(error.value)


# ---- blocks that are smaller than the usual ones


@pytest.mark.parametrize(
    ("free", "name", "block"), [(0.3, "expected+int4", 512), (0.6, "kvzip+int4", 256)]
)
def test_smaller_blocks_are_tried_where_the_usual_ones_do_not_fit(free, name, block):
    weights, there = {None: 16 * 2**30}, int((16 + free) * 2**30)
    run = Run(plain_config(LLAMA), "bfloat16", FULL_CACHE, Text(30_000, 100), weights, there)
    ways = list_ways(run, packaged(), lambda *spelled: spelled[2], "later")
    way = next(way for way in ways if way.policy == name)
    assert (way.fits, way.block, way.command) == (True, block, f"block:{block}")
    policy = parse_policy(name)
    small = run.of(policy, way.tokens, f"block:{block}").needs()
    assert small.fits
    assert small.total == way.peak_bytes
    assert not run.of(policy, policy.min_budget, "block").needs().fits
    assert all(way.block is None for way in ways if way.policy == "keydiff+int4")
    given = list_ways(replace(run, prefill="block:2048"), packaged(), lambda *_: "", "later")
    assert all(way.block is None for way in given)


def test_the_block_that_fits_is_the_one_that_runs():
    run = Run(plain_config(LLAMA), "bfloat16", FULL_CACHE, Text(30_000, 100))
    there = DeviceMemory(device="cuda", free_bytes=int(16.3 * 2**30), weights_bytes=16 * 2**30)
    for given in (None, "block"):
        asked = {"later": True, "prefill": given}
        policy, budget, prefill = choose_way(run, there, Watcher(), **asked)
        assert (str(policy), prefill) == ("expected+int4", "block:512")
        needs = replace(run.of(policy, budget.tokens, prefill), weights={None: 16 * 2**30}).needs()
        assert needs.total <= there.free_bytes


# ---- each way in


def test_the_environment_and_recipes_may_say_it(kvtool, memory, monkeypatch, tmp_path):
    size = memory(0.3)
    options, lines = chosen(kvtool("generate", *ASKED, "-p", "auto", "--memory", size))
    (tmp_path / "recipe.yaml").write_text("kind: recipe\npolicy: auto\n")
    (tmp_path / "other.yaml").write_text("kind: recipe\nseed: 3\n")
    for words in (
        ("recipe.yaml",),
        ("-s", "policy=auto"),
        ("other.yaml", "-p", "AUTO"),
        ("recipe.yaml", "--show", "kept.html"),
    ):
        done = kvtool("generate", *words, *ASKED, "--memory", size)
        assert (done.code, chosen(done)[1]["auto"]) == (0, lines["auto"])
    assert str(options["-p"]) in (tmp_path / "kept.html").read_text()
    later = kvtool("generate", "recipe.yaml", *ASKED, "--memory", size, "--later")
    assert "(question asked later)" in chosen(later)[1]["auto"]
    monkeypatch.setenv("KVTOOL_POLICY", "auto")
    assert chosen(kvtool("generate", *ASKED, "--memory", size))[1]["auto"] == lines["auto"]
    monkeypatch.setenv("KVTOOL_BUDGET", "64")  # of other policies
    assert chosen(kvtool("generate", *ASKED, "--memory", size))[1]["auto"] == lines["auto"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("generate", "recipe.yaml", *ASKED, "-b", "64"), "chooses the budget, too; leave out -b"),
        (("generate", "recipe.yaml", *ASKED, "--compare-full"), "--compare-full holds a full"),
        (("generate", *ASKED, "-p", "auto,h2o", "--show", "a.html"), "here name one"),
        (("eval", "recipe.yaml", "--tasks", "niah", "--dry-run"), "here name one"),
    ],
)
def test_what_recipes_say_is_checked_too(kvtool, tmp_path, words, told):
    (tmp_path / "recipe.yaml").write_text("kind: recipe\npolicy: auto\n")
    done = kvtool(*words)
    assert (done.code, told in done.err) == (2, True)


def test_a_plan_and_modifiers_are_refused_beside_it(kvtool, tmp_path):
    made = ("plan-budget", "-b", "64", "--context", "500", "-p", "snapkv", "-o", "plan.yaml")
    assert kvtool(*made).code == 0
    done = kvtool("generate", "plan.yaml", *ASKED, "-p", "auto")
    assert (done.code, "chooses the budget, too; leave out a plan" in done.err) == (2, True)
    (tmp_path / "recipe.yaml").write_text("kind: recipe\npolicy: auto\nmodifiers: [int8]\n")
    done = kvtool("generate", "recipe.yaml", *ASKED)
    assert (done.code, "here name one" in done.err) == (2, True)


# ---- without weights


@pytest.fixture
def folder(tmp_path):
    """A folder that has the configuration of Llama-3.1-8B, and nothing else."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    return "llama"


def test_a_configuration_is_enough_for_a_dry_run(kvtool, folder):
    prompt = "The code is 12. " * 8000
    words = ("-m", folder, "-p", "auto", "--memory", "18GiB", "--prompt", prompt, "--dry-run")
    done = kvtool("generate", *words, "-f", "json")
    assert done.code == 0
    options, lines = chosen(done)
    assert lines["prompt"] == "4 characters count as a token; no tokenizer is here"
    plan = package.plan(model=folder, memory="18GiB", context=32_001 + 128, max_new_tokens=128)
    fitting = [way for way in plan.ways if way.fits]
    first = next(way for way in fitting if way.policy == options["-p"])
    assert first.loss.known <= min(way.loss.known for way in fitting) + 0.05
    assert f"of 32,001 tokens in {bytes_in_words(first.bytes)}" in lines["auto"]
    assert json.loads(done.out)["policy"] == first.policy


def test_what_counts_tokens_exactly_needs_a_tokenizer(kvtool, folder, tmp_path):
    (tmp_path / "turns.txt").write_text("12?\n13?\n")
    asked = ("-m", folder, "--memory", "18GiB", "--prompt-file", "turns.txt")
    for words in (("-p", "auto"), ("-p", "h2o", "-b", "auto", "--dry-run")):
        done = kvtool("generate", *asked, *words)
        assert (done.code, "has no weights" in done.err) == (2, True)
    done = kvtool("generate", *asked[:-2], "-p", "auto", "--turns", "turns.txt", "--dry-run")
    assert (done.code, "has no weights" in done.err) == (2, True)


def test_a_configuration_is_enough_for_the_dry_run_of_a_server(kvtool, folder):
    asked = ("--memory", "2GiB", "--rows", "4", "--longest-prompt", "16K", "-n", "64")
    done = kvtool("serve", "-m", folder, "-p", "auto", *asked, "--dry-run", "-f", "json")
    assert done.code == 0
    plan = package.plan(model=folder, bytes="2GiB", context=16_384 + 64, max_new_tokens=64, batch=4)
    first = first_for_turns(plan.ways)
    assert chosen(done)[0]["-p"] == first.policy == json.loads(done.out)["policy"]
