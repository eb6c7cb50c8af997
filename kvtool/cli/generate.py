"""`kvtool generate`: text under a KV budget."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvtool.cli.output import render, write_configuration, write_data
from kvtool.cli.request import (
    PromptOptions,
    Request,
    check_paths,
    choose_policy,
    configuration,
    encode,
    note_model,
    read_prefill,
    spell_budget,
    typed_prompt,
)
from kvtool.cli.terminal import Terminal
from kvtool.documents.files import write_with
from kvtool.errors import UsageError
from kvtool.models.load import Loaded, load
from kvtool.sizes import Budget, parse_count

if TYPE_CHECKING:
    from kvtool.cache.files import LoadedCache
    from kvtool.documents.generation import GenerationDocument
    from kvtool.generation import Generation

_NEEDLE_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PromptOptions):
    """Options of `kvtool generate`."""

    cache: Annotated[
        str | None,
        Option("--cache", metavar="CACHE.safetensors", help="Go on from this saved cache."),
    ] = None
    max_new_tokens: Annotated[
        str, Option("--max-new-tokens", "-n", metavar="N", help="Stop after N new tokens.")
    ] = "128"
    temperature: Annotated[
        float,
        Option("--temperature", metavar="T", help="0 takes the likeliest token, above 0 samples."),
    ] = 0.0
    stream: Annotated[
        bool | None,
        Option("--stream/--no-stream", help="Print text as it comes.  [default: on a terminal]"),
    ] = None
    compare_full: Annotated[
        bool, Option("--compare-full", help="Measure how close the run stays to a full cache.")
    ] = False

    @property
    def cache_path(self) -> Path | None:
        """The cache file to start from."""
        return None if self.cache is None else Path(self.cache).expanduser()

    def check(self) -> int:
        """Refuse options that are wrong by themselves; return the number of new tokens."""
        new_tokens = parse_count(self.max_new_tokens)
        if new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be 1 or more, got {self.max_new_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature must be 0 or more, got {self.temperature}")
        if self.cache_path is not None and not self.cache_path.is_file():
            raise UsageError(f"cache file `{self.cache}` does not exist")
        return new_tokens


def generate(options: GenerateOptions, terminal: Terminal) -> None:
    """Generate text under a KV-cache budget.

    Without a prompt, a built-in one plants a code in a long text and asks for it.
    """
    new_tokens = options.check()
    check_paths(options)
    request = _resolve(options, terminal)
    if options.dry_run:
        more = {"max_new_tokens": new_tokens, "temperature": options.temperature}
        resolved = configuration(options, request) | more | {"cache": options.cache}
        write_configuration(resolved, options, terminal)
        return
    note_model(options, terminal)
    loaded = load(options.model, **options.load_options())
    start = None
    if options.cache_path is not None:
        start, request = _continue(options, request, loaded)
    result, cache = _run(options, request, loaded, start, new_tokens, terminal)
    _write(options, request, loaded, result, terminal)
    if options.save_path is not None:
        _save(options.save_path, cache, result, loaded, terminal)


def _resolve(options: GenerateOptions, terminal: Terminal) -> Request:
    """Check everything that can be checked before the model is loaded."""
    prompt, source = typed_prompt(options)
    prefill = read_prefill(options.prefill)
    if options.cache is not None:
        if options.budget is not None:
            Budget.parse(options.budget)
        return Request(prompt, source, None, None, prefill)
    policy, budget = choose_policy(options.policy, options.budget, terminal)
    if prompt is None:
        prompt, source = _needle_prompt(options.seed, terminal)
    return Request(prompt, source, policy, budget, prefill)


def _needle_prompt(seed: int, terminal: Terminal) -> tuple[str, str]:
    from kvtool.models.reference.prompt import needle_prompt

    prompt, answer = needle_prompt(tokens=_NEEDLE_TOKENS, seed=seed)
    terminal.note(f"prompt: built-in needle, about {_NEEDLE_TOKENS} tokens; the answer is{answer}")
    return prompt, "built-in needle"


def _continue(
    options: GenerateOptions, request: Request, loaded: Loaded
) -> tuple[LoadedCache, Request]:
    """Load the saved cache; its policy and budget are the run's, and flags must agree with them."""
    from kvtool.cache.files import load_cache
    from kvtool.policies.grammar import parse_policy

    start = load_cache(options.cache_path, loaded.model)
    policy, budget = start.cache.policy, start.cache.budget
    if options.policy is not None and parse_policy(options.policy) != policy:
        raise UsageError(
            f"cache `{options.cache}` was made with policy `{policy}`, not `{options.policy}`"
        )
    if options.budget is not None and Budget.parse(options.budget) != budget:
        raise UsageError(
            f"cache `{options.cache}` was made with budget {budget}, not {options.budget}"
        )
    return start, replace(request, policy=policy, budget=budget)


