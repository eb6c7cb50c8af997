"""What `kvtool plan-budget` is asked: its options, and the target they mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from kvtool.cli.options import ModelOptions
from kvtool.documents.files import check_writable, expand
from kvtool.errors import UsageError
from kvtool.policies.allocate.table import ALLOCATORS

if TYPE_CHECKING:
    from kvtool.calls.plan_settings import PlanSettings

_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """Options of `kvtool plan-budget`."""

    profile: Annotated[
        str | None,
        Argument(metavar="[PROFILE|-]", help="What `kvtool profile` measured; - reads stdin."),
    ] = None
    budget: Annotated[
        str | None,
        Option("--budget", "-b", metavar="TOKENS", help="Mean tokens per layer and KV head."),
    ] = None
    ratio: Annotated[
        str | None, Option("--ratio", metavar="R", help="Share of the prompt (20%, 0.2).")
    ] = None
    bytes: Annotated[
        str | None,
        Option(
            "--bytes",
            metavar="SIZE",
            help="Memory held in all layers and rows, the policy's own numbers included (64MiB).",
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        Option(
            "--dtype",
            help="Of keys and values.  [default: the checkpoint's own; without --model what the "
            "bundled one runs in here]",
        ),
    ] = None
    context: Annotated[
        str | None,
        Option(
            "--context",
            metavar="N",
            help="Tokens of the longest prompt and answer.  [default: the profile's, else what "
            "the model was trained for]",
        ),
    ] = None
    max_new_tokens: Annotated[
        str | None,
        Option(
            "--max-new-tokens", "-n", metavar="N", help="Generated tokens of these.  [default: 0]"
        ),
    ] = None
    batch: Annotated[int, Option("--batch", min=1, metavar="N", help="Rows that run together.")] = 1
    policy: Annotated[
        str | None,
        Option("--policy", "-p", metavar="POLICY", help="What will run; see `kvtool policies`."),
    ] = None
    allocator: Annotated[
        str | None,
        Option(
            "--allocator",
            metavar="NAME",
            help=f"{', '.join(ALLOCATORS)}.  [default: d2o with a profile, else uniform]",
        ),
    ] = None
    min_tokens: Annotated[
        str | None,
        Option("--min-tokens", metavar="N", help="Least tokens of a layer.  [default: 8]"),
    ] = None
    recommend: Annotated[
        str | None,
        Option(
            "--recommend",
            metavar="RESULTS",
            help="Plan the best arm of a run that fits into --bytes: its folder or results.json.",
        ),
    ] = None
    plot: Annotated[
        str | None, Option("--plot", metavar="FILE", help="Draw the plan (.png, .svg, .pdf).")
    ] = None

    @property
    def plot_path(self) -> Path | None:
        """The picture to draw."""
        return None if self.plot is None else expand(self.plot)

    def settings(self) -> PlanSettings:
        """Return what is asked for."""
        from kvtool.calls.plan_settings import PlanModel, PlanSettings, read_target

        return PlanSettings(
            budget=read_target(self.budget, self.ratio, self.bytes),
            model=PlanModel(
                name=self.model,
                revision=self.revision,
                dtype=self.dtype,
                device=self.device,
                device_map=self.device_map,
                trust_remote_code=self.trust_remote_code,
            ),
            profile=self.profile,
            context=self.context,
            max_new_tokens=self.max_new_tokens,
            batch=self.batch,
            policy=self.policy,
            allocator=self.allocator,
            min_tokens=self.min_tokens,
            recommend=self.recommend,
        )


def check_paths(options: PlanOptions) -> None:
    """Refuse files that could not be written at the end."""
    options.check_output()
    path = options.plot_path
    if path is None:
        return
    from kvtool.extras import require

    if path.suffix.lower() not in _PICTURES:
        raise UsageError(f"--plot must end in {', '.join(_PICTURES)}, got `{options.plot}`")
    check_writable(path, "--plot")
    require("plots", needed_by="--plot")
