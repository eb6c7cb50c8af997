"""What the answers to many prompts depend on: every setting, and every other input."""

from __future__ import annotations

import dataclasses

from kvtool.calls.answering import ELSEWHERE, settings_digest, shared_fingerprint
from kvtool.calls.request import Request
from kvtool.calls.settings import GenerationSettings
from kvtool.evaluation.run import fingerprint
from kvtool.models.load import load
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget

REQUEST = Request(None, "a list", parse_policy("h2o"), Budget.parse(24), "full")
OTHER_REQUESTS = {
    "prompt": "another",
    "source": "another",
    "policy": parse_policy("h2o+caote"),
    "budget": Budget.parse(25),
    "prefill": "block:16",
    "answer_prefix": "The code is",
}


def test_every_setting_counts_but_those_that_count_elsewhere():
    settings = GenerationSettings()
    before = settings_digest(settings, REQUEST)
    counted = {
        each.name
        for each in dataclasses.fields(settings)
        if settings_digest(dataclasses.replace(settings, **{each.name: "another"}), REQUEST)
        != before
    }
    assert counted == {each.name for each in dataclasses.fields(settings)} - ELSEWHERE


def test_a_setting_that_is_added_counts():
    added = dataclasses.make_dataclass(
        "Added", [("top_p", float, 1.0)], bases=(GenerationSettings,), frozen=True, kw_only=True
    )
    assert settings_digest(added(), REQUEST) != settings_digest(added(top_p=0.5), REQUEST)
    assert {each.name for each in dataclasses.fields(GenerationSettings)} >= ELSEWHERE


def test_every_part_of_a_request_counts_but_its_prompt():
    names = {each.name for each in dataclasses.fields(Request)}
    assert names == {*OTHER_REQUESTS, "plan"}  # tests/cli/test_many_prompts.py edits a plan
    before = settings_digest(GenerationSettings(), REQUEST)
    counted = {
        name
        for name, value in OTHER_REQUESTS.items()
        if settings_digest(GenerationSettings(), dataclasses.replace(REQUEST, **{name: value}))
        != before
    }
    assert counted == names - {"prompt", "source", "plan"}


def test_one_weight_the_tokenizer_and_the_code_count(monkeypatch):
    settings = GenerationSettings()
    loaded = load()
    before = shared_fingerprint(settings, REQUEST, loaded)
    assert shared_fingerprint(settings, REQUEST, load()) == before
    monkeypatch.setattr(fingerprint, "package_hash", lambda: "edited")
    edited = shared_fingerprint(settings, REQUEST, loaded)
    assert {name for name in before if before[name] != edited[name]} == {"package"}
    monkeypatch.undo()
    next(loaded.model.parameters()).data[-1, -1] += 1
    edited = shared_fingerprint(settings, REQUEST, loaded)
    assert {name for name in before if before[name] != edited[name]} == {"model"}


def test_the_package_is_hashed_file_by_file(tmp_path, monkeypatch):
    from kvtool import package_data

    monkeypatch.setattr(package_data, "_PACKAGE", tmp_path)
    whole = package_data.package_hash.__wrapped__
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.yaml").write_text("")
    found = [whole()]
    (tmp_path / "weights.safetensors").write_text("x")
    assert whole() == found[0]
    for name, text in (("a.py", "2"), ("b.yaml", "2"), ("c.json", "")):
        (tmp_path / name).write_text(text)
        found.append(whole())
    assert len(set(found)) == 4
