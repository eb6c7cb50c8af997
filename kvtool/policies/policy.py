"""A policy: the parts that decide together which tokens are stored, and which of them are read.

`compose` puts a base and its modifiers together. Some policies cut a prompt at its end only.
`reads_whole` finds them: they read it at once even where blocks are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kvtool.errors import UsageError
from kvtool.maths.columns import COLUMNS
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.codec.codec import Codec
from kvtool.policies.combination import (
    check_codec,
    check_evicted,
    check_evidence,
    check_heads,
    check_pace,
    check_reader,
    check_rescore,
    check_select,
    check_split,
)
from kvtool.policies.declared import check_declared
from kvtool.policies.evicted.eviction import Merging, SelectOnly
from kvtool.policies.evidence import MomentsAsked, RepetitionAsked
from kvtool.policies.guard import fault, guarded
from kvtool.policies.numbers import PROMPT, SHIFT
from kvtool.policies.parts import Allocator, Evicted, Evidence, Pace, Read, Rescore, Score, Select
from kvtool.policies.scores.full import Full
from kvtool.policies.spelling import check_numbers, part_name, spell_settings

Part = Score | Rescore | Select | Pace | Allocator | Evicted | Read | Codec
_ATTEMPTS = 10_000  # budgets that are tried until one is above what is always kept


@dataclass(frozen=True)
class Policy:
    """A score, and what modifies it; `str(policy)` is a spelling that `parse_policy` reads back.

    Args:
        score: what matters.
        rescore: a modifier of the score (CAOTE, FastCAOTE, CriticalKV), or None.
        allocate: how the budget is split over the layers; None: as the score does it by itself.
        heads: how a layer's budget is split over its KV heads; None: as the score does it.
        evicted: what becomes of the tokens that leave; None: what the score makes of them by
            itself.
        read: which of what is stored a decode step looks at; None: as the score does it by itself.
            Beside a score that evicts, the budget is what is stored, and the reader says itself how
            many tokens (`k`) it attends to.
        select: how the tokens of a prompt are chosen by their scores; None: one by one.
        pace: how many tokens are decoded between two cuts; None: as the score does it.
        codec: how the key and value of a slot are written down; None: as they are.

    Raises:
        UsageError: a number beyond its limits, or parts that do not go together (`combination`).
        PolicyError: a score from outside that declares what does nothing (`declared`).
    """

    score: Score
    rescore: Rescore | None = None
    allocate: Allocator | None = None
    heads: HeadSplit | None = None
    evicted: Evicted | None = None
    read: Read | None = None
    select: Select | None = None
    pace: Pace | None = None
    codec: Codec | None = None

    def __post_init__(self) -> None:
        check_declared(self.score)
        for part in self._parts:
            check_numbers(part)
        if self.codec is not None:
            object.__setattr__(self, "codec", self.codec.shortest())
        for reason in self._reasons():
            raise reason
        for name in (
            "when",
            "votes_again",
            "shows_keys",
            "statistics",
            "columns",
            "needs_all_rows",
            "rescoring",
            "rescoring_at_cut",
            "selecting",
            "reader",
            "on_evict",
            "allocator",
            "head_split",
        ):  # and what they follow from
            getattr(self, name)  # kept now: torch.compile cannot trace the lock of the first time

    def _reasons(self) -> Iterator[UsageError]:
        """Say why the parts do not go together, the reason that matters most first."""
        score, pace, used, split = self.score, self.pace, self.on_evict, self.head_split
        yield from check_evidence(score)
        yield from check_reader(score, self.read, self._modifiers, used, split)
        if self.select is not None:
            yield from check_select(self.select, score, split)
        if pace is not None:
            yield from check_pace(pace, score, self.reader)
        for own in (self.heads, self.allocate):
            if own is not None:
                yield from check_split(own, score)
        if self.rescore is not None:
            yield from check_rescore(self.rescore, score, self.select)
        if self.evicted is not None:
            yield from check_evicted(self.evicted, score, pace)
        if self.codec is not None:
            yield from check_codec(self.codec, score, self.reader, used)
        if used is not None and split is not None and self.when == "always":
            yield check_heads(used, score, split)

    def __deepcopy__(self, memo: dict) -> Policy:
        return self  # a value; a score of one's own may hold the weights of a network

    @property
    def _parts(self) -> list[Part]:
        """Return the parts that there are, in the order in which they are spelled."""
        parts = (self.score, *self._modifiers, self.read)
        return [part for part in parts if part is not None]

    @property
    def _modifiers(self) -> list[Part]:
        """Return what changes the score, in the order in which it is spelled."""
        parts = (self.rescore, self.select, self.pace, self.evicted, self.allocate, self.heads)
        return [part for part in (*parts, self.codec) if part is not None]

    @property
    def name(self) -> str:
        """Return the name of the base."""
        if self.read is not None and self.score.when == "never":
            return self.read.name
        return self.score.name

    @cached_property
    def reader(self) -> Read | None:
        """Return what chooses the tokens that a decode step reads; None: it reads all."""
        return self.score.reader if self.read is None else self.read

    @property
    def budget_is_traffic(self) -> bool:
        """Return whether the budget is what a decode step reads, and not what is stored."""
        if self.reader is None or self.when == "always":
            return False
        return self.score.when == "never" or self.reader.k is None

    @property
    def two_stages(self) -> bool:
        """Return whether a budget of traffic says as well how much of a prompt is evicted.

        What is stored of a prompt is known once all of it is there, so it is cut at its end.
        """
        return self.budget_is_traffic and self.score.when == "prompt"

    @property
    def select_only(self) -> bool:
        """Return whether evicted tokens stay stored, and only the reader passes over them."""
        return isinstance(self.on_evict, SelectOnly)

    @property
    def stores_all(self) -> bool:
        """Return whether nothing leaves, and the budget only bounds what is read."""
        return self.budget_is_traffic and (self.score.when == "never" or self.select_only)

    @property
    def attends_all(self) -> bool:
        """Return whether every token stays, and every step looks at all of them."""
        return self.score.when == "never" and self.reader is None

    @property
    def shown_queries(self) -> int:
        """Return how many queries of a prompt are shown to what repairs it as it is cut."""
        used = self.on_evict
        return used.queries if isinstance(used, Merging) else 0

    @property
    def plain_steps(self) -> bool:
        """Return whether decode steps only append and evict, so that several may run as one block.

        Not so with a reader, which chooses in every step, with evicted tokens that correct what a
        step attends to, with keys that move, and with a score that reads the logits of each step.
        """
        score, used = self.score, self.on_evict
        appends = score.positions == "text" and score.evidence is not Evidence.LOGITS
        appends = appends and self.reader is None
        return appends and (used is None or isinstance(used, Merging))

    @cached_property
    def when(self) -> Literal["always", "prompt", "never"]:
        """Return when the budget is held: after every step, at the end of prompts, or never."""
        return "always" if self.votes_again else self.score.when

    @cached_property
    def votes_again(self) -> bool:
        """Return whether the newest queries vote whenever a layer is cut, decoded ones too."""
        return self.pace is not None and self.score.when == "prompt"

    @property
    def newest_queries(self) -> int:
        """Return how many newest queries each layer keeps to look back from."""
        looks = self.votes_again or self.ranking.evidence is Evidence.QUERIES
        return self.ranking.window if looks else 0

    @cached_property
    def shows_keys(self) -> bool:
        """Return whether keys are looked at when slots are scored."""
        return self.votes_again or self.ranking.evidence.shows_keys

    @property
    def takes_budget(self) -> bool:
        """Return whether there is anything that a budget would bound."""
        return self.score.when != "never" or self.read is not None

    @cached_property
    def ranking(self) -> Score:
        """Return the score as it is run: per KV head where another part makes heads differ."""
        by_head = self.rescore is not None or self.head_split is not None
        return guarded(self.score.by_head() if by_head else self.score)

    @cached_property
    def rescoring(self) -> Rescore | None:
        """Return the rescore as it is run before budgets are split over heads; None: none is."""
        own = self.rescore
        return None if own is None or own.at_cut else guarded(own)

    @cached_property
    def rescoring_at_cut(self) -> Rescore | None:
        """Return the rescore as it is run in each head's budget, as a prompt is cut."""
        own = self.rescore
        return guarded(own) if own is not None and own.at_cut else None

    @cached_property
    def selecting(self) -> Select | None:
        """Return the selection as it is run."""
        return guarded(self.select)

    @cached_property
    def allocator(self) -> Allocator | None:
        """Return how the budget is split over the layers; None: every layer has the same."""
        return self.score.allocator if self.allocate is None else self.allocate

    @property
    def voting_window(self) -> int | None:
        """Return how many newest tokens vote on the others and stay; None: no such window."""
        score = self.score
        votes = score.evidence is Evidence.LAST_ROWS and score.when == "prompt"
        return score.window if votes or score.evidence is Evidence.QUERIES else None

    @cached_property
    def head_split(self) -> HeadSplit | None:
        """Return how a layer's budget is split over its KV heads; None: equally."""
        split = self.score.head_split if self.heads is None else self.heads
        return split if isinstance(split, HeadSplit) else None

    @cached_property
    def on_evict(self) -> Evicted | None:
        """Return what becomes of evicted tokens; None: they are dropped."""
        return self.score.evicted if self.evicted is None else self.evicted

    @property
    def spare(self) -> int:
        """Return the slots that a head may have above its budget: those of tokens to be cut."""
        if self.when != "always":
            return 0
        return 1 if self.cuts is None else self.cuts.spare

    @property
    def cuts(self) -> Pace | None:
        """Return how many tokens are decoded between two cuts; None: one."""
        return self.score.pace if self.pace is None else self.pace

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Name the float32 numbers beside each slot."""
        own = () if self.on_evict is None else self.on_evict.statistics
        turn = (SHIFT,) if self.score.positions == "cache" else ()
        prompt = (PROMPT,) if self.score.keeps_prompt else ()
        return tuple(dict.fromkeys(self.score.statistics + own + turn + prompt))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Name those of them that are columns of attention, summed over all rows."""
        own = set(self.score.statistics)
        summed = set() if self.on_evict is None else set(self.on_evict.statistics) - own
        if self.ranking.evidence is Evidence.COLUMNS:
            summed |= own
        return tuple(name for name in COLUMNS if name in summed)

    @cached_property
    def observes_rows(self) -> bool:
        """Return whether the score looks at every attention row itself."""
        return self.ranking.evidence is Evidence.ALL_ROWS

    @cached_property
    def needs_all_rows(self) -> bool:
        """Return whether the numbers beside the slots are made from every attention row."""
        return self.observes_rows or bool(self.columns)

    @property
    def moments(self) -> MomentsAsked | None:
        """Return what of the queries' moments is kept beside the slots; None: nothing."""
        return self.ranking.moments if self.ranking.evidence is Evidence.MOMENTS else None

    @property
    def repetition(self) -> RepetitionAsked | None:
        """Return how the model repeats a prompt before it is cut; None: it does not."""
        asks = self.ranking.evidence is Evidence.REPETITION
        return self.ranking.repetition if asks else None

    @property
    def own_block(self) -> int | None:
        """Return the tokens of a `block` of this policy; None: the device gives them."""
        return None if self.repetition is None else self.repetition.block

    @property
    def sees_projection(self) -> bool:
        """Return whether one of its parts looks at the attention's output projection."""
        own = (each.sees_projection for each in (self.score, self.rescore) if each is not None)
        return self.repeats_by_output or any(own)

    @property
    def repeats_by_output(self) -> bool:
        """Return whether a repetition's weights are those of what comes out of the attention."""
        return self.repetition is not None and self.repetition.by_output

    @property
    def sees_hidden(self) -> bool:
        """Return whether numbers beside the slots are made of hidden states."""
        return self.score.sees_hidden

    def check_budget(self, tokens: int) -> None:
        """Refuse a budget that the protected tokens alone would fill.

        Raises:
            UsageError: the budget is not above what is always kept.
        """
        if tokens < 1:
            raise UsageError(f"budget must be 1 token or more, got {tokens}")
        least = 1 if self.reader is None else self.reader.min_budget
        if self.budget_is_traffic and tokens < least:
            raise UsageError(f"{self.name} needs a budget of {least} or more, got {tokens}")
        if self.select is not None and self.select.min_budget > tokens:
            least = self.select.min_budget
            raise UsageError(
                f"budget {tokens} is below a run of {least} tokens of `{self.select.name}`",
                hint=f"+{self.select.name}(length={max(tokens // 4, 1)})",
            )
        reserved = {name: n for name, n in self.score.reserved(tokens).items() if n}
        total = sum(reserved.values())
        if total >= tokens:
            parts = " + ".join(f"{name} {count}" for name, count in reserved.items())
            parts += f" = {total}" if len(reserved) > 1 else ""
            raise UsageError(
                f"budget {tokens} is not above {parts} of policy `{part_name(self.score)}`"
            )

    @property
    def min_budget(self) -> int:
        """Return the smallest budget that an allocator may give to a layer of a longer prompt."""
        reader = self.reader if self.budget_is_traffic else None
        tokens = self.score.min_budget if reader is None else reader.min_budget
        tokens = tokens if self.select is None else max(tokens, self.select.min_budget)
        for _ in range(_ATTEMPTS):
            reserved = sum(self.score.reserved(tokens).values())
            if reserved < tokens:
                return tokens
            tokens = reserved + 1  # what is reserved never falls with the budget
        raise fault(self.score, "reserved", f"counts {reserved} tokens of a budget of {tokens - 1}")

    def __str__(self) -> str:
        """Spell it: lower case, only the parameters that differ from their defaults."""
        fixed = self.heads is not None and self.heads.fixed  # a plan has it
        parts = [part for part in self._parts if not (fixed and part is self.heads)]
        if self.read is not None and self.score == Full():
            parts = [self.read]
        return "+".join(part_name(part) + spell_settings(part) for part in parts)


