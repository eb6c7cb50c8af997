import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from kvtool.documents.recipe import Recipe
from kvtool.documents.resolve import gather, parse_policies, read_recipe
from kvtool.documents.source import DocumentError, Source, check_kind, read_source
from kvtool.errors import UsageError
from kvtool.evaluation.tasks.table import expand, task_class
from kvtool.policies.grammar import parse_policy

RECIPES = Path(__file__).parents[2] / "recipes"

EVERYTHING = """\
kind: recipe
schema_version: 1
name: roco-512
model:
  id: org/name
  revision: main
  dtype: bfloat16
  device: cuda:0
  device_map: null
  attn_implementation: sdpa
policy:
- {name: roco, sinks: 4, protect_recent: true, window_ratio: 0.5, seed: null}
- h2o(recent=8)
modifiers: [{name: caote}, "calidrop(theta1=0.7)"]
budget: {tokens: [512, 1K]}
allocator: d2o
prefill: {mode: block, block: 256}
generation: {max_new_tokens: 32, temperature: 0.7, stop: "\\n"}
eval:
  baseline: false
  tasks:
  - niah
  - {task: "ruler/niah_*", length: 4K, samples: 50, data: {hub: a/b, config: null}}
  limit: 10
  query_aware: false
  chat_template: on
  max_length: 8K
  truncate: left
gates: [{task: niah, min: 0.9}, {task: "*", max_drop: 2}]
output: {dir: runs/a, samples: false, plots: [png, svg]}
seed: 7
"""


def recipe(text, **options):
    return read_recipe(Source.parse(text, "a.yaml"), **options)[0]


def sizes(recipe) -> list[str]:
    return [str(budget) for budget in recipe.budgets()]


def with_key(line):
    return recipe(f"kind: recipe\n{line}\n")


def mistakes(text, **options):
    with pytest.raises(DocumentError) as caught:
        recipe(text, **options)
    return list(map(str, caught.value.problems))


def test_every_key_is_read():
    read = recipe(EVERYTHING)
    assert (read.name, read.seed, read.allocator) == ("roco-512", 7, "d2o")
    assert (read.model.id, read.model.dtype, read.model.device) == (
        "org/name",
        "bfloat16",
        "cuda:0",
    )
    assert read.policies() == [
        "roco(sinks=4,protect_recent=true,window_ratio=0.5,seed=null)+caote+calidrop(theta1=0.7)",
        "h2o(recent=8)+caote+calidrop(theta1=0.7)",
    ]
    assert sizes(read) == ["512", "1024"]
    assert read.prefill == "block:256"
    assert (read.generation.max_new_tokens, read.generation.stop) == (32, ["\n"])
    assert [entry.task for entry in read.eval.tasks] == ["niah", "ruler/niah_*"]
    settings = {"length": "4K", "samples": 50, "data": {"hub": "a/b", "config": None}}
    assert [entry.settings for entry in read.eval.tasks] == [{}, settings]
    assert (read.eval.baseline, read.eval.limit, read.eval.query_aware) == (False, 10, False)
    assert (read.eval.chat_template, read.eval.max_length) == ("on", 8192)
    assert [(gate.task, gate.min, gate.max_drop) for gate in read.gates] == [
        ("niah", 0.9, None),
        ("*", None, 2.0),
    ]
    assert (read.output.dir, read.output.plots) == ("runs/a", ["png", "svg"])


def test_what_is_left_out_has_its_default():
    read = recipe("kind: recipe\n")
    assert read == Recipe()
    assert (read.policies(), sizes(read), read.plan, read.prefill) == ([], [], None, None)
    assert (read.eval.baseline, read.eval.query_aware, read.eval.truncate) == (True, None, "middle")
    assert (read.model.id, read.model.dtype, read.output.plots) == (None, "auto", None)