def _run(
    options: GenerateOptions,
    request: Request,
    loaded: Loaded,
    start: LoadedCache | None,
    new_tokens: int,
    terminal: Terminal,
) -> tuple[Generation, Any]:
    from kvtool import generation
    from kvtool.cache.cache import build_cache

    prompt_ids = None
    if request.prompt is not None:
        prompt_ids = encode(loaded, request.prompt, first=start is None, source=request.source)
        request.check_length(prompt_ids.shape[1])
    cache = (
        build_cache(loaded.model, request.policy, request.budget, prefill=request.prefill)
        if start is None
        else start.cache
    )
    result = generation.generate(
        loaded.model,
        loaded.tokenizer,
        cache,
        prompt_ids,
        max_new_tokens=new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        on_text=_stream(options, terminal),
        start=start,
        compare_full=options.compare_full,
    )
    return result, cache


def _stream(options: GenerateOptions, terminal: Terminal) -> Any:
    """Return what takes the text as it comes: stdout if text is the data there, else stderr."""
    on_stdout = options.choose_format("text") == "text" and options.output_path is None
    if on_stdout and (terminal.interactive if options.stream is None else options.stream):
        return terminal.write
    if options.stream and not options.quiet:
        return lambda text: print(text, end="", file=sys.stderr, flush=True)  # noqa: T201
    return None


def _write(
    options: GenerateOptions,
    request: Request,
    loaded: Loaded,
    result: Generation,
    terminal: Terminal,
) -> None:
    document = _document(request, loaded, result)
    streaming = _stream(options, terminal)
    if streaming is not None:
        streaming("\n")
    if streaming != terminal.write:
        text = render(document, options.choose_format("text"), f"{document.text}\n")
        write_data(text, options, terminal)
    terminal.note(_summary(document))


def _document(request: Request, loaded: Loaded, result: Generation) -> GenerationDocument:
    from kvtool.documents.generation import (
        CacheSection,
        Fidelity,
        GenerationDocument,
        GenerationTiming,
    )

    steps = result.new_tokens - 1  # the first new token comes from the prompt's own forward
    rate = steps / result.decode_s if steps > 0 and result.decode_s > 0 else None
    return GenerationDocument(
        model=loaded.name,
        policy=str(request.policy),
        budget=spell_budget(request.budget),
        prompt_tokens=result.prompt_tokens,
        new_tokens=result.new_tokens,
        text=result.text[0],
        token_ids=result.token_ids[0],
        cache=CacheSection.of(result.report),
        timing=GenerationTiming(
            prefill_s=result.prefill_s, decode_s=result.decode_s, decode_tokens_per_s=rate
        ),
        fidelity=None if result.fidelity is None else Fidelity.of(result.fidelity),
    )


def _summary(document: GenerationDocument) -> str:
    """Say in words what was held and how fast it went."""
    timing = document.timing
    rate = timing.decode_tokens_per_s
    parts = [
        f"{document.new_tokens} tokens"
        + (f" at {rate:.1f} tokens/s" if rate is not None else "")
        + f" after {timing.prefill_s:.2f} s of prefill",
        document.cache.in_words(),
    ]
    if document.fidelity is not None:
        parts.append(document.fidelity.in_words())
    return "; ".join(parts)


def _save(path: Path, cache: Any, result: Generation, loaded: Loaded, terminal: Terminal) -> None:
    from kvtool.cache.files import save_cache

    write_with(
        path,
        lambda file: save_cache(cache, file, input_ids=result.input_ids, model=loaded.model),
    )
    terminal.note(f"saved {path}")