_KINDS: dict[str, type] = {
    "rescore": Rescore,
    "heads": HeadSplit,
    "allocate": Allocator,
    "evicted": Evicted,
    "read": Read,
    "select": Select,
    "pace": Pace,
    "codec": Codec,
}
"""The field of a policy that takes a modifier; a split over heads is an allocator, too."""


def compose(base: Score | Read, modifiers: Sequence[Part]) -> Policy:
    """Put modifiers on a base; a reader keeps everything.

    Raises:
        UsageError: two modifiers of one kind, or a combination that makes no sense.
    """
    parts: dict[str, Any] = {"read": base} if isinstance(base, Read) else {}
    for part in modifiers:
        field = next(name for name, kind in _KINDS.items() if isinstance(part, kind))
        names = [part_name(each) for each in (parts.setdefault(field, part), part)]
        if parts[field] is not part:
            raise UsageError(
                f"modifier `{names[0]}` is given twice"
                if names[0] == names[1]
                else f"modifiers `{names[0]}` and `{names[1]}` exclude each other; keep one"
            )
    return Policy(Full() if isinstance(base, Read) else base, **parts)


def reads_whole(policy: Policy, *, planned: bool) -> bool:
    """Return whether a prompt is read at once even where blocks are asked for.

    Args:
        planned: whether a plan says how the budget is split.
    """
    if policy.score.layer_tokens == "nested" or policy.shown_queries:
        return True
    if policy.repetition is not None:
        return False
    allocator, split = policy.allocator, policy.head_split
    measures = allocator is not None and allocator.metric is not None
    return not planned and (measures or (split is not None and split.whole_prompt))


def check_blocks(policy: Policy, block: int | None) -> None:
    """Refuse blocks where the whole prompt has to be in the cache before any of it goes.

    Args:
        block: tokens that are asked for; None: all at once.

    Raises:
        UsageError: blocks for a policy that repairs a prompt as it is cut, or that has it repeated
            and weighs the scores anew or makes something of evicted tokens.
    """
    used = policy.on_evict
    if block is not None and used is not None and policy.shown_queries:
        raise UsageError(
            f"`{used.name}` fits what a prompt keeps to what its last queries see of all of it, "
            "so it cannot be read in blocks",
            hint="--prefill full",
        )
    more = used or policy.rescore
    if block is not None and policy.repetition is not None and more is not None:
        raise UsageError(
            f"`{policy.score.name}` keeps the scores of earlier blocks as they are, and "
            f"`{more.name}` would change what they stand for, "
            f"so `{policy}` cannot be read in blocks",
            hint=f"--prefill full, or {policy.score.name} alone",
        )
