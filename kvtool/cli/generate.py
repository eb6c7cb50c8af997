"""`kvtool generate`: text under a KV budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Exit

from kvtool.cli.chosen import choose_policy, given_policy
from kvtool.cli.conversation import begin, converse, read_said, spell_turn
from kvtool.cli.generate_options import GenerateOptions
from kvtool.cli.generated import choose_stream, document_of, summary, text_on_stdout
from kvtool.cli.interruption import Interruption
from kvtool.cli.loading import check_alone, load_model
from kvtool.cli.output import render, write_configuration, write_data
from kvtool.cli.prompt import encode, note_text, typed_prompt
from kvtool.cli.prompt_options import check_paths
from kvtool.cli.request import Request, configuration, read_prefill
from kvtool.cli.settle import settle
from kvtool.cli.terminal import Terminal
from kvtool.errors import UsageError
from kvtool.models.load import Loaded
from kvtool.processes import joined
from kvtool.sizes import Budget, parse_prefill

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache
    from kvtool.documents.generation import GenerationDocument
    from kvtool.documents.plan import PlanDocument
    from kvtool.policies.policy import Policy

_NEEDLE_TOKENS, _NEEDLE_SEED = 1024, 0


def generate(options: GenerateOptions, terminal: Terminal) -> None:
    """Generate text under a KV-cache budget.

    Without a prompt, a built-in one plants a code in a long text and asks for it.
    """
    options.check()
    options, plan = settle(options, "kvtool generate")
    _check_processes(options)
    check_paths(options)
    turns = None if options.turns is None else read_said(options, options.turns)
    request = _resolve(options, plan, terminal)
    if options.dry_run:
        more: dict[str, Any] = {
            "max_new_tokens": options.new_tokens,
            "temperature": options.temperature,
        }
        if turns is not None:
            more["turns"] = [spell_turn(turn) for turn in turns.turns]
            more["system"] = turns.system or options.system
        resolved = configuration(options, request) | more | {"cache": options.cache}
        write_configuration(resolved, options, terminal)
        return
    with joined():
        loaded = load_model(options, terminal)
        cache = _open_cache(options, request, loaded)
        with Interruption() as interrupted:
            if turns is None:
                document = _answer(options, request, loaded, cache, terminal, interrupted)
            else:
                document = converse(options, request, turns, loaded, cache, terminal, interrupted)
    if not text_on_stdout(options):
        text = render(document, options.choose_format("text"), f"{document.text}\n")
        write_data(text, options, terminal)
    terminal.note(f"{'interrupted: ' if interrupted.pressed else ''}{summary(document)}")
    request.note_bytes(document.cache, terminal)
    if options.save_path is not None:
        _save(options.save_path, cache, loaded, terminal)
    if interrupted.pressed:
        raise Exit(130)


def _check_processes(options: GenerateOptions) -> None:
    """Refuse several processes that would do the same, or would share a file."""
    if not options.tensor_parallel:
        check_alone("generate")
    elif options.save is not None or options.cache is not None:
        flag = "--save" if options.save is not None else "--cache"
        raise UsageError(
            f"--tensor-parallel excludes {flag}: a cache file holds all KV heads, and each process "
            "has its own"
        )


def _resolve(options: GenerateOptions, plan: PlanDocument | None, terminal: Terminal) -> Request:
    """Check everything that can be checked before the model is loaded."""
    prompt, source = typed_prompt(options)
    prefill = read_prefill(options.prefill)
    if options.cache_path is not None:
        if plan is not None:
            raise UsageError(
                "a plan and --cache exclude each other: a saved cache goes on by what it was made "
                "with",
                hint="leave out one of them",
            )
        policy, budget = _of_cache(options, options.cache_path)
        return Request(prompt, source, policy, budget, prefill)
    policy, budget = choose_policy(options, plan, terminal)
    if options.wants_needle:
        prompt, source = _needle_prompt(terminal)
    return Request(prompt, source, policy, budget, prefill, plan)


def _needle_prompt(terminal: Terminal) -> tuple[str, str]:
    from kvtool.models.reference.prompt import needle_prompt

    prompt, answer = needle_prompt(tokens=_NEEDLE_TOKENS, seed=_NEEDLE_SEED)
    terminal.note(
        f"prompt: a built-in text of about {_NEEDLE_TOKENS} tokens that hides a code, "
        f"and a question about it; the answer is {answer.strip()}"
    )
    return prompt, "built-in needle"


def _of_cache(options: GenerateOptions, path: Path) -> tuple[Policy, Budget | None]:
    """Return policy and budget of a saved cache; flags that say something else are refused."""
    size = None if options.budget is None else Budget.parse(options.budget)
    from kvtool.cache.files.format import read_metadata
    from kvtool.policies.grammar import read_spelling

    made = read_metadata(path)
    given = given_policy(options)  # first, since it may import what the file names
    policy = read_spelling(made["policy"])
    budget = Budget.parse(made["budget"]) if made["budget"] else None
    if given is not None and given != policy:
        typed = options.policy if options.allocator is None else given
        raise UsageError(f"cache `{options.cache}` was made with policy `{policy}`, not `{typed}`")
    if size is not None and size != budget:
        raise UsageError(f"cache `{options.cache}` was made with budget {budget}, not {size}")
    return policy, budget


def _open_cache(options: GenerateOptions, request: Request, loaded: Loaded) -> KVCache:
    """Return the saved cache to go on from, or an empty one."""
    from kvtool.cache.files.load import load_cache

    if options.cache_path is None:
        return request.new_cache(loaded.model)
    cache = load_cache(options.cache_path, loaded.model)
    if options.prefill is not None:
        cache.read_in_blocks(parse_prefill(request.prefill))
    return cache


def _answer(
    options: GenerateOptions,
    request: Request,
    loaded: Loaded,
    cache: KVCache,
    terminal: Terminal,
    interrupted: Interruption,
) -> GenerationDocument:
    """Answer the prompt, or go on from the saved cache without one."""
    from kvtool.documents.turns import UserTurn
    from kvtool.generation import generate as generate_text

    talk = begin(options, loaded, cache, options.system, terminal)
    prompt_ids, tokens = None, 0
    if request.prompt is not None:
        if talk is None:
            first = cache.get_seq_length() == 0
            prompt_ids = encode(loaded, request.prompt, first=first, source=request.source)
        else:
            prompt_ids = talk.turn_ids(UserTurn(request.prompt))
        tokens = prompt_ids.shape[1]
    if options.cache_path is None:
        request.check_length(tokens, terminal)
    note_text(cache, loaded.model.config, tokens, options.new_tokens, terminal)
    planned = request.plan_in_use(loaded, tokens, options.new_tokens, terminal)
    stream = choose_stream(options, options.stream, terminal)
    drawing = options.drawing() | {"on_text": stream, "stop_when": interrupted}
    if talk is None:
        result = generate_text(loaded.model, loaded.tokenizer, cache, prompt_ids, **drawing)
    elif request.prompt is None:
        result = talk.answer(**drawing)
    else:
        result = talk.say(UserTurn(request.prompt), **drawing)
    if stream is not None:
        stream("\n")
    elif text_on_stdout(options):
        terminal.write(f"{result.text[0]}\n")
    return document_of(request, loaded, result, planned)


def _save(path: Path, cache: KVCache, loaded: Loaded, terminal: Terminal) -> None:
    from kvtool.cache.files.save import save_cache

    save_cache(cache, path, model=loaded.model, model_name=loaded.name)
    terminal.note(f"saved {path}")
