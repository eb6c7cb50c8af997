"""The settings of `kvtool eval` and `kvtool.evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvtool.calls.base_settings import DecodingSettings, RecipeSettings
from kvtool.documents.settings import Asking, as_flags, flag
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

    prefill: str | None = flag(
        "--prefill=full|block[:M]", "Read prompts whole, or in blocks.", key="prefill"
    )
    fail_under: list[str] = flag(
        "--fail-under=TASK=V", "Exit 3 if a variant scores worse than V on a task.", default=[]
    )
    max_drop: float | None = flag(
        "--max-drop=PCT",
        "Exit 3 if a variant is more than PCT percent worse than the full cache.",
        min=0,
    )
    within: float | None = flag(
        "--within=PCT",
        "The verdict names the cheapest variants that score within PCT percent of the "
        "full cache.  [default: 5]",
        key="eval.within",
    )
    guarantee: float | None = flag(
        "--guarantee=PCT",
        "Say which of the budgets lose at most PCT percent of answers, at 95 % confidence.",
        key="eval.guarantee",
    )
    compare: list[str] = flag(
        "--compare=A,B",
        "Compare two policies, or variants (h2o@64); repeat it. p-values are corrected "
        "for the number of comparisons.",
        key="eval.compare",
        default=[],
    )
    continue_on_error: bool = flag(
        "--continue-on-error/--stop-on-error",
        "After a failing sample go on, and exit 4 at the end.",
        default=True,
    )
    overwrite: bool = flag(
        "--overwrite/--resume", "Start anew in a folder that holds a run.", default=False
    )
    rescore: str | None = flag(
        "--rescore=DIR", "Score a run's stored answers anew; no model.", python=None
    )
    plots: bool | None = flag(
        "--plots/--no-plots", "Draw pictures.  [default: if matplotlib is there]", python=None
    )
    output: str | None = flag(
        "--output -o=DIR", "Folder of the run.  [default: under runs/]", python=None
    )

    # other commands have no scores for a table
    format: EvalFormat | None = flag(
        "--format -f",
        "Form of the data; csv: a row for each variant and task; latex, markdown: the "
        "table; board: RULER's scores in the layout of kvpress' leaderboard.  "
        "[default: text on a terminal, else json]",
        python=None,
    )  # type: ignore[assignment]

    def gates(self) -> list[Gate]:
        """Return the gates that hold for every task."""
        from kvtool.evaluation.run.gates import Gate

        return [] if self.max_drop is None else [Gate("*", max_drop=self.max_drop)]

    @property
    def output_path(self) -> Path | None:
        """Data always goes to stdout; the run has its folder."""
        return None


@dataclass(frozen=True, kw_only=True)
class EvalSettings(DecodingSettings, _AskingFlags, _HowSettings):
    """A comparison; None is what the recipe says, or the default."""

    tasks: list[str] = flag(
        "--tasks -t=TASK,..",
        "Tasks, suites or globs: niah, ruler, 'ruler/niah_*', longbench/qasper ..; "
        "qa: questions of your own; MODULE:CLASS: a task of your own.",
        default=[],
    )
    policy: list[str] = flag(
        "--policy -p=POLICY,..",
        "Policies; see `kvtool policies`.",
        env="KVTOOL_POLICY",
        python="policies",
        default=[],
    )
    budget: list[str] = flag(
        "--budget -b=SIZE,..",
        "Budgets: tokens (512, 4K), shares of the prompt (20%), bytes (64MiB), "
        "auto: what is free.  "
        f"[default: {DEFAULT_TOKENS}]",
        env="KVTOOL_BUDGET",
        python="budgets",
        default=[],
    )
    baseline: bool | None = flag(
        "--baseline/--no-baseline",
        "Run the full cache beside.  [default: baseline]",
        key="eval.baseline",
    )
    lengths: str | None = flag("--lengths=N,..", "Prompt lengths of generated tasks (1K,4K).")
    depths: str | None = flag(
        "--depths=N|PCT,..",
        "Needle depths: how many from 0 to 100 %, or which (50%; 0,25,90); of trace, chain: steps.",
    )
    samples: int | None = flag(
        "--samples=N",
        "Samples of each cell (length, depth ..) of a task; answers to each problem of gsm8k ..",
        min=1,
    )
    limit: int | None = flag(
        "--limit -L=N",
        "Run N samples of each task, spread over its lengths and depths.",
        min=1,
        key="eval.limit",
    )
    data: list[str] = flag(
        "--data=TASK=FILE|HUB_ID",
        "Data of a task, a suite or a glob; repeat it. A FILE alone is for one task. "
        "haystack=FILE: the text around needles.",
        default=[],
    )
    prompts: str | None = flag("--prompts=FILE", "LongBench's own prompt templates (JSON).")