BUDGETS = {
    "4K": ["4096"],
    "0.1": ["10%"],
    "[64, 10%, 64MiB, 1/3]": ["64", "10%", "64MiB", "1/3"],
    "{tokens: 1K}": ["1024"],
    "{tokens: [64, 128]}": ["64", "128"],
    "{ratio: 0.2}": ["20%"],
    "{ratio: [20%, 0.5, 1, 1.0, 2/3]}": ["20%", "50%", "100%", "100%", "2/3"],
    "{bytes: [1048576, 2GiB, 100]}": ["1MiB", "2GiB", "100B"],
    "{tokens: null, ratio: 10%}": ["10%"],
    "{plan: plan.yaml}": [],
    "null": [],
}


def test_budgets_have_one_spelling():
    assert {typed: sizes(with_key(f"budget: {typed}")) for typed in BUDGETS} == BUDGETS


def test_a_budget_is_written_without_what_was_not_given():
    assert with_key("budget: {ratio: 0.2}").to_data()["budget"] == {"ratio": ["20%"]}


def test_a_plan_is_a_path_or_a_plan():
    assert with_key("budget: {plan: plan.yaml}").plan == "plan.yaml"
    assert with_key("budget: {plan: {kind: plan, layers: [1]}}").plan == {
        "kind": "plan",
        "layers": [1],
    }


PREFILLS = {
    "full": "full",
    "block": "block",  # whose size the device gives
    " BLOCK ": "block",
    "block:1K": "block:1024",
    "{mode: full}": "full",
    "{mode: block}": "block",
    "{mode: block, block: 1K}": "block:1024",
}
POLICIES = {
    "h2o": ["h2o"],
    "{name: h2o}": ["h2o"],
    "[h2o, h2o+caote]": ["h2o", "h2o+caote"],
    "h2o\nmodifiers: caote": ["h2o+caote"],
    "{name: x, a: 1e-5, b: true, c: null, d: avg}": ["x(a=1e-05,b=true,c=null,d=avg)"],
}


def test_prefill_has_one_spelling():
    assert {typed: with_key(f"prefill: {typed}").prefill for typed in PREFILLS} == PREFILLS


def test_policies_become_strings():
    assert {typed: with_key(f"policy: {typed}").policies() for typed in POLICIES} == POLICIES


def test_a_mistake_is_told_at_its_place():
    for line, told in [
        ("polcy: h2o", "2:1: polcy: unknown key `polcy`; did you mean `policy`?"),
        ("seed: -1", "2:7: seed: must be at least 0, got `-1`"),
        ("seed: true", "2:7: seed: must be a whole number, got true"),
        ("seed: '3'", "2:7: seed: must be a whole number, got `3`"),
        ("model: 3", "2:8: model: must be a mapping, got `3`"),
        ("model: {di: x}", "2:9: model.di: unknown key `di`; keys here: id, revision"),
        (
            "model: {id: x, trust_remote_code: false}",
            "2:16: model.trust_remote_code: unknown key `trust_remote_code`; keys here: id, rev",
        ),
        (
            "model: {dtype: fp16}",
            "2:16: model.dtype: must be `auto`, `float32`, `bfloat16` or `float16`, got `fp16`",
        ),
        (
            "policy: [h2o, 3]",
            "2:15: policy.1: must be text, got `3`",
        ),
        ("policy: []", "2:9: policy: list should have at least 1 item"),
        (
            "policy:\n- name: h2o+caote",
            "3:9: policy.0.name: string should match pattern",
        ),
        (  # no way into the string of a policy
            "policy: {name: h2o, recent: '8)+x('}",
            "2:29: policy.recent: string should match pattern",
        ),
        ("budget: 4k", "2:9: budget: lower-case `k` in `4k` is ambiguous; use `4K` (x 1024)"),
        ("budget: [64, 0]", "2:14: budget.1: budget 0 is not above 0; use tokens (`512`, `4K`)"),
        (
            "budget: {tokens: 64, ratio: 20%}",
            "2:9: budget: must have one of tokens, ratio, bytes, plan, got tokens and ratio",
        ),
        (
            "budget: {}",
            "2:9: budget: must have one of tokens, ratio, bytes, plan, got none of them",
        ),
        ("budget: {tokens: [64, 20%]}", "2:23: budget.tokens.1: `20%` is not a number of tokens"),
        ("budget: {ratio: 5}", "2:17: budget.ratio: `5` is not a share of the prompt (`20%`)"),
        ("budget: {bytes: 4K}", "2:17: budget.bytes: `4K` is not a number of bytes (`64MiB`)"),
        ("budget: {plan: 3}", "2:16: budget.plan: must be text or a mapping, got `3`"),
        ("prefill: blok", "2:10: prefill: prefill must be full, block or block:M, got `blok`"),
        ("prefill: {mode: full, block: 8}", "2:10: prefill: mode `full` feeds the prompt at once"),
        ("generation: {temperature: -1}", "2:27: generation.temperature: must be at least 0"),
        ("eval: {tasks: [{samples: 3}]}", "2:16: eval.tasks.0.task: is required"),
        ("eval: {baseline: yes}", "2:18: eval.baseline: must be true or false, got `yes`"),
        ("gates: [{task: x}]", "2:9: gates.0: must have one of min, max_drop, got none of them"),
        (
            "gates: [{task: x, min: 1, max_drop: 2}]",
            "2:9: gates.0: must have one of min, max_drop, got min and max_drop",
        ),
        ("output: {plots: [pdf]}", "2:18: output.plots.0: must be `png` or `svg`, got `pdf`"),
    ]:
        (found,) = mistakes(f"kind: recipe\n{line}\n")
        assert found.startswith(f"a.yaml:{told}")


