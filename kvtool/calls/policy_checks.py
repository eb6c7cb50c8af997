"""The contract of a policy, each clause as a check on a small random model, without a network.

`CHECKS` holds them by name. A check raises `Broken` in the words of the contract, or whatever the
policy raises; `Skip` where the clause says nothing about a policy of this kind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvtool.cache.entry.build import attach, build_cache
from kvtool.cache.features.repetition import Instructions, Repetition
from kvtool.cache.files.load import load_cache
from kvtool.cache.files.save import save_cache
from kvtool.cache.hooks.attach import detach
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation import decode_step, prefill
from kvtool.planning.rocketkv_stages import tokens_left
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.grammar import parse_policy, read_spelling
from kvtool.policies.guard import Guarded, fault
from kvtool.policies.policy import reads_whole
from kvtool.policies.slot_view import SlotView
from kvtool.transformers_versions import cache_argument

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvtool.cache.whole.cache import KVCache
    from kvtool.policies.numbers import Count, State
    from kvtool.policies.policy import Policy

PROMPT, NEW, TURN, SHORT = 48, 7, 11, 9  # tokens; the shortest entry of a batch fits
BLOCK = "block:16"
LAYERS, KV_HEADS, DIM, WORDS, SINK = 2, 2, 32, 96, 1
LENGTHS = (PROMPT, 29, SHORT)
LEAST = 20  # budget of the checks, unless the policy needs more
MOST = 4096  # budgets that are tried
MOST_READ = 2 * PROMPT  # tokens that no check reads
EXACT, ROUNDING, CODES = 2e-5, 3e-4, 0.05  # how far apart logits may be


class Broken(Exception):
    """A clause of the contract that does not hold."""


class Skip(Exception):
    """A clause that says nothing about this policy."""


class Watched(Guarded):
    """A score from outside, whose hooks are watched.

    Attributes:
        most_protected: the most tokens of a head that it has protected.
    """

    def __init__(self, guard: Guarded) -> None:
        super().__init__(guard._part)
        self.most_protected = 0

    def _run(self, hook: str, *shown: Any) -> Any:
        before = [(each, each.clone()) for each in _read_only(shown)]
        found = super()._run(hook, *shown)
        for each, copied in before:
            if not torch.allclose(each, copied, rtol=0, atol=0, equal_nan=True):
                raise fault(self._part, hook, "writes into what it is shown to read only")
        return found

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor | None:
        found = super().protected(state, view, evicted)
        if found is not None:
            count = (found & (view.positions >= 0)).sum(-1, keepdim=True)
            over = int((count - view.budget).max())
            if over > 0:
                message = f"marks {int(count.max())} tokens of a head, {over} more than its budget"
                raise fault(self._part, "protected", message, "count them in `reserved`")
            self.most_protected = max(self.most_protected, int(count.max()))
        return found


def _read_only(shown: Iterable[Any]) -> Iterator[Tensor]:
    """Return the tensors that a hook may not write into; what is decoded for it is a copy."""
    for each in shown:
        if isinstance(each, SlotView):
            stored = [each.values, each.keys]
            yield each.positions
            yield from chain(*(tensors for tensors in stored if isinstance(tensors, tuple)))
        elif isinstance(each, AttentionRows):
            yield each.weights


@dataclass(frozen=True)
class Subject:
    """A policy under check.

    Attributes:
        budget: tokens; None where it takes none.
        model: with kvtool's attention.
    """

    policy: Policy
    budget: int | None
    model: PreTrainedModel

    def __post_init__(self) -> None:
        policy = replace(self.policy)
        if isinstance(policy.ranking, Guarded):
            vars(policy)["ranking"] = Watched(policy.ranking)
        object.__setattr__(self, "policy", policy)

    def cache(self, mode: str = "full", budget: int | None = None) -> KVCache:
        """Return an empty cache."""
        tokens = None if self.budget is None else budget or self.budget
        shown = self.policy.repetition is not None or self.policy.shown_queries > 0
        cache = build_cache(self.model, self.policy, tokens, prefill="full" if shown else mode)
        part = Repetition.of(cache)
        if part is not None:
            part.instruct(Instructions((5, 9, 2), (7, 3)))
        return cache

    def feed(self, cache: KVCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Read a prompt or a turn: logits (1, batch, words)."""
        return prefill(self.model, cache, ids, mask)[None]

    def steps(self, cache: KVCache, tokens: Tensor) -> Tensor:
        """Decode (batch, n) tokens: logits (n, batch, words)."""
        return torch.stack([decode_step(self.model, cache, token) for token in tokens.T])

    @property
    def near(self) -> float:
        """Return how far apart logits of one text may be where other kernels have run."""
        return ROUNDING if self.policy.codec is None else CODES


