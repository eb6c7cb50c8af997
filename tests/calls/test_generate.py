"""Generation from Python in one call: the command with the same settings, on whose model, how."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kvtool
from kvtool.documents.plan import PlanDocument
from tests.calls.conftest import timeless

TEXT = "The old lamp was near the school. The quiet falcon was behind the tower. " * 4
QUESTION = "Where was the falcon? It was"
SHORT = {"max_new_tokens": 6}
N = ("-n", "6")


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"policy": "tova", "budget": 0.25}, ["-p", "tova", "-b", "25%"]),
        ({"temperature": 0.9, "seed": 3}, ["--temperature", "0.9", "--seed", "3"]),
        (
            {"policy": "h2o", "budget": "96KiB", "allocator": "pyramid", "prefill": "block:16"},
            ["-p", "h2o", "-b", "96KiB", "--allocator", "pyramid", "--prefill", "block:16"],
        ),
        (
            {"policy": "streaming", "budget": 24, "compare_full": True, "stop": "the"},
            ["-p", "streaming", "-b", "24", "--compare-full", "--stop", "the"],
        ),
    ],
    ids=str,
)
def test_a_call_is_the_command_with_the_same_settings(command, settings, flags):
    document = kvtool.generate(None, TEXT, **settings, **SHORT)
    assert timeless(document) == timeless(command("generate", "--prompt", TEXT, *flags, *N))


def test_without_a_prompt_it_is_the_built_in_one(command):
    assert timeless(kvtool.generate()) == timeless(command("generate"))


def test_a_file_comes_before_its_question(command):
    Path("book.txt").write_text(f"{TEXT}\n")
    document = kvtool.generate(None, QUESTION, prompt_file="book.txt", **SHORT)
    flags = ["--prompt", QUESTION, "--prompt-file", "book.txt"]
    assert timeless(document) == timeless(command("generate", *flags, *N))
    assert timeless(document) == timeless(kvtool.generate(None, f"{TEXT}\n\n{QUESTION}", **SHORT))


def test_a_plan_and_a_recipe_say_what_no_argument_says(command):
    plan = kvtool.plan(None, tokens=40, context=256, allocator="pyramid")
    Path("plan.json").write_text(plan.to_json())
    expected = command("generate", "plan.json", "-p", "h2o", "--prompt", TEXT, *N)
    for given in (plan, plan.to_data(), Path("plan.json")):
        document = kvtool.generate(None, TEXT, "h2o", plan=given, **SHORT)
        assert timeless(document) == timeless(expected)
    assert document.plan is not None
    recipe = {"kind": "recipe", "schema_version": 1, "policy": "tova", "budget": 24}
    document = kvtool.generate(None, TEXT, plan=recipe, **SHORT)
    assert (document.policy, document.budget) == ("tova", 24)
    with pytest.raises(kvtool.UsageError, match="exclude each other"):
        kvtool.generate(None, TEXT, "h2o", 32, plan=plan)
    assert isinstance(plan, PlanDocument)


def test_turns_are_a_file_or_a_list(command):
    turns = ["The lamp is old.", {"user": "And the school?"}, {"role": "user", "content": "Why?"}]
    lines = [json.dumps(turn) for turn in turns]
    Path("talk.jsonl").write_text("\n".join(lines))
    flags = ["--turns", "talk.jsonl", "-p", "snapkv", "-b", "48", "--seed", "2"]
    expected = command("generate", *flags, "--temperature", "0.8", *N)
    settings = {"policy": "snapkv", "budget": 48, "seed": 2, "temperature": 0.8, **SHORT}
    for given in ("talk.jsonl", turns):
        pieces = []
        document = kvtool.generate(turns=given, on_text=pieces.append, **settings)
        assert timeless(document) == timeless(expected)
        assert "".join(pieces) == f"{document.text}\n"
        assert len(pieces) > 4  # as they are generated
    assert len(document.turns) == 3


def test_a_loaded_model_runs_afterwards_what_it_ran_before(loaded):
    model, tokenizer = loaded.model, loaded.tokenizer
    expected = timeless(kvtool.generate(None, TEXT, "h2o", 32, **SHORT))
    for attached in (False, True):
        if attached:
            kvtool.attach(model)
        before = model.config._attn_implementation
        document = kvtool.generate(model, TEXT, "h2o", 32, tokenizer=tokenizer, **SHORT)
        assert model.config._attn_implementation == before
        assert timeless(document) == expected
        with pytest.raises(kvtool.UsageError, match="needs its tokenizer"):
            kvtool.generate(model, TEXT, "h2o", 32)
        with pytest.raises(kvtool.UsageError, match="not above"):
            kvtool.generate(loaded, "The old lamp", "snapkv", 0.5)
        assert model.config._attn_implementation == before


def test_threads_share_a_model(loaded):
    """One that ends early takes the attention away from no other."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Event

    model, before = loaded.model, loaded.model.config._attn_implementation
    begun, ended = Event(), Event()

    def wait(piece):
        begun.set()
        assert ended.wait(60)

    def second():
        assert begun.wait(60)
        document = kvtool.generate(loaded, TEXT, "h2o", 32, **SHORT)
        ended.set()
        return document

    with ThreadPoolExecutor() as pool:
        later = pool.submit(second)
        first = kvtool.generate(loaded, TEXT, "h2o", 32, on_text=wait, **SHORT)
    assert timeless(first) == timeless(later.result())
    assert model.config._attn_implementation == before


def test_calls_go_on_inside_a_block_that_compresses_others(loaded):
    alone = kvtool.generate(loaded, TEXT, "h2o", 32, **SHORT)
    ids = loaded.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with kvtool.compressed(loaded.model, "streaming", budget=24):
        plain = loaded.model.generate(ids, max_new_tokens=4, do_sample=False)
        inside = kvtool.generate(loaded, TEXT, "h2o", 32, **SHORT)
        again = loaded.model.generate(ids, max_new_tokens=4, do_sample=False)
    assert timeless(inside) == timeless(alone)
    assert torch.equal(plain, again)


def test_a_saved_cache_is_that_of_the_command(command):
    flags = ["-p", "h2o+caote", "-b", "32", "--prompt", TEXT, *N]
    command("generate", *flags, "--save", "command.safetensors")
    kvtool.generate(None, TEXT, "h2o+caote", 32, save="call.safetensors", **SHORT)
    call, command_ = load_file("call.safetensors"), load_file("command.safetensors")
    assert call.keys() == command_.keys() != set()
    assert all(torch.equal(call[name], command_[name]) for name in call)


def test_a_policy_that_no_string_spells_stays_what_it_is(loaded):
    from dataclasses import replace

    reader = kvtool.parse_policy("quest(k=16)").reader
    policy = replace(kvtool.parse_policy("snapkv"), read=reader)
    with pytest.raises(kvtool.UsageError, match="cannot modify"):
        kvtool.parse_policy(str(policy))
    document = kvtool.generate(loaded, TEXT, policy, 48, **SHORT)
    assert document.policy == str(policy)
    recipe = {"kind": "recipe", "schema_version": 1, "budget": 48}
    again = kvtool.generate(loaded, TEXT, policy, plan=recipe, **SHORT)
    assert timeless(again) == timeless(document)


def test_what_happens_is_told_to_the_watcher(listening):
    kvtool.generate(None, TEXT, "h2o", 8, watcher=listening, **SHORT)
    assert listening.told == [
        "note: 8 tokens are a handful; what comes of so few makes little sense",
        "model: reference (bundled; choose another with --model)",
    ]
