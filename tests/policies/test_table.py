"""The table that `kvtool policies` prints: its defaults, and what modifiers go on, against runs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.policies.table import BASES, MODIFIERS, describe, policy_class
from tests.models_for_tests import any_cache, cutting, peaky_model, random_ids

PAGE = Path(__file__).parents[2] / "kvtool" / "policies" / "README.md"
README = PAGE.read_text(encoding="utf-8")
ENTRIES = {entry.name: entry for entry in describe()}
PROMPT, BUDGET = 90, 49
MEANS = {  # what a computed default is, for this prompt and budget; heads have 16 channels
    "budget": BUDGET,
    "budget/2": BUDGET // 2,
    "min(10, budget/4)": min(10, BUDGET // 4),
    "2*prompt/budget": math.ceil(2 * PROMPT / BUDGET),
    "head_dim*budget/prompt": round(16 * BUDGET / PROMPT),
    "min(0.8, 0.2 + 0.06 log2 compression)": None,  # tested with RocketKV's plan
    "by RocketKV's plan": None,
    "that of the prompt": None,
    "all": PROMPT,
    "the policy's, else 8": 8,
}
COMPUTED = [
    (name, parameter, default)
    for name, entry in ENTRIES.items()
    for parameter, default in entry.parameters.items()
    if MEANS.get(default) is not None
]


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama"))


@pytest.fixture(scope="module")
def wide_model():
    """Heads of 32 channels, which share a scale in 4 bits."""
    return kvtool.attach(peaky_model("llama", head_dim=32))


def run(model, policy):
    cache = any_cache(model, policy, BUDGET)
    logits = [prefill(model, cache, random_ids(PROMPT))]
    logits += [decode_step(model, cache, torch.tensor([token])) for token in (5, 9)]
    return torch.stack(logits), [cache.kept_positions(layer) for layer in range(2)]


def test_no_policy_is_a_subclass_of_another():
    classes = {name: policy_class(name) for name in BASES | MODIFIERS}
    for name, cls in classes.items():
        above = [other for other, base in classes.items() if base in cls.__mro__[1:]]
        assert not above, f"{name} is a subclass of {above}: compose it instead"


def test_every_default_is_told():
    for name, entry in ENTRIES.items():
        for parameter, default in entry.parameters.items():
            assert default is not None, f"{name}: {parameter}"
    assert len(COMPUTED) == 14


@pytest.mark.parametrize(("name", "parameter", "default"), COMPUTED)
def test_a_computed_default_is_what_it_says(model, name, parameter, default):
    base = name if name in BASES else f"h2o+{name}"
    outcomes = [run(model, policy) for policy in (base, f"{base}({parameter}={MEANS[default]})")]
    torch.testing.assert_close(outcomes[0], outcomes[1])
    others = [
        run(model, f"{base}({parameter}={value})")[0] for value in (1, MEANS[default] * 3 // 2)
    ]
    same = [torch.equal(outcomes[0][0], other) for other in others]
    assert not all(same), "the parameter decides nothing here"


def test_a_modifier_goes_on_what_it_is_said_to_and_on_nothing_else():
    for modifier in MODIFIERS:
        taken = {base.partition("(")[0] for base in ENTRIES[modifier].goes_on}
        assert taken
        for base in BASES.keys() - taken:
            with pytest.raises(kvtool.UsageError):
                kvtool.parse_policy(f"{base}+{modifier}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_a_modifier_runs_on_what_it_is_said_to_go_on(wide_model, modifier):
    for base in ENTRIES[modifier].goes_on:
        if modifier != "optimal":  # whose measurements only a plan has
            base = cutting(base) if base in BASES else base
            logits, _ = run(wide_model, f"{base}+{modifier}")
            assert logits.isfinite().all()


def readme_rows(header):
    """The rows of a table of the README, as lists of cells."""
    table = README.split(header)[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_the_readme_lists_the_parameters():
    rows = readme_rows("| base | keeps | parameters (default) | paper |")
    rows = [(row[0], row[2]) for row in rows]
    rows += [(row[0], row[1]) for row in readme_rows("| modifier | does | goes on |")]
    names = {name for heads, _ in rows for name in re.findall(r"`\+?([^`]+)`", heads)}
    assert names == ENTRIES.keys()
    for heads, text in rows:
        for name in re.findall(r"`\+?([^`]+)`", heads):
            if text.startswith("the same"):
                continue
            for parameter, default in ENTRIES[name].parameters.items():
                assert f"`{parameter}`" in text, f"{name}: {parameter}"
                if isinstance(default, (bool, int, float)):
                    assert f"`{parameter}` ({str(default).lower().removesuffix('.0')}" in text


def test_the_readme_says_what_modifiers_go_on():
    evicting = re.search(r"All that evict: `([^`]+)`", README)[1].split()
    before = None
    for names, _, text in readme_rows("| modifier | does | goes on |"):
        found = before if text == "the same" else set()
        if text.startswith("all that evict"):
            found = set(evicting)
            for words in re.findall(r"but `([^`]+)`", text):
                found -= set(words.split())
        for words in re.findall(r"^`([^`]+)`|and `([^`]+)`", text):
            found |= set(" ".join(words).split())
        before = found
        for name in re.findall(r"`\+([^`]+)`", names):
            assert found == set(ENTRIES[name].goes_on), name
