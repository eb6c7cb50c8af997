"""The settings of `kvtool eval` and `kvtool.evaluate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from kvtool.calls.base_settings import RecipeSettings
from kvtool.documents.settings import Asking, Flag, as_flags
from kvtool.sizes import DEFAULT_TOKENS

if TYPE_CHECKING:
    from kvtool.evaluation.run.gates import Gate

    class _AskingFlags:
        pass

else:
    _AskingFlags = as_flags(Asking, under="eval")

EvalFormat = Literal["text", "json", "yaml", "csv", "latex", "markdown", "board"]


@dataclass(frozen=True, kw_only=True)
class _HowSettings(RecipeSettings):
    """How prompts are read, what a run must reach, and where it goes."""

    prefill: Annotated[
        str | None,
        Flag(
            "--prefill",
            metavar="full|block[:M]",
            help="Read prompts whole, or in blocks.",
            key="prefill",
        ),
    ] = None
    fail_under: Annotated[
        list[str],
        Flag(
            "--fail-under",
            metavar="TASK=V",
            help="Exit 3 if a variant scores worse than V on a task.",
        ),
    ] = field(default_factory=list)
    max_drop: Annotated[
        float | None,
        Flag(
            "--max-drop",
            min=0,
            metavar="PCT",
            help="Exit 3 if a variant is more than PCT percent worse than the full cache.",
        ),
    ] = None
    within: Annotated[
        float | None,
        Flag(
            "--within",
            metavar="PCT",
            help="The verdict names the cheapest variants that score within PCT percent of the "
            "full cache.  [default: 5]",
            key="eval.within",
        ),
    ] = None
    compare: Annotated[
        list[str],
        Flag(
            "--compare",
            metavar="A,B",
            help="Compare two policies, or variants (h2o@64); repeat it. p-values are corrected "
            "for the number of comparisons.",
            key="eval.compare",
        ),
    ] = field(default_factory=list)
    continue_on_error: Annotated[
        bool,
        Flag(
            "--continue-on-error/--stop-on-error",
            help="After a failing sample go on, and exit 4 at the end.",
        ),
    ] = True
    overwrite: Annotated[
        bool,
        Flag("--overwrite/--resume", help="Start anew in a folder that holds a run."),
    ] = False
    rescore: Annotated[
        str | None,
        Flag(
            "--rescore",
            metavar="DIR",
            help="Score a run's stored answers anew; no model.",
            python=None,
        ),
    ] = None
    plots: Annotated[
        bool | None,
        Flag(
            "--plots/--no-plots",
            help="Draw pictures.  [default: if matplotlib is there]",
            python=None,
        ),
    ] = None
    output: Annotated[
        str | None,
        Flag(
            "--output -o",
            metavar="DIR",
            help="Folder of the run.  [default: under runs/]",
            python=None,
        ),
    ] = None

    # other commands have no scores for a table
    format: Annotated[
        EvalFormat | None,
        Flag(
            "--format -f",
            help="Form of the data; csv: a row for each variant and task; latex, markdown: the "
            "table; board: RULER's scores in the layout of kvpress' leaderboard.  "
            "[default: text on a terminal, else json]",
            python=None,
        ),
    ] = None  # type: ignore[assignment]

    def gates(self) -> list[Gate]:
        """Return the gates that hold for every task."""
        from kvtool.evaluation.run.gates import Gate

        return [] if self.max_drop is None else [Gate("*", max_drop=self.max_drop)]

    @property
    def output_path(self) -> Path | None:
        """Data always goes to stdout; the run has its folder."""
        return None


@dataclass(frozen=True, kw_only=True)
class EvalSettings(_AskingFlags, _HowSettings):
    """A comparison; None is what the recipe says, or the default."""

    tasks: Annotated[
        list[str],
        Flag(
            "--tasks -t",
            metavar="TASK,..",
            help="Tasks, suites or globs: niah, ruler, 'ruler/niah_*', longbench/qasper ..; "
            "qa: questions of your own; MODULE:CLASS: a task of your own.",
        ),
    ] = field(default_factory=list)
    policy: Annotated[
        list[str],
        Flag(
            "--policy -p",
            metavar="POLICY,..",
            help="Policies; see `kvtool policies`.",
            env="KVTOOL_POLICY",
            python="policies",
        ),
    ] = field(default_factory=list)
    budget: Annotated[
        list[str],
        Flag(
            "--budget -b",
            metavar="SIZE,..",
            help="Budgets: tokens (512, 4K), shares of the prompt (20%), bytes (64MiB), "
            "auto: what is free.  "
            f"[default: {DEFAULT_TOKENS}]",
            env="KVTOOL_BUDGET",
            python="budgets",
        ),
    ] = field(default_factory=list)
    baseline: Annotated[
        bool | None,
        Flag(
            "--baseline/--no-baseline",
            help="Run the full cache beside.  [default: baseline]",
            key="eval.baseline",
        ),
    ] = None
    lengths: Annotated[
        str | None,
        Flag("--lengths", metavar="N,..", help="Prompt lengths of generated tasks (1K,4K)."),
    ] = None
    depths: Annotated[
        str | None,
        Flag(
            "--depths",
            metavar="N|PCT,..",
            help="Needle depths: how many from 0 to 100 %, or which (50%; 0,25,90); of trace: "
            "steps.",
        ),
    ] = None
    samples: Annotated[
        int | None,
        Flag(
            "--samples",
            min=1,
            metavar="N",
            help="Samples of each cell (length, depth ..) of a task; answers to each problem of "
            "gsm8k ..",
        ),
    ] = None
    limit: Annotated[
        int | None,
        Flag(
            "--limit -L",
            min=1,
            metavar="N",
            help="Run N samples of each task, spread over its lengths and depths.",
            key="eval.limit",
        ),
    ] = None
    data: Annotated[
        list[str],
        Flag(
            "--data",
            metavar="TASK=FILE|HUB_ID",
            help="Data of a task, a suite or a glob; repeat it. A FILE alone is for one task. "
            "haystack=FILE: the text around needles.",
        ),
    ] = field(default_factory=list)
    prompts: Annotated[
        str | None,
        Flag("--prompts", metavar="FILE", help="LongBench's own prompt templates (JSON)."),
    ] = None
