"""A results document as one HTML file, to read, send and print.

The file needs no other: no script, no style sheet, font or picture from elsewhere. Without
matplotlib it has the tables only, and says how to get the pictures.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from kvtool.documents.files import write_text
from kvtool.documents.results import ResultsDocument
from kvtool.extras import installed
from kvtool.package_data import data_file
from kvtool.report import results as tables
from kvtool.report import words
from kvtool.report.panels import FRONT, GRID, drawing, svg
from kvtool.report.pictures import pictures
from kvtool.report.variants import labelled, labels, results_of, task_names

if TYPE_CHECKING:
    from kvtool.evaluation.run.wrong import WrongAnswer

_THEME = {  # of `kvtool.report.panels`, and of `page.css`
    "#000000": "currentColor",
    "#ffffff": "var(--paper)",
    GRID: "var(--line)",
    FRONT: "var(--front)",
}


def inline_svg(document: str, prefix: str, label: str) -> Markup:
    """Return an SVG document as part of a page, its ids made unique by `prefix`.

    Prologue, namespaces and the style sheet, which would leak into the page, are left out: a page
    needs none of them. Black, white and greys become the page's, light or dark; other colours stay.
    """
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg.replace("xlink:href", "href"))
    for colour, variable in _THEME.items():
        svg = re.sub(rf"\b(fill|stroke): {colour}", rf"\1: {variable}", svg)
    view = re.findall(r'viewBox="[\d. ]+"', svg)[0]
    width = re.findall(r'width="([\d.]+)pt"', svg)[0]
    body = svg[svg.index(">") + 1 :].rstrip()
    return Markup(f'<svg {view} width="{width}pt" role="img" aria-label="{escape(label)}">{body}')


WrongByTask: TypeAlias = "Mapping[str, Sequence[WrongAnswer]]"
Pairs = list[tuple[str, str]]


def write_page(document: ResultsDocument, path: Path, wrong: WrongByTask | None = None) -> None:
    """Write the page, whole or not at all.

    Args:
        wrong: answers of each task to show beside their references.

    Raises:
        KvtoolError: the file cannot be written.
    """
    write_text(path, page(document, wrong))


def page(document: ResultsDocument, wrong: WrongByTask | None = None) -> str:
    """Return the page as text."""
    named = labels(document)
    document, wrong = (
        labelled(document),
        {
            task: [replace(each, variant=named.get(each.variant, each.variant)) for each in answers]
            for task, answers in (wrong or {}).items()
        },
    )
    loader = FileSystemLoader(data_file("report/page.html").parent)
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return templates.get_template("page.html").render(
        name=document.name,
        subtitle=_subtitle(document),
        warnings=_warnings(document),
        verdict=_verdict(document),
        claim=_claim(document),
        scores=tables.summary(document),
        means=tables.means(document),
        costs=tables.costs(document),
        differences=words.differences_table(document) if document.differences else None,
        gates=tables.gates(document) if document.gates else None,
        tasks=[_task(document, task, wrong.get(task)) for task in task_names(document)],
        drawn=installed("plots"),
        pictures=_pictures(document),
        notes=words.notes(document),
        facts=_facts(document),
        command=shlex.join(document.argv),
        made_by=_made_by(document),
    )


def _subtitle(document: ResultsDocument) -> str:
    variants, tasks = len(document.variants), len(task_names(document))
    said = f"{variants} variant{'s' * (variants != 1)}, {tasks} task{'s' * (tasks != 1)}"
    return f"{document.model.id}: {said}, {document.finished}"


def _warnings(document: ResultsDocument) -> list[str]:
    warnings = []
    if not document.complete:
        warnings.append("The run is not complete: samples are missing.")
    if failed := sum(result.failed for result in document.results):
        warnings.append(f"{failed} samples failed and are not in the scores.")
    if missed := sum(not gate.passed for gate in document.gates):
        warnings.append(f"{missed} of {len(document.gates)} gates are not met.")
    return warnings


def _verdict(document: ResultsDocument) -> dict[str, object] | None:
    if document.verdict is None:
        return None
    why, choices = document.verdict.why, words.choices_in_words(document)
    said = f"No verdict: {why}." if why else f"The cheapest {words.rule(document)}:"
    return {"said": said, "choices": choices, "variants": words.standings_table(document)}


def _claim(document: ResultsDocument) -> dict[str, object] | None:
    claim, found = document.claim, document.claim_verdict
    if claim is None or found is None:
        return None
    said = [("paper", claim.paper or ""), ("others", claim.others or "")]
    return {
        "said": f"{claim.says}: {words.claim_in_words(found)}.",
        "by": [(name, text) for name, text in said if text],
        "rows": words.claim_table(found),
    }


def _task(
    document: ResultsDocument, task: str, wrong: Sequence[WrongAnswer] | None
) -> dict[str, object]:
    some = results_of(document, task)[0]
    facts = [
        ("protocol", some.protocol),
        ("version", str(some.version)),
        ("question", f"{some.question}: {words.QUESTIONS[some.question]}"),
        ("settings", ", ".join(f"{key}={value}" for key, value in some.settings.items()) or "none"),
        ("fingerprint", some.fingerprint),
    ]
    metrics, cells = tables.task(document, task), tables.cells(document, task)
    return {
        "name": task,
        "facts": facts,
        "metrics": metrics,
        "cells": cells,
        "wrong": tables.wrong(wrong) if wrong else None,
        "meanings": tables.meanings(document, task),
    }


def _facts(document: ResultsDocument) -> Pairs:
    model, place = document.model, document.environment
    return [
        ("model", model.id),
        ("revision", model.revision or "none"),
        ("config hash", model.config_hash),
        ("shape", f"{model.layers} layers, {model.kv_heads} KV heads of {model.head_dim}"),
        ("trained length", f"{model.trained_length or 'not told'}"),
        ("dtype, device", f"{model.dtype} on {model.device}"),
        ("attention", model.attn_implementation),
        ("seed", str(document.seed)),
        ("started", document.started),
        ("finished", f"{document.finished}{_took(document)}"),
        ("machine", f"{place.os}; {place.cpu}, {place.threads} threads"),
        ("GPU", f"{place.gpu}, CUDA {place.cuda}" if place.gpu else "none"),
    ]


def _made_by(document: ResultsDocument) -> str:
    place = document.environment
    commit = f" (commit {document.git_commit})" if document.git_commit else ""
    packages = ", ".join(f"{name} {version}" for name, version in place.packages.items())
    return f"kvtool {document.kvtool}{commit}, Python {place.python}, {packages}"


def _took(document: ResultsDocument) -> str:
    try:
        start, end = (datetime.fromisoformat(t) for t in (document.started, document.finished))
        return f" ({(end - start).total_seconds() / 60:.1f} minutes)"
    except (ValueError, TypeError):  # one has a time zone, the other none
        return ""


def _pictures(document: ResultsDocument) -> dict[str | None, list[tuple[str, Markup]]]:
    """Return titles and pictures as inline SVG, by the task that they belong to."""
    found: dict[str | None, list[tuple[str, Markup]]] = defaultdict(list)
    if not installed("plots"):
        return found
    with drawing():
        for rank, picture in enumerate(pictures(document)):
            drawn = inline_svg(svg(picture.draw()), f"p{rank}", picture.title)
            found[picture.task].append((picture.title, drawn))
    return found
