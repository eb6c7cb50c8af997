"""Check the request of `generate` and `compress` before anything heavy is loaded.

A request holds the prompt, and the policy and budget that settings, a plan or a saved cache choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.calls.settings import CachedSettings, GenerationSettings, PromptSettings
from kvtool.documents.files import check_prompt, read_prompt
from kvtool.documents.messages import UserTurn
from kvtool.errors import UsageError
from kvtool.model_shape import layer_shapes, stored_dtype
from kvtool.models.folder import REFERENCE
from kvtool.models.notes import handful_note
from kvtool.models.placement import memory_of, resolve_dtype, room_beside
from kvtool.planning.bytes import check_dims
from kvtool.planning.estimate import row_bytes
from kvtool.planning.plan_in_use import check_free, check_plan, check_run
from kvtool.planning.variants import Variant
from kvtool.policies.grammar import parse_policy, read_spelling, with_allocator
from kvtool.policies.policy import Policy, check_blocks
from kvtool.policies.scores.full import Full
from kvtool.sizes import (
    DEFAULT_BUDGET,
    DEFAULT_TOKENS,
    Budget,
    parse_prefill,
    says_default_block,
    spell_prefill,
)
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.cache.whole.cache import KVCache
    from kvtool.documents.generation import CacheSection
    from kvtool.documents.plan import PlanDocument, RocketKVSection, Target
    from kvtool.models.load import Loaded


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        prompt: the text, or None for none.
        answer_prefix: the beginning of the answer, with which the text ends; in a chat it is the
            assistant's.
        source: where the text came from, in words.
        budget: None for policies that keep everything.
        prefill: `full` or `block:M`.
        plan: brings the budget, if there is one.
    """

    prompt: str | None
    source: str
    policy: Policy
    budget: Budget | None
    prefill: str
    plan: PlanDocument | None = None
    answer_prefix: str = ""

    def __post_init__(self) -> None:
        check_blocks(self.policy, parse_prefill(self.prefill))

    @property
    def turn(self) -> UserTurn:
        """The prompt as a turn of the user."""
        prefix = self.answer_prefix
        return UserTurn((self.prompt or "").removesuffix(prefix), begun=prefix)

    def new_cache(self, model: Any, *, record: bool = False) -> KVCache:
        """Return an empty cache as it is asked for.

        Args:
            record: whether it will be shown.
        """
        from kvtool.cache.entry.build import make_cache

        budget = self.budget if self.plan is None else None
        cache = make_cache(model, self.policy, budget, prefill=self.prefill, plan=self.plan)
        if record:
            cache.record()
        return cache

    def check_length(self, tokens: int, watcher: Watcher) -> None:
        """Refuse a ratio of this prompt that its protected tokens alone would fill."""
        if self.budget is not None and self.budget.ratio is not None:
            kept = self.budget.for_prompt(tokens)
            if kept < tokens:
                self.policy.check_budget(kept)
                watcher.note_any(handful_note(kept))

    def note_bytes(self, held: CacheSection, watcher: Watcher) -> None:
        """Say what a budget in bytes has come to, if it is a handful of tokens."""
        kept = max(held.kept_per_layer)
        if self.budget is not None and self.budget.bytes is not None and kept < held.tokens_seen:
            watcher.note_any(handful_note(kept))

    def row_bytes(self, loaded: Loaded, tokens: int, new: int) -> int:
        """Forecast what a cache holds of a prompt and its answer, policy state included."""
        variant = Variant(self.policy, self.budget, self.prefill, self.plan)
        return row_bytes(loaded.model, variant, tokens, new)


_MOST_ROWS = 64  # where no caller has said how much memory: answers should not all come at the end


def room_for_rows(memory: int | None, model: Any) -> tuple[int | None, int | None]:
    """Return how many bytes rows in flight may take, and how many they may be; None: no bound.

    Args:
        memory: what is said of the bytes; None: nothing.
    """
    return (memory, None) if memory is not None else (room_beside(model), _MOST_ROWS)


