"""Models of commands: loaded, attached, and what a user is told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtool.cli.options import ModelOptions
from kvtool.cli.terminal import Terminal
from kvtool.errors import UsageError
from kvtool.models.load import REFERENCE, Loaded, load
from kvtool.processes import started

_MODEL_SETTINGS = (
    "revision",
    "dtype",
    "device",
    "device_map",
    "tensor_parallel",
    "attn_implementation",
)


def check_alone(command: str) -> None:
    """Refuse to do the same work in each of several processes.

    Raises:
        UsageError: this is one of several.
    """
    count = started().count
    if count > 1:
        raise UsageError(
            f"{count} processes were started, and kvtool {command} runs in one",
            hint="generate --tensor-parallel splits the model over them, eval shares its samples",
        )


def load_model(options: ModelOptions, terminal: Terminal) -> Loaded:
    """Load the model of a command, and say which one it is where nobody named one."""
    note_model(options.model, terminal)
    settings = {name: getattr(options, name, None) for name in _MODEL_SETTINGS}
    return load_attached(options.model, settings, options.trust_remote_code, terminal)


def load_attached(
    model: str | None, settings: dict[str, Any], trust_remote_code: bool, terminal: Terminal
) -> Loaded:
    """Load a model, make it run kvtool's attention, and say what its family limits.

    Args:
        settings: further arguments of `kvtool.models.load.load`.
    """
    from kvtool.cache.attention import attach, notes

    loaded = load(
        model, **settings, trust_remote_code=trust_remote_code, progress=terminal.progress
    )
    attach(loaded.model)
    for line in notes(loaded.model.config):
        terminal.note(line)
    return loaded


def note_model(model: str | None, terminal: Terminal) -> None:
    """Say that the bundled model is used where nobody asked for it, or that the hub is asked."""
    if model is None:
        terminal.note(f"model: {REFERENCE} (bundled; choose another with --model)")
    elif model != REFERENCE and not Path(model).expanduser().is_dir():
        terminal.note(f"model: {model} (no such folder here, asking the hub)")
