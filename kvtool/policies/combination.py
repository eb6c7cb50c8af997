"""Say why the parts of a policy do not go together: a reason and what would work, if anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtool.errors import UsageError
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.codec.codec import Codec
from kvtool.policies.evicted.calidrop import CaliDrop
from kvtool.policies.evicted.eviction import Merging, SelectOnly
from kvtool.policies.parts import Allocator, Evicted, Evidence, Pace, Read, Rescore, Score, Select
from kvtool.policies.spelling import is_inside, part_name

Reasons = Iterator[UsageError]
_SCORED = "put it on scissorhands, h2o, tova, roco, snapkv, pyramidkv, adakv, d2o"


def check_evidence(score: Score) -> Reasons:
    """Name evidence that does not go with how a score is run."""
    if score.sees_projection and score.when != "prompt":
        yield UsageError(
            f"`{score.name}` looks at the attention's output projection, which is too dear for "
            f"every decoded token, so it can cut prompts only, not {score.when}"
        )
    if (score.layer_tokens == "same") != (score.evidence is Evidence.LOGITS):
        yield UsageError(f"`{score.name}`: layers are cut together by logits, and by nothing else")
    if score.evidence is Evidence.REPETITION and score.when != "prompt":
        yield UsageError(
            f"`{score.name}` has a prompt repeated, so it can cut prompts only, not {score.when}"
        )
    if score.evidence is not Evidence.MOMENTS:
        return
    if score.when == "never" or (score.when == "always" and score.pace is None):
        yield UsageError(
            f"`{score.name}` goes by the moments of a prompt's queries, so it can cut prompts, "
            f"or decoded tokens at a pace of its own, not {score.when}"
        )
    if score.positions == "cache":
        yield UsageError(
            f"`{score.name}` turns queries back from their place in the text, "
            "which positions=cache does not tell"
        )


def check_rescore(rescore: Rescore, score: Score, select: Select | None) -> Reasons:
    """Name scores that a rescore cannot weigh, and a selection that it does not go with."""
    name, base = rescore.name, part_name(score)
    if not rescore.at_cut:
        if not score.attention:
            yield UsageError(
                f"`{name}` weighs values by attention scores, and `{base}` has none",
                hint=f"{_SCORED} or expected(values=false)"
                if is_inside(type(score))
                else "if its importance is attention that each token receives, its class says so: "
                "attention: ClassVar = True",
            )
        return
    if score.when != "prompt" or score.layer_tokens == "nested" or _is_blind(score):
        does = "evicts decoded tokens, too" if score.when == "always" else "does not cut it so"
        yield UsageError(
            f"`{name}` goes with scores by which each layer cuts a prompt once, "
            f"and `{base}` {does}",
            hint=f"put it on a policy that does: snapkv+{name}",
        )
    if score.unweighed is not None:
        yield UsageError(
            f"`{name}` weighs values by what is made of them, and `{base}` weighs them already",
            hint=f"{score.unweighed}+{name}",
        )
    if select is not None:
        yield UsageError(
            f"`{select.name}` keeps the same tokens in all KV heads of a layer, "
            f"and `{name}` chooses in each head by its values"
        )


def _is_blind(score: Score) -> bool:
    """Return whether a score looks at nothing of the model's."""
    return score.evidence is Evidence.NOTHING and not score.sees_hidden


def check_select(select: Select, score: Score, split: HeadSplit | None) -> Reasons:
    """Name a score that cuts no prompt, and a split over heads that lets them differ."""
    if score.when != "prompt" or score.layer_tokens == "nested":
        yield UsageError(
            f"`{select.name}` chooses among the tokens of a prompt by their scores, "
            f"and `{score.name}` does not cut a prompt so",
            hint=f"put it on a policy that does: snapkv+{select.name}",
        )
    if split is not None:
        differs = split.modifier if score.head_split is None else score.name
        yield UsageError(
            f"`{select.name}` keeps the same tokens in all KV heads of a layer, "
            f"and `{differs}` lets them differ"
        )


def check_split(split: Allocator, score: Score) -> Reasons:
    """Name a score whose budget is not there to split, is shared or has a schedule."""
    name, over = split.modifier, "heads" if isinstance(split, HeadSplit) else "layers"
    if over == "heads" and score.evidence is Evidence.QUERIES:
        yield UsageError(
            f"`{name}` stores heads of unequal counts apart, "
            f"and `{score.name}` keeps the newest queries of a whole layer"
        )
    if score.when == "never":
        yield UsageError(
            f"`{name}` splits a budget over {over}, and `{score.name}` keeps everything"
        )
    if score.evidence is Evidence.REPETITION:
        yield UsageError(
            f"the KV heads of `{score.name}` compete for one budget, of all layers or of each, "
            f"which excludes `{name}`",
            hint=f"{score.name}(layers=each)",
        )
    if score.layer_tokens == "nested":
        yield UsageError(
            f"`{score.name}` splits its budget by a schedule of its own, which excludes `{name}`"
        )
    if score.layer_tokens == "same":
        yield UsageError(
            f"`{name}` lets {over} keep different tokens, "
            f"and `{score.name}` keeps the same in all of them"
        )
    if isinstance(split, HeadSplit) and split.by_score and _is_blind(score):
        yield UsageError(
            f"`{name}` lets heads compete by their scores, "
            f"and those of `{score.name}` say nothing of heads",
            hint=f"{_SCORED}, expected, lagkv, keydiff or knorm",
        )