def read_prefill(settings: CachedSettings, policy: Policy) -> str:
    """Return `full` or `block:M`; the policy or the device gives the M of `block`.

    Raises:
        UsageError: neither, a block of no token, or a device that is not there.
    """
    text = settings.prefill or "full"
    device = settings.planned_device if says_default_block(text) else ""
    return spell_prefill(text, name="--prefill", device=device, own=policy.own_block)


def configuration(settings: PromptSettings, request: Request) -> dict[str, Any]:
    """Return what a dry run prints."""
    device = settings.planned_device
    names = ("device_map", "quantize")
    given = {name: getattr(settings, name) for name in names}
    return {
        "model": settings.model or REFERENCE,
        "revision": settings.revision,
        "dtype": resolve_dtype(settings.dtype or "auto", device),
        "device": device,
        **{name: value for name, value in given.items() if value is not None},
        "attn_implementation": settings.attn_implementation,
        "policy": str(request.policy),
        "budget": spell_budget(request.budget),
        "prefill": request.prefill,
        "prompt": request.source,
        "prompt_characters": None if request.prompt is None else len(request.prompt),
        **settings.as_shown(),
    }


def spell_budget(budget: Budget | None) -> int | str | None:
    """Write a budget in a document: tokens as a number, anything else as typed."""
    if budget is None:
        return None
    return str(budget) if budget.tokens is None else budget.tokens


def given_policy(settings: CachedSettings) -> Policy | None:
    """Read the policy that is asked for, with its allocator; None if there is none."""
    if settings.policy is None:
        return None
    policy = parse_policy(settings.policy)
    if settings.allocator is None:
        return policy
    return with_allocator(policy, settings.allocator, str(settings.policy))


def choose_policy(
    settings: CachedSettings, plan: PlanDocument | None, watcher: Watcher
) -> tuple[Policy, Budget | None]:
    """Read policy and budget, and fill in what was not given.

    Raises:
        UsageError: a budget that is too small; a codec that cannot store the model's heads.
    """
    size = None if settings.budget is None else Budget.parse(settings.budget)
    if plan is not None:
        size = plan.target.budget
    if settings.chooses:
        others = {"a plan": plan, "-b": size, "--allocator": settings.allocator}
        for name in (name for name, given in others.items() if given is not None):
            raise UsageError(
                f"-p auto chooses the budget, too; leave out {name}", hint="--memory bounds it"
            )
        return Policy(Full()), None  # until the prompt is known
    if settings.policy is None and size is not None:
        raise UsageError("--budget needs a policy", hint=f"--policy h2o+caote --budget {size}")
    chosen = given_policy(settings)
    if chosen is None:
        watcher.note("policy: full (everything is kept; choose another with --policy)")
        return Policy(Full()), None
    _check_heads(settings, chosen)
    if not chosen.takes_budget:
        if size is not None:
            watcher.note(f"note: policy `{chosen}` keeps everything; --budget {size} has no effect")
        return chosen, None
    if plan is not None:
        _take_plan(settings, plan, chosen, watcher)
        return chosen, size
    if size is None:
        size = DEFAULT_BUDGET
        unit = "pairs of key and value that a token reads" if chosen.budget_is_traffic else "tokens"
        watcher.note(f"budget: {size} {unit} per layer and KV head")
    if size.tokens is not None:
        chosen.check_budget(size.tokens)
        watcher.note_any(handful_note(size.tokens))
    if size.bytes is not None and chosen.stores_all:
        watcher.note(
            f"budget: {size} are for what is stored, which is everything; a token reads "
            f"{DEFAULT_TOKENS} pairs of key and value per layer and KV head"
        )
    return chosen, size


def _check_heads(settings: CachedSettings, policy: Policy) -> None:
    """Refuse a codec that cannot store the model's heads. Only the heads' sizes are read."""
    if policy.codec is None:
        return
    check_dims(policy, layer_shapes(settings.source().config()))


