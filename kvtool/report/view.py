"""Show documents in Python: as data frames, and as tables in a notebook."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvtool.errors import UsageError
from kvtool.report.export import exported as exported
from kvtool.report.kept.text import kept_text as kept_text
from kvtool.report.notebook import html as html
from kvtool.report.rows import rows_of


def frame(document: Any) -> Any:
    """Return the rows of a document as a pandas data frame.

    Raises:
        UsageError: pandas is not installed.
    """
    if find_spec("pandas") is None:
        raise UsageError("to_pandas needs pandas", hint="pip install pandas")
    import pandas

    return pandas.DataFrame(rows_of(document))
