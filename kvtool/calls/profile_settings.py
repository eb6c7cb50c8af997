"""The settings of `kvtool profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvtool.calls.base_settings import ModelSettings
from kvtool.documents.files import expand
from kvtool.documents.settings import Flag
from kvtool.evaluation.profile_request import POLICY, SHARES
from kvtool.profiling.names import DEFAULT, METRICS


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(ModelSettings):
    """What is measured, on which texts."""

    data: Annotated[
        str,
        Flag("--data", metavar="FILE|HUB_ID|builtin", help="The texts that are read."),
    ] = "builtin"
    samples: Annotated[int, Flag("--samples", min=1, metavar="N", help="How many texts.")] = 8
    tokens: Annotated[str, Flag("--tokens", metavar="N", help="Tokens of each text (512, 4K).")] = (
        "1024"
    )
    decode: Annotated[
        str,
        Flag("--decode", metavar="N", help="Tokens generated after each text where needed."),
    ] = "128"
    metrics: Annotated[
        str,
        Flag(
            "--metrics",
            metavar="NAME,..",
            help=f"What to measure: {', '.join(METRICS)}.",
        ),
    ] = ",".join(DEFAULT)
    policy: Annotated[
        str | None,
        Flag("--policy -p", metavar="POLICY", help=f"Of output_error.  [default: {POLICY}]"),
    ] = None
    budgets: Annotated[
        str | None,
        Flag(
            "--budgets",
            metavar="SIZE,..",
            help=f"Of output_error, tokens or shares.  [default: {','.join(SHARES)}]",
        ),
    ] = None
    plot: Annotated[
        str | None, Flag("--plot", metavar="FILE", help="Draw the profile (.png, .svg, .pdf).")
    ] = None

    @property
    def plot_path(self) -> Path | None:
        """The picture to write."""
        return None if self.plot is None else expand(self.plot)

    @property
    def heads_path(self) -> Path | None:
        """The file of numbers per head, beside the profile; None where that is piped."""
        return self.output_path and self.output_path.with_suffix(".heads.safetensors")
