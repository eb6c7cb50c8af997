"""`kvtool profile`: measure how a model uses its cache, as a basis for budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.calls.profile import ProfileSettings, request_of
from kvtool.cli.output import write_configuration, write_shown
from kvtool.cli.terminal import Terminal, TerminalWatcher
from kvtool.documents.files import check_unicode
from kvtool.errors import UsageError
from kvtool.models.folder import REFERENCE, check_folder
from kvtool.processes import check_alone
from kvtool.profiling.request import OF_POLICY, ProfileRequest, parse_metrics
from kvtool.transformers_versions import check_transformers

if TYPE_CHECKING:
    from kvtool.evaluation.profiled import Profiled

_IN_A_FILE = {"key_basis": "key bases", "query_centres": "centres of queries"}


def profile(options: ProfileSettings, terminal: Terminal) -> None:
    """Measure how each layer uses its cache: what plan-budget makes budgets of."""
    check_alone("profile")
    _check_paths(options, terminal)
    request = _read_request(options)
    if options.dry_run:
        write_configuration(_configuration(options, request), options, terminal)
        return
    check_transformers()
    terminal.loading(options.model)
    from kvtool.evaluation.profiled import run_profile

    source, watcher = options.source(), TerminalWatcher(terminal)
    profiled = run_profile(request, source, heads_path=options.heads_path, watcher=watcher)
    _write(profiled, options, terminal)


def _write(profiled: Profiled, options: ProfileSettings, terminal: Terminal) -> None:
    document = profiled.document
    if options.plot_path is not None:
        from kvtool.report.measurements import draw_profile

        draw_profile(document, profiled.heads, options.plot_path)
        terminal.note(f"wrote {options.plot_path}")
    write_shown(document, options, terminal)


def _check_paths(options: ProfileSettings, terminal: Terminal) -> None:
    """Refuse what could not be read or written, without importing torch."""
    metrics = parse_metrics(options.metrics)
    options.check_memory(used=False)
    options.check_output()
    if options.heads_path is not None:
        check_unicode(options.heads_path.name, "--output:")
    if options.plot_path is not None and metrics == ("memory",):
        raise UsageError("--plot: memory alone has no picture", hint="leave out --plot")
    check_folder(options.model, config_only=metrics == ("memory",))
    for metric, what in _IN_A_FILE.items():
        if metric in metrics and options.heads_path is None:
            terminal.note(f"note: the {what} go to a file beside the profile; name it, -o FILE")


def _read_request(options: ProfileSettings) -> ProfileRequest:
    budgets = options.budgets.split(",") if options.budgets else None
    return request_of(options, options.metrics, [] if options.budgets == "" else budgets)


def _configuration(options: ProfileSettings, request: ProfileRequest) -> dict[str, Any]:
    """Return what a dry run prints."""
    plan = request.plan
    settings: dict[str, Any] = {
        "model": options.model or REFERENCE,
        "revision": options.revision,
        "dtype": options.dtype or "auto",
        "metrics": [*plan.metrics, *(["memory"] if plan.memory else [])],
    }
    if plan.metrics:
        settings["data"] = {
            "source": options.data,
            "samples": options.samples,
            "tokens": request.tokens,
            "decode": plan.steps,
            "seed": options.seed or 0,
        }
    if options.memory_there is not None:
        from kvtool.calls.fitting import estimate_text

        settings["memory"] = estimate_text(options, request.tokens, plan.steps)
    for name in OF_POLICY:
        if name in plan.metrics:
            settings[name] = {"policy": str(plan.policy), "budgets": list(plan.budgets)}
    if plan.heads:
        settings["answer_loss"]["heads"] = True
    return settings