CHECKS: dict[str, Callable[[Subject], None]] = {}


def check(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
    """Put a check into the battery, under its name in words."""
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def small_budget(policy: Policy) -> int | None:
    """Return the least budget from `LEAST` on that a policy takes, None where it takes none.

    A policy of two stages has to take it for a text of any length, too. One that keeps its prompts
    gets a budget that the longest ones fit in.

    Raises:
        UsageError: it takes none of those that are tried.
    """
    if not policy.takes_budget:
        return None
    least = PROMPT + TURN + 1 if policy.score.keeps_prompt else LEAST
    for tokens in range(least, MOST):
        try:
            policy.check_budget(tokens)
            for length in range(1, MOST_READ):
                tokens_left(policy, tokens, length, 0)
        except UsageError:
            continue
        return tokens
    raise UsageError(f"`{policy}` takes no budget from {least} to {MOST} tokens")


def random_model() -> PreTrainedModel:
    """Make a Llama of two layers with large queries and keys, and a first token that attracts."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=SINK,
    )
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = 0.5 if "embed" in name else 0.45 if name.endswith(_SHARP) else 0.2
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        pull = torch.randn(64, generator=generator)
        embedding = model.get_input_embeddings().weight
        embedding += 0.35 * pull
        embedding[SINK] += 1.5 * pull
    return model


_SHARP = ("q_proj.weight", "k_proj.weight")


def tokens(length: int, seed: int = 0, batch: int = 1) -> Tensor:
    """Draw token ids, (batch, length), that begin with the one that attracts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, WORDS, (batch, length), generator=generator)
    ids[:, 0] = SINK
    return ids


