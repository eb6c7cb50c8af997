"""`-p auto`: the first way of a plan for this prompt in the memory that there is."""

import copy
import json

import pytest
from transformers import AutoConfig

import kvtool as package
from kvtool.calls.auto_policy import choose_way
from kvtool.calls.settings import GenerationSettings
from kvtool.documents.memory import DeviceMemory
from kvtool.models.load import load
from kvtool.plain_config import plain_config
from kvtool.planning.bytes import Text
from kvtool.planning.fit import Run
from kvtool.planning.variants import FULL_CACHE
from kvtool.watcher import Watcher
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
    settings = GenerationSettings(policy="auto")
    names = {
        turns: choose_way(settings, run, there, "later", Watcher(), turns=turns)[0].score.name
        for turns in (False, True)
    }
    assert names[False] == "kvzip"
    assert names[True] != "kvzip"


def test_a_model_of_windows_alone_keeps_them():
    config = copy.deepcopy(LLAMA) | {"model_type": "mistral", "sliding_window": 64}
    run = Run(AutoConfig.for_model(**config), "bfloat16", FULL_CACHE, Text(3_000, 100))
    there = DeviceMemory(device="cpu", free_bytes=18 * 2**30, weights_bytes=16 * 2**30)
    found = choose_way(GenerationSettings(policy="auto"), run, there, "known", Watcher())
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


@pytest.mark.parametrize("command", ["eval", "serve"])
def test_other_commands_refuse_it(kvtool, command):
    done = kvtool(command, "-p", "auto", "--dry-run")
    assert done.code == 2
    assert "`generate` and `compress` choose one" in done.err or "goes with one prompt" in done.err


def test_many_prompts_refuse_it(kvtool, tmp_path):
    (tmp_path / "many.jsonl").write_text('{"prompt": "12"}\n')
    done = kvtool("generate", "--prompts", "many.jsonl", "-p", "auto")
    assert done.code == 2
    assert "-p auto goes with one prompt" in done.err


def test_a_cache_brings_its_own(kvtool):
    assert kvtool("compress", "--prompt", PROMPT, "-p", "h2o", "--save", "a.safetensors").code == 0
    done = kvtool("generate", "--cache", "a.safetensors", "-p", "auto", "--prompt", "12?")
    assert done.code == 2
    assert "policy `auto` is not offered" in done.err
