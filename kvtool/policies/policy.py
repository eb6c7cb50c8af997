"""A policy: the parts that decide together what stays in the cache."""

from dataclasses import dataclass
from functools import cached_property

from kvtool.errors import UsageError
from kvtool.policies.allocate.room import Allocator, HeadSplit
from kvtool.policies.parts import Rescore, Score

_SCORED = "put it on scissorhands, h2o, tova, roco, snapkv, pyramidkv or adakv"


@dataclass(frozen=True)
class Policy:
    """A score, and what modifies it; `str(policy)` is a spelling that `parse_policy` reads back.

    Args:
        score: what matters.
        rescore: a modifier of the score (CAOTE, FastCAOTE), or None.
        allocate: how the budget is split over the layers; None: as the score does it by itself.
        heads: how a layer's budget is split over its KV heads; None: as the score does it.

    Raises:
        UsageError: the rescore, or the split over heads, needs attention scores and the score has
            none; a split of a budget that nobody holds.
    """

    score: Score
    rescore: Rescore | None = None
    allocate: Allocator | None = None
    heads: HeadSplit | None = None

    def __post_init__(self) -> None:
        for split, over in ((self.allocate, "layers"), (self.heads, "heads")):
            if split is not None and self.score.when == "never":
                raise UsageError(
                    f"`{split.modifier}` splits a budget over {over}, "
                    f"and `{self.score.name}` keeps everything"
                )
        if self.heads is not None and self.heads.by_score and not self.score.attention:
            raise UsageError(
                f"`{self.heads.modifier}` lets heads compete by attention scores, "
                f"and `{self.score.name}` has none",
                hint=_SCORED,
            )
        if self.rescore is not None and not self.score.attention:
            raise UsageError(
                f"`{self.rescore.name}` weighs values by attention scores, "
                f"and `{self.score.name}` has none",
                hint=_SCORED,
            )

    @cached_property
    def ranking(self) -> Score:
        """The score as it is run: per KV head where a rescore or a split makes heads differ."""
        by_head = self.rescore is not None or self.head_split is not None
        return self.score.by_head() if by_head else self.score

    @property
    def allocator(self) -> Allocator | None:
        """How the budget is split over the layers; None: every layer has the same."""
        return self.score.allocator if self.allocate is None else self.allocate

    @property
    def head_split(self) -> HeadSplit | None:
        """How a layer's budget is split over its KV heads; None: equally."""
        return self.score.head_split if self.heads is None else self.heads

    def check_budget(self, tokens: int) -> None:
        """Refuse a budget that the protected tokens alone would fill.

        Raises:
            UsageError: the budget is not above what is always kept.
        """
        if tokens < 1:
            raise UsageError(f"budget must be 1 token or more, got {tokens}")
        reserved = {name: count for name, count in self.score.reserved(tokens).items() if count}
        total = sum(reserved.values())
        if total >= tokens:
            parts = " + ".join(f"{name} {count}" for name, count in reserved.items())
            parts += f" = {total}" if len(reserved) > 1 else ""
            raise UsageError(f"budget {tokens} is not above {parts} of policy `{self.score.name}`")

    @property
    def least(self) -> int:
        """The smallest budget that holds more than what is always kept."""
        tokens = 1
        while sum(self.score.reserved(tokens).values()) >= tokens:
            tokens += 1
        return tokens

    def __str__(self) -> str:
        from kvtool.policies.grammar import format_policy

        return format_policy(self)
