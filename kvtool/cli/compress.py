"""`kvtool compress`: read a prompt once, keep its compressed cache in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.cli.chosen import choose_policy
from kvtool.cli.conversation import begin
from kvtool.cli.loading import check_alone, load_model
from kvtool.cli.output import render, write_configuration, write_data
from kvtool.cli.prompt import encode, note_text, typed_prompt
from kvtool.cli.prompt_options import PromptOptions, check_paths
from kvtool.cli.request import Request, configuration, read_prefill, spell_budget
from kvtool.cli.settle import settle
from kvtool.cli.terminal import Terminal
from kvtool.errors import UsageError
from kvtool.models.load import Loaded

if TYPE_CHECKING:
    from kvtool.documents.generation import CompressionDocument
    from kvtool.documents.plan import PlanDocument


@dataclass(frozen=True, kw_only=True)
class CompressOptions(PromptOptions):
    """Options of `kvtool compress`."""


def compress(options: CompressOptions, terminal: Terminal) -> None:
    """Compress the cache of a prompt into a file, for `kvtool generate --cache`."""
    options.check_system()
    options, plan = settle(options, "kvtool compress")
    check_alone("compress")
    check_paths(options)
    request, prompt, save = _resolve(options, plan, terminal)
    if options.dry_run:
        write_configuration(configuration(options, request), options, terminal)
        return
    loaded = load_model(options, terminal)
    document = _run(options, request, prompt, save, loaded, terminal)
    request.note_bytes(document.cache, terminal)
    form = options.choose_format("text" if terminal.interactive else "json")
    write_data(render(document, form, _as_text(document)), options, terminal)
    terminal.note(f"saved {save}")


def _resolve(
    options: CompressOptions, plan: PlanDocument | None, terminal: Terminal
) -> tuple[Request, str, Path]:
    """Check everything that can be checked before the model is loaded.

    Returns:
        The request, its prompt and the file to save to.
    """
    if options.save_path is None:
        raise UsageError("no file to save to", hint="--save book.kv.safetensors")
    if options.policy is None:
        raise UsageError("no policy", hint="--policy h2o+caote; `kvtool policies` lists them")
    prompt, source = typed_prompt(options)
    if prompt is None:
        raise UsageError("no prompt", hint="--prompt TEXT or --prompt-file FILE")
    prefill = read_prefill(options.prefill)
    policy, budget = choose_policy(options, plan, terminal)
    return Request(prompt, source, policy, budget, prefill, plan), prompt, options.save_path


def _run(
    options: CompressOptions,
    request: Request,
    prompt: str,
    save: Path,
    loaded: Loaded,
    terminal: Terminal,
) -> CompressionDocument:
    from kvtool.cache.files.save import save_cache
    from kvtool.documents.generation import CacheSection, CompressionDocument, CompressionTiming
    from kvtool.generation import compress as compress_prompt

    model = loaded.model
    cache = request.new_cache(model)
    talk = begin(options, loaded, cache, options.system, terminal)
    if talk is None:
        prompt_ids = encode(loaded, prompt, first=True, source=request.source)
    else:
        prompt_ids = talk.context_ids(prompt)
    request.check_length(prompt_ids.shape[1], terminal)
    note_text(cache, model.config, prompt_ids.shape[1], 0, terminal)
    if talk is None:
        result = compress_prompt(model, cache, prompt_ids)
    else:
        result = talk.read(prompt)
    save_cache(
        cache,
        save,
        model=model,
        input_ids=result.input_ids,
        next_logits=result.next_logits,
        model_name=loaded.name,
    )
    return CompressionDocument(
        model=loaded.name,
        policy=str(request.policy),
        budget=spell_budget(request.budget),
        prompt_tokens=prompt_ids.shape[1],
        saved=str(save),
        cache=CacheSection.of(cache.report()),
        plan=request.plan_in_use(loaded, prompt_ids.shape[1], 0, terminal),
        timing=CompressionTiming(prefill_s=result.prefill_s),
    )


def _as_text(document: CompressionDocument) -> str:
    return (
        f"{document.prompt_tokens} tokens read in {document.timing.prefill_s:.2f} s; "
        f"{document.cache.in_words()}"
        f"{'' if document.plan is None else '; ' + document.plan.in_words(document.cache)}\n"
    )
