"""Results as CSV, LaTeX and Markdown, under the labels of policies, with marked cells."""

from __future__ import annotations

import csv
import io

import pytest

from kvtool.documents.results import VariantEntry
from kvtool.documents.verdict import Difference
from kvtool.evaluation.costs import UNTESTED, is_tested
from kvtool.evaluation.pairs import corrected
from kvtool.report.results import summary_with_costs
from kvtool.report.results_text import latex, markdown
from kvtool.report.table import Cell, Column, Note, Row, Table
from kvtool.report.variants import labelled, wrap
from tests.report.examples import cost, document, result

MINE = "my_module:Peak(recent=8)+caote"
VARIANTS = [
    VariantEntry(name="full", policy="full", budget=None, prefill="full"),
    VariantEntry(name="h2o@64", policy="h2o", budget=64, prefill="full"),
    VariantEntry(
        name=f"{MINE}@64", policy=MINE, budget=64, prefill="full", label="peak(recent=8)+caote"
    ),
]


def made(variants=VARIANTS, shares=(0.0, 1.0, 0.1), **changes):
    results = [
        result(
            variant,
            "niah",
            0.5,
            1.0,
            cost=cost(variant).model_copy(update={"evicted_share": share}),
        )
        for variant, share in zip(variants, shares, strict=True)
    ]
    fields = {"variants": list(variants), "results": results, "averages": [], "gates": []}
    return document().model_copy(update=fields | {"verdict": None, "differences": []} | changes)


def asked(p, p_holm=None):
    found = Difference(
        task="niah",
        variant=f"{MINE}@64",
        against="h2o@64",
        because="asked",
        n=20,
        difference=0.1,
        low=0.02,
        high=0.2,
        lower_is_better=False,
        deciding=None,
        p=p,
    )
    return corrected([found])[0] if p_holm is None else found.model_copy(update={"p_holm": p_holm})


def test_csv_has_every_variant_and_task_in_full():
    rows = list(csv.DictReader(io.StringIO(made().table(form="csv"))))
    assert [row["variant"] for row in rows] == [variant.name for variant in VARIANTS]
    assert [row["label"] for row in rows] == ["full", "h2o", "peak(recent=8)+caote"]
    assert [row["value"] for row in rows] == ["0.5"] * 3
    assert [row["new_tokens"] for row in rows] == ["8.0"] * 3
    assert [row["evicted_share"] for row in rows] == ["0.0", "1.0", "0.1"]
    assert [row["tests_compression"] for row in rows] == ["True", "True", "False"]


def test_csv_has_the_numbers_of_the_data_frame():
    pandas = pytest.importorskip("pandas")
    results = made()
    read = pandas.read_csv(io.StringIO(results.table(form="csv")))
    assert list(read.columns) == list(results.to_pandas().columns)
    assert read["value"].tolist() == results.to_pandas()["value"].tolist()


def test_tables_use_labels_and_never_the_module():
    results = made(differences=[asked(0.01)])
    for form in ("latex", "markdown", "text"):
        text = results.table(form=form)
        assert "my_module" not in text, form
        for shown in (
            "peak(recent=8)+caote@64",
            "not a test of compression",
            "corrected for 1 comparison (Holm)",
            "0.010",
        ):
            assert shown in text, form


def test_two_of_one_label_keep_their_names():
    twin = VARIANTS[2].model_copy(update={"name": "b:Peak@64", "policy": "b:Peak"})
    twin = twin.model_copy(update={"label": VARIANTS[2].label})
    shown = labelled(made([*VARIANTS, twin], (0.0, 1.0, 1.0, 1.0)))
    assert [variant.name for variant in shown.variants] == [
        *(variant.name for variant in VARIANTS),
        "b:Peak@64",
    ]
    assert labelled(labelled(made())) == labelled(made())


def test_markdown_by_hand():
    table = Table(
        [Column("variant", words=True), Column("niah", "em")],
        [Row("a|b", [Cell("0.5", (Note("±0.1"),))])],
    )
    assert markdown(table) == "| policy | niah em |\n| --- | ---: |\n| a\\|b | 0.5 ±0.1 |"


def test_latex_by_hand():
    table = Table(
        [Column("variant", words=True), Column("K/V", "of full")],
        [
            Row("full", [Cell("100%")], first=True),
            Row("my_score", [Cell("<1°")], first=True),
            Row("h2o~", [Cell("a&b")]),
        ],
    )
    assert latex(table).splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"policy & K/V of full \\",
        r"\midrule",
        r"full & 100\% \\",
        r"\addlinespace",
        r"my\_score & $<$1$^{\circ}$ \\",
        r"h2o\textasciitilde{} & a\&b \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_a_cell_below_a_fifth_is_marked():
    for changes, share, tested in [
        ({}, 0.19, False),
        ({}, 0.2, True),
        ({}, None, True),
        ({"reads": True}, 0.0, True),
        ({"codec": "int8"}, 0.0, True),
        ({"budget": None}, 0.0, True),
    ]:
        variant = VARIANTS[1].model_copy(update=changes)
        spent = cost(variant).model_copy(update={"evicted_share": share})
        one = result(variant, "niah", 0.5, 1.0, cost=spent)
        assert is_tested(one, variant) == tested, (changes, share)
        results = [result(VARIANTS[0], "niah", 1.0, 1.0), one]
        run = made([VARIANTS[0], variant], (0.0, 1.0)).model_copy(update={"results": results})
        cell = summary_with_costs(run).rows[1].cells[0]
        assert (UNTESTED in [note.text for note in cell.notes]) == (not tested)


def test_no_name_is_broken():
    name = "my_package_of_many.letters_and_more:MyVeryLongScoreName(recent=8)+caote@64"
    assert wrap(name, 10).replace("\n", "") == name
    assert (
        wrap(name, 10).splitlines()[0] == "my_package_of_many.letters_and_more:MyVeryLongScoreName"
    )
