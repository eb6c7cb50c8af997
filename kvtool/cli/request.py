"""What `generate` and `compress` are asked to do, checked before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from typer import Option

from kvtool.cli.options import RecipeOptions
from kvtool.cli.prompt import check_stdin, note_handful
from kvtool.cli.recipes import Flags, resolve, with_allocator
from kvtool.cli.terminal import Terminal
from kvtool.documents.files import check_writable
from kvtool.documents.prompts import check_prompt
from kvtool.errors import UsageError
from kvtool.models.folder import REFERENCE, check_folder
from kvtool.models.load import Loaded, load
from kvtool.processes import started
from kvtool.sizes import (
    DEFAULT_BLOCK,
    DEFAULT_BUDGET,
    DEFAULT_TOKENS,
    Budget,
    parse_count,
    parse_prefill,
)

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache
    from kvtool.documents.generation import CacheSection, PlanSection
    from kvtool.documents.plan import PlanDocument
    from kvtool.documents.recipe import Recipe
    from kvtool.policies.policy import Policy

_MODEL_SETTINGS = (
    "revision",
    "dtype",
    "device",
    "device_map",
    "tensor_parallel",
    "attn_implementation",
)
_DRAWING = ("max_new_tokens", "temperature", "stop")  # options of generate alone

Prompted = TypeVar("Prompted", bound="PromptOptions")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(RecipeOptions):
    """A prompt, and the policy and budget of the cache it fills."""

    prompt: Annotated[str | None, Option("--prompt", metavar="TEXT", help="The prompt.")] = None
    prompt_file: Annotated[
        str | None,
        Option(
            "--prompt-file", metavar="FILE|-", help="Read the prompt from a UTF-8 file, - stdin."
        ),
    ] = None
    system: Annotated[
        str | None,
        Option("--system", metavar="TEXT", help="System message of the chat template."),
    ] = None
    chat_template: Annotated[
        Literal["auto", "on", "off"],
        Option(
            "--chat-template",
            help="Put what the user says into the model's chat template; off: as it stands.",
        ),
    ] = "auto"
    policy: Annotated[
        str | None,
        Option(
            "--policy",
            "-p",
            metavar="POLICY",
            help="What to keep, e.g. h2o+caote; see `kvtool policies`. A score of your own: "
            "my_package.my_module:MyScore.",
        ),
    ] = None
    budget: Annotated[
        str | None,
        Option(
            "--budget",
            "-b",
            metavar="SIZE",
            help="Tokens per layer and KV head (512, 4K), share of the prompt (20%) or bytes "
            f"(64MiB).  [default: {DEFAULT_BUDGET}]",
        ),
    ] = None
    prefill: Annotated[
        str | None,
        Option(
            "--prefill",
            metavar="full|block[:M]",
            help=f"Read the prompt whole, or in blocks of M tokens ({DEFAULT_BLOCK}).",
        ),
    ] = None
    save: Annotated[
        str | None,
        Option("--save", metavar="CACHE.safetensors", help="Save the compressed cache here."),
    ] = None

    def check_system(self) -> None:
        """Refuse a system message that has no place, without importing torch."""
        if self.system is None:
            return
        check_prompt(self.system, "--system")
        if self.chat_template == "off":
            raise UsageError("--system goes into the chat template, and --chat-template is off")
        if getattr(self, "cache", None) is not None:
            raise UsageError("--system goes before everything, and --cache holds a text already")

    @property
    def save_path(self) -> Path | None:
        """The cache file to write."""
        return None if self.save is None else Path(self.save).expanduser()


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        prompt: the text, or None for none.
        source: where the text came from, in words.
        policy, budget: None where a saved cache brings its own.
        prefill: `full` or `block:M`.
        plan: brings the budget, if there is one.
    """

    prompt: str | None
    source: str
    policy: Policy | None
    budget: Budget | None
    prefill: str
    plan: PlanDocument | None = None

    def new_cache(self, model: Any) -> KVCache:
        """Return an empty cache as it is asked for."""
        from kvtool.cache.build import build_cache

        budget = self.budget if self.plan is None else None
        return build_cache(model, self.policy, budget, prefill=self.prefill, plan=self.plan)

    def plan_in_use(
        self, loaded: Loaded, tokens: int, new: int, terminal: Terminal
    ) -> PlanSection | None:
        """Return what is taken from the plan for a prompt; say where more is held than it says.

        Args:
            tokens: of the prompt.
            new: tokens that are generated at most.
        """
        if self.plan is None or not self.policy.takes_budget:
            return None
        from kvtool.documents.generation import PlanSection
        from kvtool.planning.run import beyond_plan, use_plan

        dtype = str(loaded.model.dtype).removeprefix("torch.")
        used = use_plan(self.plan, self.policy, prompt=tokens, new=new, dtype=dtype)
        told = beyond_plan(self.plan, used, tokens, new)
        if told is not None:
            terminal.note(f"note: after this {told}")
        return PlanSection.of(self.plan, used.tokens, used.stages, used.held)

    def check_length(self, tokens: int, terminal: Terminal) -> None:
        """Refuse a share of this prompt that its protected tokens alone would fill."""
        if self.policy is not None and self.budget is not None and self.budget.ratio is not None:
            kept = self.budget.for_prompt(tokens)
            if kept < tokens:
                self.policy.check_budget(kept)
                note_handful(kept, terminal)

    def note_bytes(self, held: CacheSection, terminal: Terminal) -> None:
        """Say what a budget in bytes has come to, if it is a handful of tokens."""
        kept = max(held.kept_per_layer)
        if self.budget is not None and self.budget.bytes is not None and kept < held.tokens_seen:
            note_handful(kept, terminal)


