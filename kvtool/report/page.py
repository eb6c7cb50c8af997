"""A results document as one HTML file, to read, send and print.

The file stands alone: no script, no style sheet, font or picture from elsewhere. Without
matplotlib it has the tables only, and says how to get the pictures.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from kvtool.documents.files import write_text
from kvtool.documents.results import ResultsDocument
from kvtool.evaluation.extras import installed
from kvtool.report import page_tables as tables
from kvtool.report.markup import Markup, element, inline_svg
from kvtool.report.notes import notes
from kvtool.report.variants import results_of, task_names

_NO_PICTURES = (
    "This page has no pictures because matplotlib is not installed:",
    "pip install 'kvtool[plots]'",
    "then write the page again; nothing has to be measured again.",
)


def write_page(document: ResultsDocument, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        KvtoolError: the file cannot be written.
    """
    write_text(path, page(document))


def page(document: ResultsDocument) -> str:
    """Return the page as text."""
    figures = _figures(document)
    body: list[str] = [
        _opening(document),
        _section("Summary", tables.summary(document), figures[None], _no_pictures()),
        _section("Gates", tables.gates(document)) if document.gates else "",
        *(_task(document, task, figures[task]) for task in task_names(document)),
        _section(
            "How to read it", element("ul", [element("li", note) for note in notes(document)])
        ),
        _section("What was run", _facts(document)),
        _section("To run it again", _again(document)),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{document.name} - kvtool"),
        Markup(f"<style>\n{_style()}</style>"),
    )
    whole = element(
        "html", head, element("body", element("main", [[part, "\n"] for part in body])), lang="en"
    )
    return f"<!doctype html>\n{whole}\n"


def _style() -> str:
    """Return the style sheet: light and dark, on screen and on paper, no file but the page."""
    return files(__package__).joinpath("page.css").read_text("utf-8")


def _section(title: str, *parts: str | list[Markup]) -> Markup:
    return element("section", element("h2", title), *parts)


def _opening(document: ResultsDocument) -> Markup:
    arms, tasks = len(document.arms), len(task_names(document))
    said = f"{arms} arm{'s' * (arms != 1)}, {tasks} task{'s' * (tasks != 1)}"
    line = f"{document.model.id}: {said}, {document.finished}"
    warnings = []
    if not document.complete:
        warnings.append("The run is not complete: samples are missing.")
    if failed := sum(result.failed for result in document.results):
        warnings.append(f"{failed} samples failed and are not in the scores.")
    if missed := sum(not gate.passed for gate in document.gates):
        warnings.append(f"{missed} of {len(document.gates)} gates are not met.")
    return element(
        "header",
        element("h1", document.name),
        element("p", line, class_="soft"),
        [element("p", warning, class_="warning") for warning in warnings],
    )


def _task(document: ResultsDocument, task: str, figures: list[Markup]) -> Markup:
    some = results_of(document, task)[0]
    told = [
        ("protocol", some.protocol),
        ("version", str(some.version)),
        ("queries", "known while compressing" if some.query_aware else "unknown to compression"),
        ("settings", ", ".join(f"{key}={value}" for key, value in some.settings.items()) or "none"),
        ("fingerprint", some.fingerprint),
    ]
    return _section(
        task, _list(told), tables.task(document, task), tables.cells(document, task), figures
    )


def _facts(document: ResultsDocument) -> Markup:
    model, place = document.model, document.environment
    return _list(
        [
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
    )


def _again(document: ResultsDocument) -> list[Markup]:
    place = document.environment
    commit = f" (commit {document.git_commit})" if document.git_commit else ""
    packages = ", ".join(f"{name} {version}" for name, version in place.packages.items())
    made = f"kvtool {document.kvtool}{commit}, Python {place.python}, {packages}"
    return [element("pre", shlex.join(document.argv)), element("p", made, class_="soft")]


def _took(document: ResultsDocument) -> str:
    try:
        start, end = (datetime.fromisoformat(t) for t in (document.started, document.finished))
        return f" ({(end - start).total_seconds() / 60:.1f} minutes)"
    except (ValueError, TypeError):  # one has a time zone, the other none
        return ""


def _list(pairs: list[tuple[str, str]]) -> Markup:
    return element("dl", [[element("dt", key), element("dd", value)] for key, value in pairs])


def _figures(document: ResultsDocument) -> dict[str | None, list[Markup]]:
    """Return the pictures as inline SVG by the task that they belong to."""
    found: dict[str | None, list[Markup]] = defaultdict(list)
    if not installed("plots"):
        return found
    from kvtool.report.pictures import pictures
    from kvtool.report.style import drawing, svg

    with drawing():
        for rank, picture in enumerate(pictures(document)):
            drawn = inline_svg(svg(picture.draw()), f"p{rank}", picture.title)
            found[picture.task].append(
                element("figure", element("figcaption", picture.title), drawn)
            )
    return found


def _no_pictures() -> str | Markup:
    if installed("plots"):
        return ""
    before, command, after = _NO_PICTURES
    return element("p", f"{before} ", element("code", command), f", {after}", class_="soft")