def _take_plan(
    settings: CachedSettings, plan: PlanDocument, policy: Policy, watcher: Watcher
) -> None:
    """Say what is taken from a plan, and refuse one that does not fit the run."""
    config = settings.source().config()
    check_plan(plan, config)
    _note_free(settings, plan, watcher)
    budget = plan.target.budget
    if not policy.budget_is_traffic:
        policy.check_budget(min(plan.layers.tokens[i] for i in plan.free_layers))
        watcher.note(f"budget: as planned, {budget} split by {plan.layers.allocator}")
    elif policy.reader is not None and policy.reader.planned and plan.rocketkv is not None:
        watcher.note(f"budget: as planned, {_stages(plan.rocketkv, plan.target, policy)}")
    else:
        watcher.note(f"budget: as planned, {budget}, which is what a token reads")
    for line in check_run(plan, policy, config, _run_dtype(settings, config)):
        watcher.note(line)


def _note_free(settings: CachedSettings, plan: PlanDocument, watcher: Watcher) -> None:
    """Warn of a plan for more memory than is free; with `--strict` refuse it."""
    if plan.device is None or settings.loaded is not None:
        return
    spread = bool(settings.device_map or settings.tensor_parallel)
    there = memory_of(settings.planned_device, settings.memory_there, spread=spread)
    watcher.note_any(check_free(plan, *there, strict=settings.strict))


def _stages(section: RocketKVSection, target: Target, policy: Policy) -> str:
    """Say which of RocketKV's stages are taken from a plan."""
    first = ""
    if policy.two_stages:
        split = "" if section.split_factor is None else f"split factor {section.split_factor:.4g}, "
        stage1 = section.stage1(target.max_new_tokens)
        first = f"{split}stage 1 keeps {stage1} of {section.context} tokens, "
    scaled = ", counts scaled to the prompt" if target.ratio is not None else ""
    return (
        f"{first}pages of {section.page_size}, {section.head_dims} channels, "
        f"{section.top_k} tokens attended{scaled}"
    )


def _run_dtype(settings: CachedSettings, config: Any) -> str:
    """Return the dtype that the model will run in here."""
    if settings.loaded is not None:
        return str(settings.loaded.model.dtype).removeprefix("torch.")
    device = settings.planned_device
    return stored_dtype(config, resolve_dtype(settings.dtype or "auto", device))


def typed_prompt(settings: PromptSettings) -> tuple[str | None, str]:
    """Return the prompt given, if one is, and where it came from.

    A file and a text are one prompt: the file first, and a blank line between them.
    """
    parts, names = [], []
    if settings.prompt_file is not None:
        names.append("stdin" if settings.prompt_file == "-" else settings.prompt_file)
        parts.append(read_prompt(settings.prompt_file))
    if settings.prompt is not None:
        names.append("--prompt")
        parts.append(check_prompt(settings.prompt, "--prompt"))
    return "\n\n".join(parts) if parts else None, " and ".join(names) or "none"


def resumed_policy(
    settings: GenerationSettings, cache: str | KVCache
) -> tuple[Policy, Budget | None]:
    """Return policy and budget of a cache; settings that say something else are refused."""
    if settings.chooses:
        raise UsageError("--cache goes on by the policy it was made with", hint="no -p auto")
    size = None if settings.budget is None else Budget.parse(settings.budget)
    from kvtool.cache.files.format import read_metadata

    path = settings.cache_path
    made = {} if path is None else read_metadata(path)
    given = given_policy(settings)  # first, since it may import what the file names
    if isinstance(cache, str):
        name, policy = f"cache `{cache}`", read_spelling(made["policy"])
        budget = Budget.parse(made["budget"]) if made["budget"] else None
    else:
        name, policy, budget = "the cache", cache.policy, cache.budget
    if given is not None and given != policy:
        typed = settings.policy if settings.allocator is None else given
        raise UsageError(f"{name} was made with policy `{policy}`, not `{typed}`")
    if size is not None and size != budget:
        raise UsageError(f"{name} was made with budget {budget}, not {size}")
    return policy, budget
