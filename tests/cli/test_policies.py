"""`kvtool policies`: a table that fits a terminal, and each policy in full, from the classes."""

import json
import re
from dataclasses import fields

import pytest
import yaml

from kvtool.policies.grammar import parse_policy
from kvtool.policies.table import BASES, MODIFIERS, describe, policy_class

ENTRIES = {entry.name: entry for entry in describe()}
NAMES = [*BASES, *MODIFIERS]


def words(text: str) -> str:
    return " ".join(text.split())


def rows(table: str, name: str) -> str:
    """The lines of a policy in a table, up to the next name, without the columns."""
    found = re.search(rf"^{re.escape(name)}  .*\n(?:  .*\n)*", table, re.MULTILINE)
    return found[0]


def cell(table: str, name: str, column: str) -> str:
    """The words in a column, by the places of the nearest headings above."""
    row = rows(table, name)
    above = table[: table.index(row)].splitlines()
    head = next(line for line in reversed(above) if re.match("(policy|modifier)  ", line))
    titles = re.split(r" {2,}", head)
    starts = [head.index(title) for title in titles] + [None]
    place = titles.index(column)
    return words("\n".join(line[starts[place] : starts[place + 1]] for line in row.splitlines()))


def test_as_data(kvtool):
    entries = json.loads(kvtool("policies", "-f", "json").out)
    assert yaml.safe_load(kvtool("policies", "-f", "yaml").out) == entries
    assert [entry["name"] for entry in entries] == NAMES
    for entry in entries:
        assert entry["summary"]
        assert entry["paper"]
        assert entry["kind"] in ("base", "modifier")
    streaming = next(entry for entry in entries if entry["name"] == "streaming")
    assert streaming["parameters"] == {"sinks": 4, "positions": "text"}
    ada = next(entry for entry in entries if entry["name"] == "ada")
    bases = {"scissorhands", "h2o", "tova", "roco", "snapkv", "pyramidkv", "adakv"}
    assert {*bases, "d2o(merge=none)"} <= set(ada["goes_on"])


def test_in_a_file(kvtool, tmp_path):
    assert kvtool("policies", "-q", "-o", "table.json").out == ""
    assert json.loads((tmp_path / "table.json").read_text())[0]["name"] == "full"


@pytest.mark.parametrize("columns", [None, 200])
def test_the_table_fits_and_holds_every_fact(kvtool, at_terminal, columns):
    done = at_terminal("policies", columns=columns) if columns else kvtool("policies")
    table = done.out
    assert max(map(len, table.splitlines())) <= min(columns or 100, 120)
    for name, entry in ENTRIES.items():
        sign, keeps = ("", "keeps") if entry.kind == "base" else ("+", "does")
        told = cell(table, sign + name, keeps)
        assert told == words(entry.summary)
        defaults = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in entry.parameters.items()
        ]
        assert cell(table, sign + name, "parameters") == ", ".join(defaults)
        assert cell(table, sign + name, "paper") in entry.paper
    assert cell(table, "h2o", "parameters") == "recent=budget/2, positions=text"
    assert "=None" not in table
    assert ("my_package.my_module:MyScore" in done.err) == bool(columns)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", NAMES)
def test_one_in_full(kvtool, name):
    entry = ENTRIES[name]
    sign = "" if entry.kind == "base" else "+"
    text, data = (
        kvtool("policies", name).out,
        json.loads(kvtool("policies", name, "-f", "json").out),
    )
    assert words(text).startswith(words(f"{sign}{name} - {entry.summary}"))
    assert max(map(len, text.splitlines())) <= 100
    assert entry.paper in text
    assert entry.budget_kind in words(text)
    assert len(data["text"]) > 20
    assert words(data["text"]) in words(text)
    assert [each["name"] for each in data["settings"]] == list(entry.parameters)
    cls = policy_class(name)
    for each in data["settings"]:
        assert each["default"] == entry.parameters[each["name"]]
        assert len(each["meaning"]) > 5
        assert "see `" not in each["meaning"]
        for value in each["values"]:
            cls(**{each["name"]: value})
        if each["values"]:
            with pytest.raises(ValueError):
                parse_policy(f"{sign and 'h2o+'}{name}({each['name']}=nonsense)")
    assert {each.name for each in fields(cls)} == set(entry.parameters)
    if entry.kind == "modifier":
        assert words(f"goes on {' '.join(entry.goes_on)}") in words(text)
        assert data["takes"] == []
    else:
        expected = [
            f"{base}+{modifier}"
            for modifier, other in ENTRIES.items()
            for base in other.goes_on
            if base.partition("(")[0] == name
        ]
        assert data["takes"] == expected
        for policy in expected:
            short = policy.replace("+int", "+k8v4") if policy.endswith("+int") else policy
            assert str(parse_policy(policy)) == short
        taken = {each for line in text.splitlines() for each in re.findall(r" \+([\w-]+)", line)}
        assert {policy.rpartition("+")[2] for policy in expected} <= taken


def test_names_are_read_as_in_policy_strings(kvtool):
    assert kvtool("policies", "H2O").out == kvtool("policies", "h2o").out
    assert kvtool("policies", "+CAOTE").out == kvtool("policies", "caote").out
    assert yaml.safe_load(kvtool("policies", "h2o", "-f", "yaml").out) == json.loads(
        kvtool("policies", "h2o", "-f", "json").out
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("snapvk", ["no policy or modifier named `snapvk`", "did you mean `snapkv`?"]),
        ("zebra", ["no policy or modifier named `zebra`; choose one of: full, random,"]),
        ("loco", ["policy `loco` is not offered: it merges tokens with weights that need"]),
        ("", ["no policy or modifier named ``; choose one of: full, random,"]),
    ],
)
def test_a_name_that_is_none(kvtool, name, told):
    done = kvtool("policies", name)
    assert (done.code, done.out) == (2, "")
    lines = done.err.splitlines()
    assert len(lines) == len(told)
    assert lines[0].startswith(f"error: {told[0]}")
    assert lines[1:] == [f"hint: {hint}" for hint in told[1:]]
