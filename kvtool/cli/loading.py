"""Models of commands: loaded, attached, and what a user is told of them."""

from __future__ import annotations

from kvtool.cli.options import ModelOptions
from kvtool.cli.terminal import Terminal
from kvtool.documents.flags import MODEL_SETTINGS
from kvtool.errors import UsageError
from kvtool.models.load import Loaded
from kvtool.models.notes import model_note
from kvtool.processes import started


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
    from kvtool.models.attached import load_attached

    terminal.note_any(model_note(options.model))
    return load_attached(
        options.model,
        {name: getattr(options, name, None) for name in MODEL_SETTINGS},
        trust_remote_code=options.trust_remote_code,
        progress=terminal.progress,
        note=terminal.note,
    )