def padded() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return a left-padded batch, its mask, and its entries alone."""
    entries = [tokens(length, seed=length) for length in LENGTHS]
    ids = torch.zeros(len(entries), PROMPT, dtype=torch.long)
    for i, entry in enumerate(entries):
        ids[i, PROMPT - entry.shape[1] :] = entry[0]
    return ids, (ids > 0).long(), entries


def kept(cache: KVCache) -> list[Tensor]:
    """Return the kept positions of every layer, (batch, kv_heads, slots)."""
    return [cache.kept_positions(layer) for layer in range(LAYERS)]


def same_tokens(found: KVCache, expected: KVCache, entry: int | None = None) -> None:
    """Refuse other kept tokens; with `entry`, the others are those of an entry of `found`."""
    for layer, (ours, theirs) in enumerate(zip(kept(found), kept(expected), strict=True)):
        if entry is not None:
            ours, rest = ours[entry : entry + 1].tensor_split([theirs.shape[2]], dim=2)
            if bool((rest >= 0).any()):
                raise Broken(f"layer {layer} keeps more tokens")
        if ours.shape != theirs.shape:
            raise Broken(f"layer {layer} keeps {ours.shape[2]} tokens, not {theirs.shape[2]}")
        if not torch.equal(ours, theirs):
            head = (ours != theirs).any(-1).nonzero()[0].tolist()
            one, other = (set(each[tuple(head)].tolist()) for each in (ours, theirs))
            other_tokens = f"{sorted(one - other)} in place of {sorted(other - one)}"
            raise Broken(f"layer {layer} keeps the tokens {other_tokens}")


def same_logits(found: Tensor, expected: Tensor, near: float) -> None:
    """Refuse logits that are further apart than rounding explains."""
    apart = (found - expected).abs().max().item()
    if not apart <= near * (1 + expected.abs().max().item()):
        raise Broken(f"logits are {apart:.2g} apart")


@check
def it_runs_and_stays_finite(own: Subject) -> None:
    for mode in ("full", BLOCK):
        cache = own.cache(mode)
        logits = torch.cat([own.feed(cache, tokens(PROMPT)), own.steps(cache, tokens(NEW, 1))])
        if not bool(logits.isfinite().all()):
            raise Broken("logits are not finite")


def _full(own: Subject, mode: str) -> Tensor:
    """Logits of transformers' own cache, or of all tokens in a policy's codes."""
    if own.policy.codec is not None:
        full = Subject(replace(parse_policy("full"), codec=own.policy.codec), None, own.model)
        cache = full.cache("full" if reads_whole(own.policy, planned=False) else mode)
        return torch.cat([full.feed(cache, tokens(PROMPT)), full.steps(cache, tokens(NEW, 1))])
    plain = detach(copy.deepcopy(own.model))
    cache, ids = DynamicCache(config=plain.config), tokens(PROMPT)
    with torch.no_grad():
        found = [plain(ids, **{cache_argument(): cache}).logits[:, -1]]
        for token in tokens(NEW, 1)[0]:
            found.append(plain(token.view(1, 1), **{cache_argument(): cache}).logits[:, -1])
    return torch.stack(found)


@check
def a_text_that_fits_the_budget_is_left_alone(own: Subject) -> None:
    near = EXACT if own.policy.codec is None else CODES
    for mode in ("full", BLOCK):
        cache = own.cache(mode, budget=2 * (PROMPT + NEW))
        found = torch.cat([own.feed(cache, tokens(PROMPT)), own.steps(cache, tokens(NEW, 1))])
        held = cache.report().kept_per_layer
        if held != [PROMPT + NEW] * LAYERS:
            raise Broken(f"{min(held)} of {PROMPT + NEW} tokens are kept")
        same_logits(found, _full(own, mode), near)


@check
def the_budget_is_held(own: Subject) -> None:
    if own.budget is None or own.policy.budget_is_traffic:
        raise Skip("the budget is not what is stored")
    appends = own.policy.when == "prompt"
    most = own.budget + max(own.policy.spare - 1, 0)
    for mode in ("full", BLOCK):
        cache = own.cache(mode)
        own.feed(cache, tokens(PROMPT))
        at_first = _held(cache)
        for step in range(NEW + 1):
            held, allowed = _held(cache), most + (step if appends else 0)
            if not at_first <= held <= allowed:
                right = allowed if held > allowed else f"{at_first:g}"
                raise Broken(f"{held:g} tokens are held after {step} decoded ones, not {right}")
            if step < NEW:
                own.steps(cache, tokens(NEW, 9)[:, step : step + 1])


def _held(cache: KVCache) -> float:
    """Tokens that a head holds in the mean."""
    return sum(int((layer >= 0).sum()) for layer in kept(cache)) / (KV_HEADS * LAYERS)


@check
def an_entry_of_a_padded_batch_is_the_entry_alone(own: Subject) -> None:
    for mode in ("full", BLOCK):
        entries_are_entries_alone(own, mode)


def entries_are_entries_alone(own: Subject, mode: str) -> None:
    """Compare a padded batch, decoded, with a padded turn, with each of its entries alone."""
    ids, mask, entries = padded()
    new, turn = tokens(NEW, 9, batch=3), tokens(TURN, 5, batch=3)
    seen = torch.ones_like(turn)
    seen[1, :-3] = 0
    both = own.cache(mode)
    together = [own.feed(both, ids, mask), own.steps(both, new), own.feed(both, turn, seen)]
    together.append(own.steps(both, new[:, :2]))
    for i, entry in enumerate(entries):
        one = own.cache(mode)
        alone = [own.feed(one, entry), own.steps(one, new[i : i + 1])]
        alone.append(own.feed(one, turn[i : i + 1, seen[i].bool()]))
        alone.append(own.steps(one, new[i : i + 1, :2]))
        try:
            same_tokens(both, one, entry=i)
            same_logits(torch.cat(together)[:, i : i + 1], torch.cat(alone), own.near)
        except Broken as broken:
            raise Broken(f"entry {i} of {LENGTHS[i]} tokens: {broken}") from None


@check
def one_block_is_the_whole_prompt(own: Subject) -> None:
    if own.policy.repetition is not None:
        raise Skip("its prompt is read whole")
    whole, block = own.cache(), own.cache(f"block:{PROMPT}")
    for cache in (whole, block):
        own.feed(cache, tokens(PROMPT))
    same_tokens(block, whole)
    same_logits(own.steps(block, tokens(NEW, 9)), own.steps(whole, tokens(NEW, 9)), own.near)


@check
def blocks_of_one_token_decide_as_decoded_tokens(own: Subject) -> None:
    policy = own.policy
    if own.budget is None or policy.when != "always" or policy.cuts is not None:
        raise Skip("it does not cut after every decoded token")
    if policy.on_evict is not None or policy.allocator is not None:
        raise Skip("another part of it goes by prompts")
    decoded, read = own.cache(), own.cache("block:1")
    for cache in (decoded, read):
        own.feed(cache, tokens(SHORT))
    new = tokens(2 * LEAST, 9)
    same = own.steps(decoded, new)[-1:], own.feed(read, new)
    same_tokens(read, decoded)
    same_logits(same[1], same[0], own.near)


@check
def the_same_text_is_cut_the_same_again(own: Subject) -> None:
    first, again, reset = own.cache(), own.cache(), own.cache()
    own.feed(reset, tokens(PROMPT, 4)), own.steps(reset, tokens(NEW, 2))
    reset.reset()
    prompts = [own.feed(cache, tokens(PROMPT)) for cache in (first, again, reset)]
    copied = first.copy()
    own.steps(again.copy(), tokens(NEW, 3))  # of which `again` knows nothing
    decoded = own.steps(first, tokens(NEW, 9))
    others = {"a second": (again, 1), "a reset": (reset, 2), "a copied": (copied, 0)}
    for which, (cache, prompt) in others.items():
        try:
            same_logits(prompts[prompt], prompts[0], 0)
            same_logits(own.steps(cache, tokens(NEW, 9)), decoded, 0)
            same_tokens(cache, first)
        except Broken as broken:
            raise Broken(f"{which} cache: {broken}") from None


@check
def a_saved_cache_goes_on_like_the_unbroken_one(own: Subject) -> None:
    try:
        read_spelling(str(own.policy))
    except UsageError:
        raise Skip("a file names its class, which is not at the top of a module") from None
    ids, mask, _ = padded()
    new = tokens(2 * NEW, 9, batch=3)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache = own.cache(BLOCK)
        own.feed(cache, ids, mask), own.steps(cache, new[:, :NEW])
        save_cache(cache, path)
        loaded = load_cache(path, own.model)
        same_tokens(loaded, cache)
        logits = own.steps(loaded, new[:, NEW:]), own.steps(cache, new[:, NEW:])
        same_tokens(loaded, cache)
        same_logits(*logits, own.near)
        turn = tokens(TURN, 5, batch=3)
        same_logits(own.feed(loaded, turn), own.feed(cache, turn), own.near)


@check
def a_rollback_leaves_no_trace(own: Subject) -> None:
    ids, mask, _ = padded()
    new, turn = tokens(NEW, 9, batch=3), tokens(TURN, 5, batch=3)
    for mode in ("full", BLOCK):
        asked, never = own.cache(mode), own.cache(mode)
        for cache in (asked, never):
            own.feed(cache, ids, mask)
        with asked.rollback():
            own.feed(asked, turn), own.steps(asked, new)
            asked.reorder_cache(torch.tensor([2, 0, 0]))
        with asked.rollback():
            own.steps(asked, new)
        same_tokens(asked, never)
        if asked.report() != never.report():
            raise Broken("the report is another one afterwards")
        same_logits(own.steps(asked, new), own.steps(never, new), 0)
        same_logits(own.feed(asked, turn), own.feed(never, turn), 0)
        same_tokens(asked, never)


@check
def reordered_entries_take_all_that_is_known_of_them(own: Subject) -> None:
    ids, mask, entries = padded()
    new, order = tokens(NEW, 9, batch=3), [2, 0, 0]
    cache = own.cache()
    own.feed(cache, ids, mask), own.steps(cache, new)
    cache.reorder_cache(torch.tensor(order))
    then = own.steps(cache, new)
    for place in (0, 1):
        entry = order[place]
        one = own.cache()
        own.feed(one, entries[entry]), own.steps(one, new[entry : entry + 1])
        alone = own.steps(one, new[place : place + 1])
        same_tokens(cache, one, entry=place)
        same_logits(then[:, place : place + 1], alone, own.near)


@check
def what_is_protected_is_reserved(own: Subject) -> None:
    own = replace(own)  # which has seen nothing yet
    watched = own.policy.ranking
    if own.budget is None or not isinstance(watched, Watched):
        raise Skip("a policy of the package, or one without a budget")
    for mode in ("full", BLOCK):
        cache = own.cache(mode)
        own.feed(cache, tokens(PROMPT)), own.steps(cache, tokens(NEW, 9))
    reserved = sum(own.policy.score.reserved(own.budget).values())
    if watched.most_protected > reserved:
        raise Broken(
            f"{watched.most_protected} tokens of a head are protected, and `reserved` counts "
            f"{reserved} of a budget of {own.budget}"
        )


@check
def a_budget_at_its_limit_is_refused_or_works(own: Subject) -> None:
    if own.budget is None:
        raise Skip("it takes no budget")
    if own.policy.score.keeps_prompt:
        raise Skip("the prompt stays, and has to fit")
    least = own.policy.min_budget
    own.policy.check_budget(least)
    cache = own.cache(budget=least)
    own.feed(cache, tokens(PROMPT)), own.steps(cache, tokens(NEW, 9))
    if least > 1 and sum(own.policy.score.reserved(least - 1).values()) >= least - 1:
        try:
            own.policy.check_budget(least - 1)
        except KvtoolError:
            return
        raise Broken(f"a budget of {least - 1} is not refused, which what is reserved would fill")


def attached_model() -> PreTrainedModel:
    """Return the model of the battery with kvtool's attention."""
    return attach(random_model())