def settle(options: Prompted, command: str) -> tuple[Prompted, PlanDocument | None]:
    """Fill in what no flag says: from the recipe or plan, else from the defaults of recipes.

    Args:
        command: as typed, such as `kvtool generate`.

    Returns:
        The options, and the plan that takes the place of a budget, if there is one.

    Raises:
        UsageError: the recipe cannot be read, or means more than one policy or budget.
    """
    from kvtool.documents.recipe import Recipe

    check_stdin(options)
    if options.recipe is None and not options.set and not options.unset:
        values = _values(Recipe(), options)
        given = {name: getattr(options, name) for name in values}
        given["policy"] = _split_by(options.policy, options.allocator)
        filled = {k: values[k] if v in (None, []) else v for k, v in given.items()}
        return replace(options, **filled), None
    flags = Flags(options)
    for name in ("policy", "budget", "prefill"):
        flags.take(options, name)
    for name in _DRAWING:
        value = getattr(options, name, None)
        if isinstance(value, str):
            value = parse_count(value)
        flags.set(f"--{name.replace('_', '-')} {value}", value, "generation", name)
    recipe, _ = resolve(options, flags, command)
    options = replace(options, **_values(recipe, options))
    if recipe.plan is None:
        return options, None
    from kvtool.documents.plan import PlanDocument

    if options.policy is None:
        raise UsageError("the plan names no policy", hint="--policy h2o")
    return options, PlanDocument(**recipe.plan)


def _values(recipe: Recipe, options: PromptOptions) -> dict[str, Any]:
    """Return the options that a recipe sets."""
    model, drawn = recipe.model, recipe.generation
    tokens = None if drawn.max_new_tokens is None else str(drawn.max_new_tokens)
    values = {
        "model": model.id,
        **model.model_dump(exclude={"id"}),
        "policy": _split_by(_only(recipe.policies(), "policies", "--policy"), recipe.allocator),
        "budget": _only(recipe.budgets(), "budgets", "--budget"),
        "prefill": recipe.prefill,
        "seed": recipe.seed,
    }
    drawing = dict(zip(_DRAWING, (tokens, drawn.temperature, drawn.stop), strict=True))
    return values | {name: value for name, value in drawing.items() if hasattr(options, name)}


def _split_by(policy: str | None, allocator: str | None) -> str | None:
    if allocator is not None and policy is None:
        raise UsageError("--allocator needs a policy", hint=f"--policy h2o --allocator {allocator}")
    return policy if policy is None else with_allocator(policy, allocator)


def _only(values: list[str], what: str, flag: str) -> str | None:
    if len(values) > 1:
        raise UsageError(
            f"the recipe has {len(values)} {what}: {', '.join(values)}",
            hint=f"choose one, {flag} {values[0]}",
        )
    return values[0] if values else None


def check_paths(options: PromptOptions) -> None:
    """Refuse files and folders that are not there, without importing torch."""
    options.check_output()
    if options.save_path is not None:
        check_writable(options.save_path, "--save")
        if options.output_path is not None and options.save_path == options.output_path:
            raise UsageError(f"--save and --output both write `{options.save_path}`")
    check_folder(options.model)


