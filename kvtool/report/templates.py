"""Write HTML: the pages' templates, and a table for the page and for a notebook."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from kvtool.package_data import data_file
from kvtool.report.table import Table


@lru_cache
def template(name: str) -> Template:
    """Return a template of this folder, which escapes what it is given."""
    file = data_file(f"report/{name}")
    loader = FileSystemLoader(file.parent)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(
        file.name
    )


def html_table(table: Table) -> Markup:
    """Write a table in HTML; its looks are classes, which a notebook does not know."""
    return Markup(template("table.html").render(data=table))
