"""Profiles measured in one call: settings checked, texts drawn, the document put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.base_settings import DeviceSettings, ModelSettings
from kvtool.calls.from_python import check_keywords, keywords_of, takes
from kvtool.documents.files import expand
from kvtool.documents.settings import MODEL_SETTINGS, flag
from kvtool.profiling.request import (
    DEFAULT,
    METRICS,
    OF_POLICY,
    POLICY,
    SHARES,
    ProfileRequest,
    read_request,
)
from kvtool.sizes import Budget
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.documents.profile import ProfileDocument


WHOSE = " and ".join(OF_POLICY)


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(DeviceSettings):
    """What is measured, on which texts."""

    data: str = flag(
        "--data=FILE|HUB_ID|TASK|builtin",
        "The texts that are read; for answer_loss also a task, such as niah.",
        default="builtin",
    )
    samples: int = flag("--samples=N", "How many texts.", min=1, default=8)
    tokens: str = flag("--tokens=N", "Tokens of each text (512, 4K).", default="1024")
    decode: str = flag(
        "--decode=N",
        "Tokens generated after each text where needed, or read on (answer_loss).",
        default="128",
    )
    metrics: str = flag(
        "--metrics=NAME,..",
        f"What to measure: {', '.join(METRICS)}; of KV heads as well: answer_loss(heads=true).",
        default=",".join(DEFAULT),
    )
    policy: str | None = flag("--policy -p=POLICY", f"Of {WHOSE}.  [default: {POLICY}]")
    budgets: str | None = flag(
        "--budgets=SIZE,..", f"Of {WHOSE}, tokens or shares.  [default: {','.join(SHARES)}]"
    )
    plot: str | None = flag("--plot=FILE", "Draw the profile (.png, .svg, .pdf).", python=None)

    @property
    def plot_path(self) -> Path | None:
        """The picture to write."""
        return None if self.plot is None else expand(self.plot)

    def outputs(self) -> dict[str, Path | None]:
        return {**super().outputs(), "--output (heads)": self.heads_path, "--plot": self.plot_path}

    @property
    def heads_path(self) -> Path | None:
        """The file of numbers per head, beside the profile; None where that is piped."""
        return self.output_path and self.output_path.with_suffix(".heads.safetensors")


def request_of(
    settings: ProfileSettings, metrics: str | Sequence[str], budgets: Sequence[str] | None
) -> ProfileRequest:
    """Check the settings of a profile, and that the texts which it reads are there.

    Args:
        metrics, budgets: take the place of those of the settings.

    Raises:
        UsageError: the first setting that is wrong, a file that is not there.
    """
    request = read_request(
        metrics,
        data=settings.data,
        samples=settings.samples,
        tokens=settings.tokens,
        decode=settings.decode,
        policy=settings.policy,
        budgets=budgets,
        seed=settings.seed or 0,
    )
    if not request.memory_alone:
        from kvtool.evaluation.profile_texts import check_source

        check_source(settings.data, request.plan.metrics)
    return request


_LEFT_OUT = ("device_memory",)  # of a dry run


@takes(ProfileSettings, leave_out=_LEFT_OUT)
def profile(
    model: Any = None,
    texts: Sequence[str] | None = None,
    *,
    metrics: str | Sequence[str] = DEFAULT,
    tokenizer: Any = None,
    budgets: Sequence[int | float | str] | None = None,
    heads: str | Path | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> ProfileDocument:
    """Measure how each layer of a model uses its cache: what budgets are planned from.

    Args:
        model: a folder, a hub ID or a loaded model (then with its `tokenizer`); None is the
            bundled reference model.
        texts: what is read, in place of `data`.
        heads: where the numbers per head go (safetensors).
        watcher: takes notes and progress; None: no caller does.

    `settings` are those of `ProfileSettings`; each is what the option of `kvtool profile` with its
    name is.

    Raises:
        UsageError: settings that are wrong or do not go together, no text that is long enough.
        KvtoolError: data or weights that cannot be read.
    """
    known = keywords_of(ProfileSettings, leave_out=_LEFT_OUT)
    check_keywords("profile", settings, [*known, *MODEL_SETTINGS])
    from kvtool.evaluation.profiled import run_profile
    from kvtool.models.attached import ModelSource

    loading = {*MODEL_SETTINGS, *ModelSettings().checkpoint()}
    asked = ProfileSettings(**{key: settings[key] for key in settings.keys() - loading})
    sizes = None if budgets is None else [str(Budget.parse(budget)) for budget in budgets]
    request = request_of(asked, metrics, sizes)
    if texts is not None:
        request = replace(request, texts=tuple(texts))
    source = ModelSource.of(
        model, tokenizer, **{key: settings[key] for key in settings.keys() & loading}
    )
    source.check(config_only=request.memory_alone)
    return run_profile(
        request,
        source,
        heads_path=None if heads is None else Path(heads),
        watcher=Watcher() if watcher is None else watcher,
    ).document