def choose_policy(
    options: PromptOptions, plan: PlanDocument | None, terminal: Terminal
) -> tuple[Policy, Budget | None]:
    """Read policy and budget, fill in what was not given, and refuse a budget that is too small."""
    policy = options.policy
    size = None if options.budget is None else Budget.parse(options.budget)
    if plan is not None:
        size = plan.target.budget
    if policy is None and size is not None:
        raise UsageError("--budget needs a policy", hint=f"--policy h2o+caote --budget {size}")
    from kvtool.policies.grammar import parse_policy

    chosen = parse_policy("full" if policy is None else policy)
    if policy is None:
        terminal.note("policy: full (everything is kept; choose another with --policy)")
    if not chosen.takes_budget:
        if size is not None:
            terminal.note(
                f"note: policy `{chosen}` keeps everything; --budget {size} has no effect"
            )
        return chosen, None
    if plan is not None:
        _take_plan(options, plan, chosen, terminal)
        return chosen, size
    if size is None:
        size = DEFAULT_BUDGET
        unit = "pairs of key and value that a token reads" if chosen.budget_is_traffic else "tokens"
        terminal.note(f"budget: {size} {unit} per layer and KV head")
    if size.tokens is not None:
        chosen.check_budget(size.tokens)
        note_handful(size.tokens, terminal)
    if size.bytes is not None and chosen.stores_all:
        terminal.note(
            f"budget: {size} are for what is stored, which is everything; a token reads "
            f"{DEFAULT_TOKENS} pairs of key and value per layer and KV head"
        )
    return chosen, size


def _take_plan(
    options: PromptOptions, plan: PlanDocument, policy: Policy, terminal: Terminal
) -> None:
    """Say what is taken from a plan, and refuse one that does not fit the run."""
    from kvtool.planning.run import check_run

    budget = plan.target.budget
    if not policy.budget_is_traffic:
        policy.check_budget(min(plan.layers.tokens[i] for i in plan.free_layers))
        terminal.note(f"budget: as planned, {budget} split by {plan.layers.allocator}")
    elif policy.reader.planned and plan.rocketkv is not None:
        terminal.note(f"budget: as planned, {_stages(plan, policy)}")
    else:
        terminal.note(f"budget: as planned, {budget}, which is what a token reads")
    for line in check_run(plan, policy, _run_dtype(options)):
        terminal.note(line)


def _stages(plan: PlanDocument, policy: Policy) -> str:
    """Say which of RocketKV's stages are taken from a plan."""
    section, first = plan.rocketkv, ""
    if policy.two_stages:
        split = "" if section.split_factor is None else f"split factor {section.split_factor:.4g}, "
        stage1 = section.stage1(plan.target.max_new_tokens)
        first = f"{split}stage 1 keeps {stage1} of {section.context} tokens, "
    scaled = ", counts scaled to the prompt" if plan.target.ratio is not None else ""
    return (
        f"{first}pages of {section.page_size}, {section.head_dims} channels, "
        f"{section.top_k} tokens attended{scaled}"
    )


def _run_dtype(options: PromptOptions) -> str:
    """Return the dtype that the model will run in here."""
    from kvtool.model_shape import stored_dtype
    from kvtool.models.load import load_config
    from kvtool.models.placement import resolve_device, resolve_dtype

    dtype = resolve_dtype(options.dtype, resolve_device(options.device, options.device_map))
    if dtype != "auto":
        return dtype
    config = load_config(
        options.model, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    return stored_dtype(config, dtype)


def read_prefill(text: str | None) -> str:
    """Return `full` or `block:M`.

    Raises:
        UsageError: neither, or a block of no token.
    """
    block = parse_prefill(text or "full", name="--prefill")
    return "full" if block is None else f"block:{block}"


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


def load_model(options: PromptOptions, terminal: Terminal) -> Loaded:
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


def configuration(options: PromptOptions, request: Request) -> dict[str, Any]:
    """Return what a dry run prints."""
    from kvtool.models.placement import resolve_device, resolve_dtype

    device = resolve_device(options.device, options.device_map)
    spread = {} if options.device_map is None else {"device_map": options.device_map}
    return {
        "model": options.model or REFERENCE,
        "revision": options.revision,
        "dtype": resolve_dtype(options.dtype, device),
        "device": device,
        **spread,
        "attn_implementation": options.attn_implementation,
        "policy": None if request.policy is None else str(request.policy),
        "budget": spell_budget(request.budget),
        "prefill": request.prefill,
        "prompt": request.source,
        "prompt_characters": None if request.prompt is None else len(request.prompt),
        "system": options.system,
        "chat_template": options.chat_template,
        "seed": options.seed,
        "save": options.save,
    }


def spell_budget(budget: Budget | None) -> int | str | None:
    """Write a budget in a document: tokens as a number, anything else as typed."""
    if budget is None:
        return None
    return str(budget) if budget.tokens is None else budget.tokens
