"""What `generate` and `compress` are asked to do, checked before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.calls.settings import PromptSettings
from kvtool.models.folder import REFERENCE
from kvtool.models.load import Loaded
from kvtool.models.notes import handful_note
from kvtool.sizes import Budget, parse_prefill, spell_prefill
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache
    from kvtool.documents.generation import CacheSection, PlanSection
    from kvtool.documents.plan import PlanDocument
    from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        prompt: the text, or None for none.
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

    def __post_init__(self) -> None:
        from kvtool.policies.policy import check_blocks

        check_blocks(self.policy, parse_prefill(self.prefill))

    def new_cache(self, model: Any, *, record: bool = False) -> KVCache:
        """Return an empty cache as it is asked for.

        Args:
            record: whether it will be shown.
        """
        from kvtool.cache.build import make_cache

        budget = self.budget if self.plan is None else None
        cache = make_cache(model, self.policy, budget, prefill=self.prefill, plan=self.plan)
        if record:
            cache.record()
        return cache

    def plan_in_use(
        self, loaded: Loaded, tokens: int, new: int, watcher: Watcher
    ) -> PlanSection | None:
        """Return what is taken from the plan for a prompt; say where more is held than it says.

        Args:
            tokens: of the prompt.
            new: tokens that are generated at most.
        """
        if self.plan is None or not self.policy.takes_budget:
            return None
        from kvtool.documents.generation import PlanSection
        from kvtool.planning.held import beyond_plan, use_plan

        dtype = str(loaded.model.dtype).removeprefix("torch.")
        used = use_plan(self.plan, self.policy, prompt=tokens, new=new, dtype=dtype)
        told = beyond_plan(self.plan, used, tokens, new)
        if told is not None:
            watcher.note(f"note: after this {told}")
        return PlanSection.of(self.plan, used.tokens, used.stages, used.held)

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


def read_prefill(text: str | None) -> str:
    """Return `full` or `block:M`.

    Raises:
        UsageError: neither, or a block of no token.
    """
    return spell_prefill(text or "full", name="--prefill")


def configuration(settings: PromptSettings, request: Request) -> dict[str, Any]:
    """Return what a dry run prints."""
    from kvtool.models.placement import resolve_device, resolve_dtype

    device = resolve_device(settings.device or "auto", settings.device_map)
    spread = {} if settings.device_map is None else {"device_map": settings.device_map}
    return {
        "model": settings.model or REFERENCE,
        "revision": settings.revision,
        "dtype": resolve_dtype(settings.dtype or "auto", device),
        "device": device,
        **spread,
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
