"""`kvtool generate`: text under a KV budget."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
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
    load_model,
    read_prefill,
    settle,
    spell_budget,
    typed_prompt,
)
from kvtool.cli.terminal import Terminal
from kvtool.errors import UsageError
from kvtool.models.load import Loaded
from kvtool.sizes import Budget, parse_count, parse_prefill

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache
    from kvtool.documents.generation import GenerationDocument
    from kvtool.documents.plan import PlanDocument
    from kvtool.generation import Generation
    from kvtool.policies.policy import Policy

_NEW_TOKENS = 128
_NEEDLE_TOKENS, _NEEDLE_SEED = 1024, 0
_NEEDLE_ANSWER_TOKENS = 8  # at most seven digits and a full stop


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PromptOptions):
    """Options of `kvtool generate`."""

    cache: Annotated[
        str | None,
        Option("--cache", metavar="CACHE.safetensors", help="Go on from this saved cache."),
    ] = None
    max_new_tokens: Annotated[
        str | None,
        Option(
            "--max-new-tokens",
            "-n",
            metavar="N",
            help=f"Stop after N new tokens.  [default: {_NEW_TOKENS}]",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Option(
            "--temperature",
            metavar="T",
            help="0 takes the likeliest token, above 0 samples.  [default: 0]",
        ),
    ] = None
    stop: Annotated[
        list[str],
        Option("--stop", metavar="TEXT", help="End where this text comes up; it stays."),
    ] = field(default_factory=list)
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

    @property
    def wants_needle(self) -> bool:
        """Whether the built-in prompt is asked for, by giving none."""
        return self.prompt is None and self.prompt_file is None and self.cache is None

    @property
    def new_tokens(self) -> int:
        """How many tokens to generate at most."""
        if self.max_new_tokens is None:
            return _NEEDLE_ANSWER_TOKENS if self.wants_needle else _NEW_TOKENS
        return parse_count(self.max_new_tokens)

    def check(self) -> None:
        """Refuse options that are wrong by themselves."""
        if self.new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be 1 or more, got {self.max_new_tokens}")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature must be 0 or more, got {self.temperature}")
        if self.cache_path is not None and not self.cache_path.is_file():
            raise UsageError(f"cache file `{self.cache}` does not exist")


def generate(options: GenerateOptions, terminal: Terminal) -> None:
    """Generate text under a KV-cache budget.

    Without a prompt, a built-in one plants a code in a long text and asks for it.
    """
    options.check()
    options, plan = settle(options, "kvtool generate")
    check_paths(options)
    request = _resolve(options, plan, terminal)
    if options.dry_run:
        more = {"max_new_tokens": options.new_tokens, "temperature": options.temperature}
        resolved = configuration(options, request) | more | {"cache": options.cache}
        write_configuration(resolved, options, terminal)
        return
    loaded = load_model(options, terminal)
    cache, result = _run(options, request, loaded, terminal)
    _write(options, request, loaded, result, terminal)
    if options.save_path is not None:
        _save(options.save_path, cache, result, loaded, terminal)


def _resolve(options: GenerateOptions, plan: PlanDocument | None, terminal: Terminal) -> Request:
    """Check everything that can be checked before the model is loaded."""
    prompt, source = typed_prompt(options)
    prefill = read_prefill(options.prefill)
    if options.cache_path is not None:
        policy, budget = _of_cache(options, options.cache_path)
        return Request(prompt, source, policy, budget, prefill)
    policy, budget = choose_policy(options.policy, options.budget, plan, terminal)
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
    from kvtool.cache.files import read_metadata
    from kvtool.policies.grammar import parse_policy

    made = read_metadata(path)
    policy = parse_policy(made["policy"])
    budget = Budget.parse(made["budget"]) if made["budget"] else None
    if options.policy is not None and parse_policy(options.policy) != policy:
        raise UsageError(
            f"cache `{options.cache}` was made with policy `{policy}`, not `{options.policy}`"
        )
    if size is not None and size != budget:
        raise UsageError(f"cache `{options.cache}` was made with budget {budget}, not {size}")
    return policy, budget


def _run(
    options: GenerateOptions,
    request: Request,
    loaded: Loaded,
    terminal: Terminal,
) -> tuple[KVCache, Generation]:
    from kvtool import generation
    from kvtool.cache.files import load_cache

    model = loaded.model
    going_on = options.cache_path is not None
    prompt_ids = None
    if request.prompt is not None:
        prompt_ids = encode(loaded, request.prompt, first=not going_on, source=request.source)
    if going_on:
        cache = load_cache(options.cache_path, model)
        if options.prefill is not None:
            cache.block = parse_prefill(request.prefill)
    else:
        request.check_length(prompt_ids.shape[1])
        cache = request.new_cache(model)
    result = generation.generate(
        model,
        loaded.tokenizer,
        cache,
        prompt_ids,
        max_new_tokens=options.new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        stop=options.stop,
        on_text=_stream(options, terminal),
        compare_full=options.compare_full,
    )
    return cache, result


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


def _save(
    path: Path, cache: KVCache, result: Generation, loaded: Loaded, terminal: Terminal
) -> None:
    from kvtool.cache.files import save_cache

    save_cache(cache, path, model=loaded.model, input_ids=result.input_ids, model_name=loaded.name)
    terminal.note(f"saved {path}")
