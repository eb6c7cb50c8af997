from dataclasses import replace

import pytest
from pydantic import BaseModel, ConfigDict

from kvtool.documents.overrides import apply_sets, overlay
from kvtool.documents.source import DocumentError, Source
from kvtool.documents.tree import Mark, Node
from kvtool.errors import UsageError

TEXT = """\
kind: recipe
policy: {name: roco, sinks: 4}
model: {id: a/b, revision: abc, dtype: bfloat16}
budget: {tokens: 512}
eval:
  tasks:
  - task: niah
    samples: 2
  - task: ppl
"""


def source():
    return Source.parse(TEXT, "a.yaml")


def merge(below, values, flag):
    return replace(below, node=overlay(below.node, Node.of(values, Mark(flag))))


def refused(sets, unsets=()):
    with pytest.raises(DocumentError) as caught:
        apply_sets(source(), sets, unsets)
    return list(map(str, caught.value.problems))


def test_a_value_is_set_where_it_belongs():
    for flag, keys, value in [
        ("policy.sinks=8", ("policy", "sinks"), 8),
        ("policy.window_ratio=0.3", ("policy", "window_ratio"), 0.3),
        ("policy = h2o(recent=8)+caote", ("policy",), "h2o(recent=8)+caote"),
        ("policy=[h2o, 'tova']", ("policy",), ["h2o", "tova"]),
        ("policy={name: h2o, recent: 8}", ("policy",), {"name": "h2o", "recent": 8}),
        ("generation.temperature=1e-1", ("generation", "temperature"), 0.1),
        ("a.b.c=on", ("a",), {"b": {"c": "on"}}),
        ("eval.tasks.0.samples=5", ("eval", "tasks", 0, "samples"), 5),
        ("eval.tasks.1.data.path=x=y", ("eval", "tasks", 1, "data"), {"path": "x=y"}),
        ("eval.tasks+=ruler/vt", ("eval", "tasks", 2), "ruler/vt"),
        ("gates+={task: niah, min: 90}", ("gates",), [{"task": "niah", "min": 90}]),
        ("budget=", ("budget",), None),
        ("name='8'", ("name",), "8"),
        ("name='a: b'", ("name",), "a: b"),
        ("name=+5", ("name",), 5),
        ('x={"a": [1, 2]}', ("x",), {"a": [1, 2]}),
    ]:
        before = source()
        after = apply_sets(before, [flag])
        assert after.find(keys).data == value, flag
        assert str(after.find(keys).mark) == f"--set {flag}"
        assert before.data == source().data, "the old document is as it was"


def test_all_else_keeps_its_value_and_place():
    before, after = source(), apply_sets(source(), ["eval.tasks.0.samples=5", "eval.tasks+=x"])
    expected = before.data
    expected["eval"]["tasks"][0]["samples"] = 5
    expected["eval"]["tasks"].append("x")
    assert after.data == expected
    for keys in (("policy", "sinks"), ("eval",), ("eval", "tasks", 0), ("eval", "tasks", 1)):
        assert str(after.find(keys).mark) == str(before.find(keys).mark)


def test_sets_apply_in_order_and_after_unsets():
    after = apply_sets(
        source(), ["x+=1", "x+=2", "x.0=3", "policy.name=h2o"], ["policy", "eval.tasks.0"]
    )
    assert after.data["x"] == [3, 2]
    assert after.data["policy"] == {"name": "h2o"}
    assert after.data["eval"] == {"tasks": [{"task": "ppl"}]}


def test_a_way_that_leads_nowhere_is_told_with_its_flag():
    for flag, told in [
        ("eval.tasks.first=1", "eval.tasks: is a list of 2 and has no item `first`"),
        ("eval.task.0=1", "eval.task: is not there, and nor is a list"),
        ("policy+=h2o", "policy: is not a list, nothing can be appended"),
        ("a=[1", "a: not valid YAML: while parsing a flow sequence"),
        ("a=!x 1", "a: tags are not read, got `!x`"),
        ("a=b: c", "a: quote text that holds `: ` or begins with `- `"),
    ]:
        (problem,) = refused([flag])
        assert problem.startswith(f"--set {flag}: {told}")


def test_several_flags_that_lead_nowhere_are_told_at_once():
    assert refused(["policy.name.x=1", "eval.tasks.9=x"], ["policy.sink", "eval.tasks.7"]) == [
        "--unset policy.sink: policy.sink: is not there; did you mean `sinks`?",
        "--unset eval.tasks.7: eval.tasks: is a list of 2 and has no item `7`",
        "--set policy.name.x=1: policy.name: is neither a mapping nor a list, so it has no `x`",
        "--set eval.tasks.9=x: eval.tasks: is a list of 2 and has no item `9`",
    ]


def test_a_flag_of_another_form_is_refused():
    for flag in ("policy", "=3", "a..b=3", ".a=3", "a+b=3"):
        with pytest.raises(UsageError, match=r"^cannot read `--set ") as caught:
            apply_sets(source(), [flag])
        assert caught.value.hint == "the form is a.b=VALUE, a.0.b=VALUE or a.b+=VALUE"


class Policy(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    sinks: int


def test_mistakes_in_values_that_were_set_name_the_flag():
    changed = apply_sets(source(), ["policy.sink=3", "policy.sinks=x"])
    with pytest.raises(DocumentError) as caught:
        changed.validate(Policy, ("policy",))
    assert sorted(map(str, caught.value.problems)) == [
        "--set policy.sink=3: policy.sink: unknown key `sink`; did you mean `sinks`?",
        "--set policy.sinks=x: policy.sinks: must be a whole number, got `x`",
    ]
    assert caught.value.report().count("\n") == 1, "a flag has no line to show"


def test_a_document_can_be_made_of_flags_alone():
    made = apply_sets(Source.empty(), ["policy.name=h2o"])
    assert made.data == {"kind": "recipe", "schema_version": 1, "policy": {"name": "h2o"}}
    with pytest.raises(DocumentError, match=r"^--set policy.name=h2o: policy.sinks: is required$"):
        made.validate(Policy, ("policy",))
    with pytest.raises(DocumentError, match=r"^command line: budget: is required$"):
        made.validate(Policy, ("budget",))


def test_flags_lie_over_the_file():
    after = merge(source(), {"eval": {"limit": 5}, "policy": {"sinks": 8}}, "-L 5")
    assert after.data["eval"] == {"limit": 5, "tasks": source().data["eval"]["tasks"]}
    assert after.data["policy"] == {"name": "roco", "sinks": 8}
    assert str(after.find(("eval", "limit")).mark) == "-L 5"
    assert str(after.find(("policy", "name")).mark) == "a.yaml:2:16"
    assert str(after.find(("eval",)).mark) == "a.yaml:6:3"


def test_another_thing_takes_none_of_the_settings_of_the_old_one():
    after = merge(source(), {"policy": {"name": "h2o"}, "budget": {"ratio": 0.2}}, "-p h2o")
    assert after.data["policy"] == {"name": "h2o"}
    assert after.data["budget"] == {"ratio": 0.2}
    after = merge(source(), {"model": {"id": "c/d"}}, "-m c/d")
    assert after.data["model"] == {"id": "c/d", "dtype": "bfloat16"}
    after = merge(source(), {"model": {"id": "a/b"}}, "-m a/b")
    assert after.data["model"] == {"id": "a/b", "revision": "abc", "dtype": "bfloat16"}
    after = merge(source(), {"eval": {"tasks": ["ppl"]}, "policy": "tova"}, "-t ppl")
    assert after.data["eval"] == {"tasks": ["ppl"]}
    assert after.data["policy"] == "tova"
