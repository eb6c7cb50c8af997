"""`kvtool generate`: text under a KV budget."""

from __future__ import annotations

from typer import Exit

from kvtool.calls.settings import GenerationSettings
from kvtool.cli.generated import listen, show
from kvtool.cli.interruption import Interruption
from kvtool.cli.many_prompts import answer_many
from kvtool.cli.output import write_configuration
from kvtool.cli.side_by_side import set_side_by_side
from kvtool.cli.terminal import Terminal
from kvtool.cli.watching import TerminalWatcher
from kvtool.errors import UsageError


def generate(options: GenerationSettings, terminal: Terminal) -> None:
    """Generate text under a KV-cache budget.

    Without a prompt, a built-in one plants a code in a long text and asks for it.
    """
    options.check_output()
    if options.prompts is not None:
        answer_many(options, terminal)
        return
    for name in ("memory", "skip_bad", "overwrite"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} goes with --prompts", hint="--prompts FILE.jsonl")
    from kvtool.policies.grammar import listed_policies

    policies = listed_policies(options.policy)
    if policies:
        set_side_by_side(policies, options, terminal)
    else:
        _answer(options, terminal)


def _answer(options: GenerationSettings, terminal: Terminal) -> None:
    from kvtool.calls.generate import prepare_generation

    watcher = TerminalWatcher(terminal)
    run = prepare_generation(options, watcher)
    if options.dry_run:
        write_configuration(run.describe(), options, terminal)
        return
    with Interruption() as interrupted:
        generated = run.run(watcher, listen(options, options.stream, terminal, interrupted))
    show(generated.document, options, terminal, interrupted)
    generated.finish(watcher)
    if interrupted.pressed:
        raise Exit(130)