def check_pace(pace: Pace, score: Score, reader: Read | None) -> Reasons:
    """Name a score that cannot be cut while tokens are decoded, by layers, and a reader.

    A score that cuts prompts can if the last queries vote: so can the newest ones, at any time.
    """
    votes = score.evidence is Evidence.LAST_ROWS and score.layer_tokens == "own"
    if score.when == "never" or (score.when == "prompt" and not votes):
        does = "keeps everything" if score.when == "never" else "scores prompts only"
        yield UsageError(
            f"`{pace.name}` says when decoded tokens are cut, and `{score.name}` {does}",
            hint=f"h2o+{pace.name} or snapkv+{pace.name}",
        )
    if reader is not None:
        yield UsageError(
            f"`{pace.name}` cuts slots while tokens are decoded, "
            f"and the tables of `{reader.name}` only grow"
        )
    if score.pace is not None:
        own = next((name for name in ("buffer", "every") if hasattr(score, name)), None)
        yield UsageError(
            f"`{score.name}` cuts every so many tokens by itself, which excludes `{pace.name}`",
            hint=own and f"{score.name}({own}={pace.spare})",
        )
    if score.layer_tokens == "same":
        yield UsageError(
            f"`{pace.name}` says when a layer is cut, and `{score.name}` cuts all layers at once"
        )


def check_evicted(evicted: Evicted, score: Score, pace: Pace | None) -> Reasons:
    """Name scores that leave nothing for a part that uses evicted tokens."""
    name = evicted.name
    if isinstance(evicted, SelectOnly):
        yield UsageError(f"`{name}` needs a score that comes with a reader, as rocketkv-mt does")
    if not isinstance(evicted, (Merging, CaliDrop)):
        yield UsageError(
            f"`{name}` is no Merging, so no evicted token reaches it",
            hint="kvtool.policies.evicted.eviction.Merging is the part that is handed them",
        )
    if score.when == "never":
        yield UsageError(
            f"`{name}` makes something of evicted tokens, and `{score.name}` evicts none"
        )
    if score.layer_tokens == "same":
        yield UsageError(
            f"`{name}` makes something of tokens that a layer evicts by itself, "
            f"and `{score.name}` cuts all layers at once"
        )
    if isinstance(evicted, Merging) and evicted.queries:
        once = f"`{name}` repairs kept values once, when a prompt is cut, "
        if score.when != "prompt":
            yield UsageError(
                f"{once}and `{score.name}` evicts while it decodes",
                hint=f"put it on a policy that cuts prompts only: snapkv+{name}",
            )
        if pace is not None:
            yield UsageError(
                f"{once}and `{pace.name}` cuts again while tokens are decoded",
                hint=f"{score.name}+{name}",
            )
    if score.positions == "cache" and evicted.works_on_keys:
        yield UsageError(
            f"`{name}` works on keys that stand still, and with positions=cache they move",
            hint=f"{score.name}+{name}",
        )
    if score.evicted is not None:
        yield UsageError(
            f"`{score.name}` merges what it evicts already, which excludes `{name}`",
            hint=f"{score.name}(merge=none)+{name}",
        )


def check_heads(evicted: Evicted, score: Score, split: HeadSplit) -> UsageError:
    """Say that evicted tokens cannot follow heads of unequal counts."""
    return UsageError(
        f"`{evicted.name}` cannot follow heads of unequal counts while they decode, as "
        f"`{score.name}` with `{split.modifier}` has them",
        hint=f"put it on a policy that cuts a prompt: adakv+{evicted.name}",
    )


def check_reader(
    score: Score,
    read: Read | None,
    modifiers: Sequence[object],
    on_evict: Evicted | None,
    split: HeadSplit | None,
) -> Reasons:
    """Name parts that a reader leaves nothing to do for, and scores that it cannot follow.

    Args:
        read: beside the score; None: at most the score's own.
        modifiers: of the score, codecs included.
        on_evict, split: the score's own included.
    """
    budgeted = [part_name(part) for part in modifiers if not isinstance(part, Codec)]
    if score.reader is not None and budgeted:
        yield UsageError(
            f"the budget of `{score.name}` is what a step reads, and its plan says what "
            f"is stored; `{budgeted[0]}` has no part in it"
        )
    if read is None:
        return
    if score.when == "never" and budgeted:
        yield UsageError(
            f"`{read.name}` keeps everything and chooses what is read; "
            f"`{budgeted[0]}` has nothing to do there"
        )
    if score.reader is not None:
        yield UsageError(f"`{score.name}` comes with a reader of its own")
    if score.when == "always":
        yield UsageError(
            f"`{score.name}` writes over slots at every step, "
            f"and the tables of `{read.name}` only grow",
            hint="readers go on scores that keep everything or cut prompts, such as snapkv",
        )
    if on_evict is not None:
        yield UsageError(f"`{on_evict.name}` and `{read.name}` do not go together")
    if split is not None:
        yield UsageError(f"`{read.name}` needs KV heads that hold equally many tokens")
    if score.when == "prompt" and read.k is None:
        yield UsageError(
            f"the budget of `{score.name}` is what is stored; `{read.name}` needs its own k"
        )


def check_codec(
    codec: Codec, score: Score, reader: Read | None, on_evict: Evicted | None
) -> Reasons:
    """Name a reader, which reads slots in part, and merging, which changes them."""
    if reader is not None:
        name = reader.name if score.reader is None else score.name
        yield UsageError(
            f"`{name}` chooses tokens by tables of keys as they are, "
            f"which `{codec.name}` does not store",
            hint=f"put it on a policy without a reader: full+{codec.name}, snapkv+{codec.name}",
        )
    if isinstance(on_evict, Merging) and not on_evict.queries:
        name, without = on_evict.name, score.name
        if score.evicted is not None:
            name, without = score.name, f"{score.name}(merge=none)"
        yield UsageError(
            f"`{name}` changes kept slots again and again, "
            f"and `{codec.name}` rounds a slot once, when it is written",
            hint=f"{without}+{codec.name}",
        )