def test_pictures_may_be_a_truth():
    assert with_key("output: {plots: true}").output.plots == ["png"]
    assert with_key("output: {plots: false}").output.plots == []
    assert with_key("output: {plots: svg}").output.plots == ["svg"]


# ---- flags and task settings


class Needle(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    samples: int = 1


def test_the_settings_of_a_task_are_validated_where_they_stand():
    text = "kind: recipe\neval:\n  tasks:\n  - niah\n  - {task: niah, sampels: 3}\n"
    _, source = read_recipe(Source.parse(text, "a.yaml"), sets=["eval.tasks.0.samples=many"])

    def needle(i):
        given = {"name": "niah"}
        return source.validate(Needle, ("eval", "tasks", i), without=("task",), given=given)

    with pytest.raises(DocumentError) as caught:
        needle(0)
    assert str(caught.value) == (
        "--set eval.tasks.0.samples=many: eval.tasks.0.samples: must be a whole number, got `many`"
    )
    with pytest.raises(DocumentError) as caught:
        needle(1)
    assert str(caught.value) == (
        "a.yaml:5:18: eval.tasks.1.sampels: unknown key `sampels`; did you mean `samples`?"
    )


def test_flags_are_stronger_than_the_file_and_sets_are_stronger_than_flags():
    flags = [
        ("-b 64", {"budget": "64"}),
        ("-m c/d", {"model": "c/d"}),
        ("-L 3", {"eval": {"limit": 3}}),
    ]
    read = recipe(EVERYTHING, flags=flags)
    assert sizes(read) == ["64"]
    assert (read.model.id, read.model.revision, read.model.dtype) == ("c/d", None, "bfloat16")
    assert (read.eval.limit, read.eval.truncate) == (3, "left")
    read = recipe(EVERYTHING, flags=flags, sets=["eval.limit=4"], unsets=["budget"])
    assert (read.eval.limit, sizes(read)) == (4, [])
    assert mistakes(EVERYTHING, flags=[("-b 4k", {"budget": ["4k"]})]) == [
        "-b 4k: budget.0: lower-case `k` in `4k` is ambiguous; use `4K` (x 1024)"
    ]


def test_a_command_line_without_a_file_is_a_recipe():
    flags = [("-p h2o", {"policy": "h2o"}), ("-t niah", {"eval": {"tasks": ["niah"]}})]
    sets = ["eval.tasks.0.samples=2", "eval.tasks+=ppl"]
    read, source = read_recipe(Source.empty(), flags, sets)
    tasks = [{"task": "niah", "samples": 2}, {"task": "ppl"}]
    assert read == Recipe(policy=["h2o"], eval={"tasks": tasks})
    assert source.data["eval"]["tasks"] == tasks


# ---- policies, with those there are


def policy_mistakes(text):
    read, source = read_recipe(Source.parse(text, "a.yaml"))
    with pytest.raises(DocumentError) as caught:
        parse_policies(read, source, parse_policy)
    return list(map(str, caught.value.problems))


def test_policies_are_parsed_with_their_modifiers():
    text = "kind: recipe\npolicy: [{name: h2o, recent: 8}, roco]\nmodifiers: [caote]\n"
    read, source = read_recipe(Source.parse(text, "a.yaml"))
    parsed = parse_policies(read, source, parse_policy)
    assert parsed == [parse_policy("h2o(recent=8)+caote"), parse_policy("roco+caote")]


def test_every_policy_that_cannot_be_read_is_told_at_its_place():
    found = policy_mistakes(
        "kind: recipe\npolicy:\n- name: snapkv\n  windw: 32\n  kernel: x\n- h2o(recnt=3)\n"
        "- {name: rocco}\n- roco\n- tova\nmodifiers: [{name: caot}]\n"
    )
    starts = [
        "a.yaml:3:3: policy.0: `snapkv` has no parameter `windw`",
        "a.yaml:6:3: policy.1: `h2o` has no parameter `recnt`",
        "a.yaml:7:3: policy.2: no policy named `rocco`",
        "a.yaml:10:12: modifiers: no modifier named `caot`",
    ]
    assert len(found) == len(starts)
    assert all(told.startswith(start) for told, start in zip(found, starts, strict=True))


def test_a_policy_alone_and_modifiers_that_exclude_each_other_are_told():
    (told,) = policy_mistakes("kind: recipe\npolicy: {name: h2o, recnt: 3}\n")
    assert told.startswith("a.yaml:2:9: policy: `h2o` has no parameter `recnt`")
    (told,) = policy_mistakes("kind: recipe\npolicy: h2o\nmodifiers: [caote, fastcaote]\n")
    assert told.startswith("a.yaml:3:12: modifiers: modifiers `caote` and `fastcaote` exclude")
    (told,) = policy_mistakes("kind: recipe\npolicy: streaming\nmodifiers: [caote]\n")
    assert told.startswith("a.yaml:3:12: modifiers: ")


# ---- includes


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return read_source(str(folder / "top.yaml"), option="RECIPE")


def test_included_files_lie_below_the_first_the_lowest(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.yaml").write_text("seed: 5\nname: deep\n")
    source = write(
        tmp_path,
        top="kind: recipe\ninclude: [low.yaml, high.yaml]\nname: top\nmodel: {dtype: float16}\n",
        low="kind: recipe\nname: low\nmodel: {id: a/b, dtype: float32}\nbudget: 64\n",
        high="include: sub/deep.yaml\nmodel: c/d\nbudget: {ratio: 20%}\n",
    )
    read, resolved = read_recipe(source)
    assert (read.name, read.seed, sizes(read)) == ("top", 5, ["20%"])
    assert (read.model.id, read.model.dtype) == ("c/d", "float16")
    assert "include" not in resolved.data


def test_mistakes_in_included_files_name_the_included_file(tmp_path):
    source = write(
        tmp_path,
        top="kind: recipe\ninclude: [base.yaml]\nseed: x\n",
        base="# base\nmodel: {id: a/b, dtyp: x}\neval:\n  limit: x\n",
    )
    with pytest.raises(DocumentError) as caught:
        read_recipe(source)
    found = sorted(str(p).removeprefix(f"{tmp_path}/") for p in caught.value.problems)
    assert found == [
        "base.yaml:2:18: model.dtyp: unknown key `dtyp`; did you mean `dtype`?",
        "base.yaml:4:10: eval.limit: must be a whole number, got `x`",
        "top.yaml:3:7: seed: must be a whole number, got `x`",
    ]


def test_what_is_missing_is_asked_of_the_including_file(tmp_path):
    source = write(
        tmp_path,
        top="kind: recipe\ninclude: base.yaml\nprefill: {}\n",
        base="prefill: {block: 8}\n",
    )
    with pytest.raises(DocumentError, match=r"top\.yaml:3:1: prefill\.mode: is required$"):
        read_recipe(source)


def test_files_that_cannot_be_included_are_told(tmp_path):
    for files, told in [
        (
            {"top": "include: [no.yaml]"},
            "top.yaml:1:11: include.0: cannot read include `*no.yaml`",
        ),
        ({"top": "include: top.yaml"}, "top.yaml:1:10: include: `*top.yaml` includes itself"),
        (
            {"top": "include: [a.yaml]", "a": "include: [top.yaml]"},
            "a.yaml:1:11: include.0: `*top.yaml` includes itself",
        ),
        ({"top": "include: [3]"}, "top.yaml:1:11: include.0: must be the path of a file, got `3`"),
        (
            {"top": "include: [a.yaml]", "a": "kind: plan"},
            "a.yaml:1:7: kind: an included file is a recipe, got `plan`",
        ),
        ({"top": "include: [a.yaml]", "a": "- 1"}, "a.yaml:1:1: must be a mapping, got a list"),
        ({"top": "include: [a.yaml]", "a": "a: [1"}, "a.yaml:1:6: not valid YAML: while parsing"),
    ]:
        with pytest.raises(DocumentError) as caught:
            read_recipe(write(tmp_path, **files))
        assert len(caught.value.problems) == 1
        assert str(caught.value).replace(f"{tmp_path}/", "").startswith(told.replace("*", ""))


def test_an_included_file_that_is_no_recipe_shows_none_of_its_lines(tmp_path):
    for text, told in [
        ("root:x:0:0:root\ndaemon:x:1:1\n", "must be a mapping, got text"),
        ("apiKey: hush\nuser: me\n", "is no recipe: it has keys of its own, and no line `kind:"),
        ("kind: Config\ntoken: hush\n", "kind: an included file is a recipe, got `Config`"),
        ("hush: [1\n", "not valid YAML"),
        ('{"hush": 1,,}', "not valid JSON"),
    ]:
        with pytest.raises(DocumentError) as caught:
            read_recipe(write(tmp_path, top="include: [a.yaml]\n", a=text))
        assert told in caught.value.report()
        assert "hush" not in caught.value.report()
        assert "root" not in caught.value.report().replace(str(tmp_path), "")


def test_a_recipe_that_is_included_shows_the_line_of_its_mistake(tmp_path):
    files = {"top": "include: [a.yaml]\n", "a": "kind: recipe\nsead: [1\n"}
    with pytest.raises(DocumentError) as caught:
        read_recipe(write(tmp_path, **files))
    assert "sead: [1" in caught.value.report() or "^" in caught.value.report()


def test_ranges_are_checked_where_they_stand():
    for text, told in [
        ("seed: 99999999999999999999", "seed: must be at most 9223372036854775807"),
        ("generation: {max_new_tokens: 4294967296}", "must be at most 2147483647"),
        ("generation: {temperature: 1.0e-300}", "must be 0 or more, and at least 1e-06"),
        ("budget: [[1]]", "budget `[1]` is not a size"),
        ("budget: {tokens: [[1]]}", "must be a whole number, got a list"),
        ("policy: [" + "h2o, " * 501 + "]", "list should have at most 500 items"),
    ]:
        (found,) = mistakes(f"kind: recipe\n{text}\n")
        assert told in found


def test_a_file_may_be_included_twice_on_different_ways(tmp_path):
    source = write(
        tmp_path,
        top="kind: recipe\ninclude: [a.yaml, b.yaml]\n",
        a="include: [c.yaml]\n",
        b="include: [c.yaml]\n",
        c="seed: 3\n",
    )
    assert read_recipe(source)[0].seed == 3


# ---- round trips


def test_a_recipe_is_written_so_that_it_runs_the_same():
    read = recipe(EVERYTHING)
    again = recipe(read.to_yaml())
    assert again == read
    assert recipe(read.to_json()) == read


TEXT = st.text(min_size=1) | st.sampled_from(["1e-5", "on", "010", "0o10", "~", "20%", "a: b"])
WORD = st.from_regex(r"[a-z0-9_.-]+", fullmatch=True)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(0, 1) | WORD
SIZES = st.lists(st.integers(1, 10**6) | st.sampled_from(["4K", "1M"]), min_size=1, max_size=3)
RATIOS = st.lists(st.sampled_from([0.1, "20%", "1/3", 1, 0.125]), min_size=1, max_size=3)
PARAMETERS = st.dictionaries(WORD.filter(lambda word: word != "name"), SCALAR, max_size=3)
POLICY = WORD | st.builds(lambda name, rest: {"name": name} | rest, WORD, PARAMETERS)
RECIPE = st.fixed_dictionaries(
    {"kind": st.just("recipe")},
    optional={
        "name": TEXT,
        "model": TEXT | st.fixed_dictionaries({"id": TEXT}, optional={"revision": TEXT}),
        "policy": POLICY | st.lists(POLICY, min_size=1, max_size=3),
        "modifiers": st.lists(POLICY, max_size=2),
        "budget": SIZES
        | RATIOS
        | st.builds(lambda sizes: {"tokens": sizes}, SIZES)
        | st.builds(lambda ratios: {"ratio": ratios}, RATIOS)
        | st.builds(lambda path: {"plan": path}, TEXT),
        "prefill": st.sampled_from(["full", "block", {"mode": "block", "block": 7}]),
        "generation": st.fixed_dictionaries({"stop": st.lists(TEXT, max_size=2)}),
        "eval": st.fixed_dictionaries(
            {"tasks": st.lists(TEXT | st.fixed_dictionaries({"task": TEXT, "x": SCALAR}))}
        ),
        "gates": st.lists(st.fixed_dictionaries({"task": TEXT, "min": st.floats(-9, 9)})),
        "seed": st.integers(0, 2**40),
    },
)


@settings(max_examples=30)
@given(RECIPE)
def test_any_recipe_is_written_so_that_it_runs_the_same(data):
    read = recipe(json.dumps(data))
    again = recipe(read.to_yaml())
    assert again == read
    assert again.to_yaml() == read.to_yaml()
    assert (again.policies(), sizes(again)) == (
        read.policies(),
        sizes(read),
    )
    assert Recipe.model_validate(read.to_data()) == read


# ---- the recipes we ship


def test_every_recipe_we_ship_is_valid_and_says_how_to_run_it():
    paths = sorted(RECIPES.rglob("*.yaml"))
    assert len(paths) >= 30
    for path in paths:
        source = read_source(str(path), option="RECIPE")
        check_kind(source, takes=("recipe",), command="kvtool eval")
        read, source = read_recipe(source)
        assert parse_policies(read, source, parse_policy), path
        assert read.eval.tasks, path
        for i, entry in enumerate(read.eval.tasks):
            for name in expand(entry.task):
                at, given = ("eval", "tasks", i), {"name": name}
                source.validate(task_class(name), at, without=("task",), given=given)
        text = path.read_text()
        assert text.startswith("#"), path
        assert f"kvtool eval recipes/{path.relative_to(RECIPES)}" in text
        assert "\n# Time and memory: " in text, path
        assert read.name == path.stem


def test_a_flag_is_told_without_the_key_that_it_sets():
    with pytest.raises(DocumentError, match=r"^--budget: budget 0 is not above 0"):
        recipe("kind: recipe", flags=[("--budget", {"budget": ["64", "0"]})])


def test_several_readings_tell_their_mistakes_together():
    source = Source.parse("kind: recipe\npolicy: h2o\nseed: 1\n", "a.yaml")

    def wrong(key):
        raise DocumentError([source.problem((key,), "is wrong")])

    def without_a_place():
        raise UsageError("no tasks")

    with pytest.raises(DocumentError) as caught:
        gather(lambda: wrong("seed"), without_a_place, lambda: wrong("policy"))
    assert [str(problem) for problem in caught.value.problems] == [
        "a.yaml:2:9: policy: is wrong",
        "a.yaml:3:7: seed: is wrong",
    ]
    with pytest.raises(UsageError, match=r"^no tasks$"):
        gather(lambda: 1, without_a_place)
    assert gather(lambda: 1, lambda: 2) == [1, 2]
