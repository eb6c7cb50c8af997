"""Options of `kvtool eval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from kvtool.cli.options import RecipeOptions
from kvtool.sizes import DEFAULT_TOKENS

EvalFormat = Literal["text", "json", "yaml", "csv"]


@dataclass(frozen=True, kw_only=True)
class EvalOptions(RecipeOptions):
    """Options of `kvtool eval`; None is what the recipe says, or the default."""

    tasks: Annotated[
        list[str],
        Option(
            "--tasks",
            "-t",
            metavar="TASK,..",
            help="Tasks, suites or globs: niah, ruler, 'ruler/niah_*', longbench/qasper ..",
        ),
    ] = field(default_factory=list)
    policy: Annotated[
        list[str],
        Option("--policy", "-p", metavar="POLICY,..", help="Policies; see `kvtool policies`."),
    ] = field(default_factory=list)
    budget: Annotated[
        list[str],
        Option(
            "--budget",
            "-b",
            metavar="SIZE,..",
            help="Budgets: tokens (512, 4K), shares of the prompt (20%), bytes (64MiB).  "
            f"[default: {DEFAULT_TOKENS}]",
        ),
    ] = field(default_factory=list)
    baseline: Annotated[
        bool | None,
        Option("--baseline/--no-baseline", help="Run the full cache beside.  [default: baseline]"),
    ] = None
    lengths: Annotated[
        str | None,
        Option("--lengths", metavar="N,..", help="Prompt lengths of generated tasks (1K,4K)."),
    ] = None
    depths: Annotated[
        str | None,
        Option(
            "--depths",
            metavar="N|PCT,..",
            help="Needle depths: how many from 0 to 100 %, or which (0,25,90); of trace: steps.",
        ),
    ] = None
    samples: Annotated[
        int | None,
        Option(
            "--samples",
            min=1,
            metavar="N",
            help="Samples of a task, or of each cell of it; answers to each problem of gsm8k ..",
        ),
    ] = None
    limit: Annotated[
        int | None,
        Option("--limit", "-L", min=1, metavar="N", help="Run the first N samples of each task."),
    ] = None
    data: Annotated[
        list[str],
        Option(
            "--data",
            metavar="TASK=FILE|HUB_ID",
            help="Data of a task, a suite or a glob; repeat it.",
        ),
    ] = field(default_factory=list)
    prompts: Annotated[
        str | None,
        Option("--prompts", metavar="FILE", help="LongBench's own prompt templates (JSON)."),
    ] = None
    query_agnostic: Annotated[
        bool, Option("--query-agnostic", help="Compress the context before the question is known.")
    ] = False
    keep_question: Annotated[
        bool, Option("--keep-question", help="With it, keep the question whole beside the budget.")
    ] = False
    chat_template: Annotated[
        Literal["auto", "on", "off"] | None,
        Option("--chat-template", help="Put prompts into the model's chat template."),
    ] = None
    max_length: Annotated[
        str | None,
        Option("--max-length", metavar="N", help="Cut longer prompts to N tokens."),
    ] = None
    truncate: Annotated[
        Literal["middle", "left", "error"] | None,
        Option("--truncate", help="Where long prompts are cut.  [default: middle]"),
    ] = None
    prefill: Annotated[
        str | None,
        Option("--prefill", metavar="full|block[:M]", help="Read prompts whole, or in blocks."),
    ] = None
    shared_prefill: Annotated[
        bool,
        Option(
            "--shared-prefill",
            help="Read each prompt once for all arms that can share the run; its seconds are then "
            "those of all together.",
        ),
    ] = False
    fail_under: Annotated[
        list[str],
        Option(
            "--fail-under", metavar="TASK=V", help="Exit 3 if an arm scores worse than V on a task."
        ),
    ] = field(default_factory=list)
    max_drop: Annotated[
        float | None,
        Option(
            "--max-drop",
            min=0,
            metavar="PCT",
            help="Exit 3 if an arm is more than PCT percent worse than the full cache.",
        ),
    ] = None
    within: Annotated[
        float | None,
        Option(
            "--within",
            metavar="PCT",
            help="The verdict names the cheapest arms that score within PCT percent of the full "
            "cache.  [default: 5]",
        ),
    ] = None
    continue_on_error: Annotated[
        bool,
        Option(
            "--continue-on-error/--stop-on-error",
            help="After a failing sample go on, and exit 4 at the end.",
        ),
    ] = True
    overwrite: Annotated[
        bool,
        Option("--overwrite/--resume", help="Start anew in a folder that holds a run."),
    ] = False
    rescore: Annotated[
        str | None,
        Option("--rescore", metavar="DIR", help="Score a run's stored answers anew; no model."),
    ] = None
    plots: Annotated[
        bool | None,
        Option("--plots/--no-plots", help="Draw pictures.  [default: if matplotlib is there]"),
    ] = None
    output: Annotated[
        str | None,
        Option("--output", "-o", metavar="DIR", help="Folder of the run.  [default: under runs/]"),
    ] = None

    # other commands have no scores for a csv
    format: Annotated[
        EvalFormat | None,
        Option(
            "--format",
            "-f",
            help="Form of the data; csv: RULER's scores in the layout of kvpress' leaderboard.  "
            "[default: text on a terminal, else json]",
        ),
    ] = None  # type: ignore[assignment]

    @property
    def output_path(self) -> Path | None:
        """Data always goes to stdout; the run has its folder."""
        return None
