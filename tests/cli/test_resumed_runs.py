"""A run goes on from its folder only if all that its answers depend on is as it was."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from kvtool.documents.settings import Protocol
from kvtool.evaluation.run import fingerprint
from kvtool.evaluation.run.runner import Place
from kvtool.evaluation.tasks.niah import Needle
from kvtool.planning.variants import Variant
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget
from tests.cli.test_outside_policies import SCORE

RUN = ("-t", "niah", "--lengths", "96", "--depths", "1", "--no-plots", "-f", "json")
RUN += ("--no-baseline",)
OWN = ("-p", "my_resumed:MyScore", "-b", "32")


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "my_resumed.py"
    path.write_text(SCORE.replace('print("said while imported")', ""))
    sys.modules.pop("my_resumed", None)
    yield path
    sys.modules.pop("my_resumed", None)


def edit(module: Path) -> None:
    text = module.read_text()
    module.write_text(
        text.replace('return state["attention_sum"]', 'return -state["attention_sum"]')
    )
    sys.modules.pop("my_resumed", None)


def files(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_an_edited_policy_is_refused_and_overwritten(kvtool, module):
    run = ("eval", *RUN, *OWN, "-o", "run")
    assert kvtool(*run).code == 0
    assert "resumed 1/1 in run" in kvtool(*run).err
    before = files("run")
    edit(module)
    done = kvtool(*run)
    assert done.code == 2
    assert done.out == ""
    assert "error: `run` holds an answer of `my_resumed:MyScore@32` to sample" in done.err
    assert "was given by other code of the policy" in done.err
    assert "hint: --overwrite answers anew, another --output keeps what is there" in done.err
    assert files("run") == before
    assert kvtool("eval", "--rescore", "run", "-p", OWN[1], "--no-plots").code == 0
    assert "resumed" not in kvtool(*run, "--overwrite").err


@pytest.mark.exhaustive
def test_an_edited_policy_begins_a_new_folder_where_none_is_named(kvtool, module):
    run = ("eval", *RUN, *OWN)
    assert kvtool(*run).code == 0
    assert "resumed 1/1" in kvtool(*run).err
    (first,) = Path("runs").iterdir()
    before = files(str(first))
    edit(module)
    done = kvtool(*run)
    assert done.code == 0
    assert "resumed" not in done.err
    assert f"{first} holds another run; this one is in {first}_2" in done.err
    kept = files(str(first))
    assert {name: kept[name] for name in before} == before
    assert "resumed 1/1 in" in kvtool(*run).err
    other = kvtool("eval", *RUN, "-p", "h2o", "-b", "32")
    assert f"this one is in {first}_3" in other.err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (("--dtype", "bfloat16"), "is another model's"),
        (("--query-agnostic",), "under other settings"),
        (("--seed", "1"), "is one to another prompt"),
    ],
)
@pytest.mark.few(2)
def test_other_settings_in_a_named_folder_are_refused(kvtool, changes, told):
    run = ("eval", *RUN, "-p", "h2o", "-b", "32", "-o", "run")
    assert kvtool(*run).code == 0
    before = files("run")
    done = kvtool(*run, *changes)
    assert (done.code, files("run")) == (2, before)
    assert told in done.err


@pytest.mark.exhaustive
def test_an_edited_package_and_other_data_are_refused(kvtool, monkeypatch):
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in (1, 2)]

    def write() -> None:
        Path("test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    write()
    settings = ("--samples", "1", "-s", "eval.tasks.0.max_new_tokens=2", "--no-plots", "-o", "run")
    run = ("eval", "-t", "gsm8k", "--data", "gsm8k=test.jsonl", "-p", "full", *settings)
    assert kvtool(*run).code == 0
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "package_hash", lambda: "edited")
        done = kvtool(*run)
    assert done.code == 2
    assert "was given by another kvtool: its version or its code has changed" in done.err
    rows.append({"question": "What is 3 + 3?", "answer": "#### 6"})
    write()
    assert "resumed 2/3" in kvtool(*run).err
    rows[1]["question"] = "What is 4 - 2?"
    write()
    done = kvtool(*run)
    assert done.code == 2
    assert "is one to another prompt" in done.err


def test_records_of_an_earlier_kvtool_go_on_and_it_is_said(kvtool):
    run = ("eval", *RUN, "-p", "h2o", "-b", "32", "-o", "run")
    assert kvtool(*run).code == 0
    (path,) = Path("run/samples").rglob("*.jsonl")
    record = json.loads(path.read_text())
    del record["fingerprint"]
    path.write_text(json.dumps(record) + "\n")
    done = kvtool(*run)
    assert done.code == 0
    assert "resumed 1/1" in done.err
    assert "1 answers in run are an earlier kvtool's and do not say by what code" in done.err


TASK = Needle(name="niah", lengths="96", depths="1")
VARIANT = Variant(parse_policy("h2o"), Budget.parse(32))
OTHERS = {  # another value of each, where a text will not do
    Variant: {"policy": parse_policy("tova"), "budget": Budget.parse(33), "prefill": "block:16"},
    Protocol: {"stop": ("a",), "temperature": 0.5, "seed": 1},
}


@pytest.mark.parametrize("name", [each.name for each in fields(Protocol)])
def test_every_setting_of_the_protocol_counts_but_the_size_of_a_batch(name):
    place = Place({}, Protocol())
    value = OTHERS[Protocol].get(name, "another")
    other = replace(place, protocol=replace(place.protocol, **{name: value}))
    found = [each.shared_fingerprint(VARIANT, TASK)["settings"] for each in (place, other)]
    assert (found[0] == found[1]) == (name == "batch")


@pytest.mark.parametrize("name", [each.name for each in fields(Variant)])
def test_every_part_of_a_variant_counts(name, kvtool):
    place = Place({}, Protocol())
    value = OTHERS[Variant].get(name)
    if name == "plan":
        from kvtool.documents.plan import PlanDocument

        made = kvtool("plan-budget", "-b", "32", "--context", "96", "-p", "h2o", "-f", "yaml")
        value = PlanDocument.model_validate(yaml.safe_load(made.out))
    other = replace(VARIANT, **{name: value})
    found = [place.shared_fingerprint(each, TASK)["settings"] for each in (VARIANT, other)]
    assert found[0] != found[1]
