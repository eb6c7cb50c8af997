"""`kvtool profile`: measure how a model uses its cache, as a basis for budgets."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.cli.loading import check_alone, load_model
from kvtool.cli.output import render, write_configuration, write_data
from kvtool.cli.profile_options import ProfileOptions
from kvtool.cli.progress import show_progress
from kvtool.cli.terminal import Terminal
from kvtool.documents.files import check_writable
from kvtool.errors import UsageError
from kvtool.models.load import REFERENCE, check_folder
from kvtool.profiling.names import parse_metrics
from kvtool.sizes import Budget, parse_count

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.documents.profile import HeadsFile, ProfileDocument
    from kvtool.profiling.measure import Plan

_POLICY = "h2o"
_SHARES = ("1/16", "1/8", "1/4", "1/2")
_PICTURES = (".png", ".svg", ".pdf")


def profile(options: ProfileOptions, terminal: Terminal) -> None:
    """Measure how each layer uses its cache: what plan-budget makes budgets of."""
    options = replace(
        options,
        dtype=options.dtype or "auto",
        device=options.device or "auto",
        attn_implementation=options.attn_implementation or "auto",
        seed=options.seed or 0,
    )
    check_alone("profile")
    metrics = parse_metrics(options.metrics)
    _check_paths(options, metrics)
    if "key_basis" in metrics and options.heads_path is None:
        terminal.note("note: the key bases go to a file beside the profile; name it, -o FILE")
    plan, tokens = _resolve(options, metrics)
    if options.dry_run:
        write_configuration(_configuration(options, plan, tokens), options, terminal)
        return
    if metrics == ("memory",):
        document, found = _memory_alone(options, terminal), {}
    else:
        document, found = _measure(options, plan, tokens, terminal)
    form = options.choose_format("text" if terminal.interactive else "yaml")
    if options.plot_path is not None:
        from kvtool.report.profiles import draw_profile

        draw_profile(document, found, options.plot_path)
        terminal.note(f"wrote {options.plot_path}")
    if form == "text" and terminal.interactive and options.output_path is None:
        from kvtool.report.profile_table import profile_table

        terminal.print(profile_table(document))
        return
    text = _as_text(document) if form == "text" else ""
    write_data(render(document, form, text), options, terminal)


def _check_paths(options: ProfileOptions, metrics: tuple[str, ...]) -> None:
    """Refuse what could not be read or written, without importing torch."""
    options.check_output()
    if options.heads_path is not None:
        check_writable(options.heads_path, "--output")
    if options.plot_path is not None:
        if options.plot_path.suffix.lower() not in _PICTURES:
            raise UsageError(
                f"--plot: `{options.plot}` is no picture", hint=f"use {', '.join(_PICTURES)}"
            )
        check_writable(options.plot_path, "--plot")
        if metrics == ("memory",):
            raise UsageError("--plot: memory alone has no picture", hint="leave out --plot")
        from kvtool.evaluation.extras import require

        require("plots", needed_by="--plot")
    check_folder(options.model, config_only=metrics == ("memory",))


def _resolve(options: ProfileOptions, metrics: tuple[str, ...]) -> tuple[Plan, int]:
    """Check everything that can be checked without the model."""
    tokens = _count(options.tokens, "--tokens")
    decode = _count(options.decode, "--decode")
    policy, budgets = _POLICY, ()
    if "output_error" in metrics:
        policy, budgets = _error_settings(options, tokens)
    else:
        for flag, value in (("--policy", options.policy), ("--budgets", options.budgets)):
            if value is not None:
                raise UsageError(
                    f"{flag} is that of output_error, which is not measured",
                    hint=f"--metrics {options.metrics},output_error",
                )
    if metrics != ("memory",):
        from kvtool.cli.profile_texts import check_source

        check_source(options.data)
    from kvtool.profiling.measure import Plan

    measured = tuple(name for name in metrics if name != "memory")
    return Plan(measured, decode, policy, budgets, memory="memory" in metrics), tokens


def _count(text: str, flag: str) -> int:
    count = parse_count(text)
    if count < 1:
        raise UsageError(f"{flag} must be 1 or more, got {count}")
    return count


def _error_settings(options: ProfileOptions, tokens: int) -> tuple[str, tuple[int, ...]]:
    """Return the policy of `output_error` and its budgets in tokens, ascending."""
    from kvtool.policies.grammar import parse_policy

    policy = parse_policy(options.policy or _POLICY)
    if not policy.takes_budget:
        raise UsageError(f"policy `{policy}` keeps everything, so it has no output error")
    if policy.score.layers == "same":
        raise UsageError(
            f"policy `{policy}` goes by the model's logits, "
            "and output errors are measured layer by layer"
        )
    if policy.allocator is not None:
        base = "snapkv" if policy.allocate is None else replace(policy, allocate=None)
        raise UsageError(
            f"policy `{policy}` splits a budget over the layers; "
            "output errors are measured with the same in each",
            hint=f"--policy {base}",
        )
    sizes = options.budgets.split(",") if options.budgets else _SHARES
    budgets = set()
    for size in map(Budget.parse, filter(None, map(str.strip, sizes))):
        if size.bytes is not None:
            raise UsageError(
                f"--budgets: {size} is a size of the whole cache", hint="use tokens or shares"
            )
        budget = size.for_prompt(tokens)
        if budget > tokens:
            raise UsageError(f"--budgets: {budget} is above the {tokens} tokens of a text")
        policy.check_budget(budget)
        budgets.add(budget)
    return str(policy), tuple(sorted(budgets))


def _memory_alone(options: ProfileOptions, terminal: Terminal) -> ProfileDocument:
    from kvtool.documents.model_shape import ModelShape
    from kvtool.documents.profile import Metrics, ProfileDocument
    from kvtool.models.load import load_config
    from kvtool.profiling.memory import memory_table

    if options.model is None:
        terminal.note(f"model: {REFERENCE} (bundled; choose another with --model)")
    config = load_config(
        options.model, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    revision = options.revision or getattr(config, "_commit_hash", None)
    name = options.model or REFERENCE
    return ProfileDocument(
        model=ModelShape.of(config, name=name, revision=revision, dtype=options.dtype),
        metrics=Metrics(memory=memory_table(config, options.dtype)),
    )


def _measure(
    options: ProfileOptions, plan: Plan, tokens: int, terminal: Terminal
) -> tuple[ProfileDocument, dict[str, Tensor]]:
    from kvtool.cli.profile_texts import draw_texts
    from kvtool.documents.model_shape import ModelShape
    from kvtool.documents.profile import ProfileDocument
    from kvtool.evaluation.run.environment import without_home
    from kvtool.models.load import load_tokenizer
    from kvtool.profiling.measure import measure
    from kvtool.profiling.memory import memory_table
    from kvtool.profiling.summary import summarise

    tokenizer, config = load_tokenizer(
        options.model, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    _check_length(config, tokens, plan.steps)
    texts, data = draw_texts(
        tokenizer, source=options.data, samples=options.samples, tokens=tokens, seed=options.seed
    )
    if len(texts) < options.samples:
        terminal.note(f"note: {options.data} has only {len(texts)} texts of {tokens} tokens")
    loaded = load_model(options, terminal)
    with show_progress(terminal, len(texts)) as advance:
        found = measure(loaded.model, texts, plan, lambda done: advance(f"text {done}"))
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    memory = memory_table(loaded.model.config, dtype) if plan.memory else None
    metrics, curves = summarise(found, plan, memory)
    document = ProfileDocument(
        model=ModelShape.of(
            loaded.model.config,
            name=without_home(loaded.name),
            revision=loaded.revision,
            dtype=dtype,
        ),
        data=data.model_copy(
            update={"source": without_home(data.source), "decode": plan.steps or None}
        ),
        metrics=metrics,
        curves=curves,
        heads_file=_save_heads(options.heads_path, found),
    )
    return document, found


def _check_length(config: Any, tokens: int, steps: int) -> None:
    from kvtool.model_shape import trained_length

    limit = trained_length(config)
    if limit is not None and tokens + steps > limit:
        told = f"{tokens} tokens" + (f" and {steps} decoded" if steps else "")
        raise UsageError(
            f"{told} are more than the {limit} positions of this model",
            hint=f"--tokens {limit - steps}"
            if limit > steps
            else f"--decode {limit // 2} or fewer",
        )


def _save_heads(path: Path | None, found: dict[str, Tensor]) -> HeadsFile | None:
    """Write the numbers per head, whole or not at all."""
    if path is None:
        return None
    from kvtool.cache.tensor_files import write_tensors
    from kvtool.documents.profile import HeadsFile
    from kvtool.evaluation.samples.data_files import digest

    tensors = {name: values.contiguous() for name, values in sorted(found.items())}
    metadata = {"kind": "kvtool.heads", "schema_version": "1"}
    write_tensors(path, tensors, metadata)
    return HeadsFile(path=path.name, sha256=digest(path))


def _configuration(options: ProfileOptions, plan: Plan, tokens: int) -> dict[str, Any]:
    """Return what a dry run prints."""
    settings: dict[str, Any] = {
        "model": options.model or REFERENCE,
        "revision": options.revision,
        "dtype": options.dtype,
        "metrics": [*plan.metrics, *(["memory"] if plan.memory else [])],
    }
    if plan.metrics:
        settings["data"] = {
            "source": options.data,
            "samples": options.samples,
            "tokens": tokens,
            "decode": plan.steps,
            "seed": options.seed,
        }
    if plan.budgets:
        settings["output_error"] = {"policy": plan.policy, "budgets": list(plan.budgets)}
    return settings


def _as_text(document: ProfileDocument) -> str:
    from rich.console import Console

    from kvtool.report.profile_table import profile_table

    text = io.StringIO()
    Console(file=text, width=100).print(profile_table(document))
    return text.getvalue()
