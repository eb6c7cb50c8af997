"""Results of an earlier run read back from its folder."""

from __future__ import annotations

from pathlib import Path

from kvtool.documents.files import expand
from kvtool.documents.results import ResultsDocument
from kvtool.errors import UsageError
from kvtool.evaluation.run.index import RESULTS, read_results_file


def load_results(folder: str | Path) -> ResultsDocument:
    """Return the results of a run, as `kvtool.evaluate` returned them.

    Nothing that the run names is imported.

    Args:
        folder: of the run, or its `results.json`.

    Raises:
        UsageError: no run is there, or one of another schema version.
        KvtoolError: a damaged file.
    """
    path = expand(str(folder))
    if path.is_dir():
        path = path / RESULTS
    if not path.is_file():
        raise UsageError(
            f"no results in `{folder}`", hint="a run of kvtool eval or kvtool.evaluate has them"
        )
    return read_results_file(path)
