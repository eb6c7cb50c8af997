"""Check that the parts of a policy go together, and give the reasons where they do not."""

from collections.abc import Sequence

from kvtool.errors import UsageError
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.codec.codec import Codec
from kvtool.policies.evicted.calidrop import CaliDrop
from kvtool.policies.evicted.eviction import Merging, SelectOnly
from kvtool.policies.parts import Allocator, Evicted, Evidence, Pace, Read, Rescore, Score, Select
from kvtool.policies.spelling import is_inside, part_name

SCORED = "put it on scissorhands, h2o, tova, roco, snapkv, pyramidkv, adakv, d2o"
"""What to do with a modifier that needs attention scores."""


def check_evidence(score: Score) -> None:
    """Refuse evidence that does not go with how a score is run.

    Raises:
        UsageError: such a score.
    """
    if score.sees_projection and score.when != "prompt":
        raise UsageError(
            f"`{score.name}` looks at the attention's output projection, which is too dear for "
            f"every decoded token, so it can cut prompts only, not {score.when}"
        )
    if (score.layer_tokens == "same") != (score.evidence is Evidence.LOGITS):
        raise UsageError(f"`{score.name}`: layers are cut together by logits, and by nothing else")
    if score.evidence is Evidence.REPETITION and score.when != "prompt":
        raise UsageError(
            f"`{score.name}` has a prompt repeated, so it can cut prompts only, not {score.when}"
        )
    if score.evidence is not Evidence.MOMENTS:
        return
    if score.when == "never" or (score.when == "always" and score.pace is None):
        raise UsageError(
            f"`{score.name}` goes by the moments of a prompt's queries, so it can cut prompts, "
            f"or decoded tokens at a pace of its own, not {score.when}"
        )
    if score.positions == "cache":
        raise UsageError(
            f"`{score.name}` turns queries back from their place in the text, "
            "which positions=cache does not tell"
        )


def check_rescore(rescore: Rescore, score: Score, select: Select | None) -> None:
    """Refuse a rescore of scores that it cannot weigh.

    Raises:
        UsageError: such a score, or a selection that it does not go with.
    """
    if rescore.at_cut:
        _check_at_cut(rescore, score, select)
    elif not score.attention:
        hint = f"{SCORED} or expected(values=false)"
        if not is_inside(type(score)):
            hint = (
                "if its importance is attention that each token receives, its class says so: "
                "attention: ClassVar = True"
            )
        raise UsageError(
            f"`{rescore.name}` weighs values by attention scores, "
            f"and `{part_name(score)}` has none",
            hint=hint,
        )


def _check_at_cut(rescore: Rescore, score: Score, select: Select | None) -> None:
    name, base = rescore.name, part_name(score)
    blind = score.evidence is Evidence.NOTHING and not score.sees_hidden
    if score.when != "prompt" or score.layer_tokens == "nested" or blind:
        does = "evicts decoded tokens, too" if score.when == "always" else "does not cut it so"
        raise UsageError(
            f"`{name}` goes with scores by which each layer cuts a prompt once, "
            f"and `{base}` {does}",
            hint=f"put it on a policy that does: snapkv+{name}",
        )
    if score.unweighed is not None:
        raise UsageError(
            f"`{name}` weighs values by what is made of them, and `{base}` weighs them already",
            hint=f"{score.unweighed}+{name}",
        )
    if select is not None:
        raise UsageError(
            f"`{select.name}` keeps the same tokens in all KV heads of a layer, "
            f"and `{name}` chooses in each head by its values"
        )


def check_select(select: Select, score: Score, split: HeadSplit | None) -> None:
    """Refuse a selection where no prompt is cut by scores, or where KV heads differ.

    Raises:
        UsageError: such a score, or a split over heads.
    """
    if score.when != "prompt" or score.layer_tokens == "nested":
        raise UsageError(
            f"`{select.name}` chooses among the tokens of a prompt by their scores, "
            f"and `{score.name}` does not cut a prompt so",
            hint=f"put it on a policy that does: snapkv+{select.name}",
        )
    if split is not None:
        differs = split.modifier if score.head_split is None else score.name
        raise UsageError(
            f"`{select.name}` keeps the same tokens in all KV heads of a layer, "
            f"and `{differs}` lets them differ"
        )


def check_budget_split(split: Allocator, over: str, score: Score) -> None:
    """Refuse to split the budget of a score that keeps everything, shares or schedules it.

    Args:
        over: what it is split over, `layers` or `heads`.

    Raises:
        UsageError: the budget of such a score.
    """
    if score.when == "never":
        raise UsageError(
            f"`{split.modifier}` splits a budget over {over}, and `{score.name}` keeps everything"
        )
    if score.evidence is Evidence.REPETITION:
        raise UsageError(
            f"the KV heads of `{score.name}` compete for one budget, of all layers or of each, "
            f"which excludes `{split.modifier}`",
            hint=f"{score.name}(layers=each)",
        )
    if score.layer_tokens == "nested":
        raise UsageError(
            f"`{score.name}` splits its budget by a schedule of its own, "
            f"which excludes `{split.modifier}`"
        )
    if score.layer_tokens == "same":
        raise UsageError(
            f"`{split.modifier}` lets {over} keep different tokens, "
            f"and `{score.name}` keeps the same in all of them"
        )


def check_split(split: HeadSplit, score: Score) -> None:
    """Refuse to let KV heads differ where a score keeps something of all heads together.

    Raises:
        UsageError: such a score.
    """
    if score.evidence is Evidence.QUERIES:
        raise UsageError(
            f"`{split.modifier}` stores heads of unequal counts apart, "
            f"and `{score.name}` keeps the newest queries of a whole layer"
        )


def check_pace(pace: Pace, score: Score, reader: Read | None) -> None:
    """Refuse to cut at times of its own what cannot be cut while tokens are decoded, by layers.

    A score that cuts prompts can if the last queries vote: so can the newest ones, at any time.

    Args:
        reader: of what is stored; None: all is read.

    Raises:
        UsageError: such a score, or a reader.
    """
    votes = score.evidence is Evidence.LAST_ROWS and score.layer_tokens == "own"
    if score.when == "never" or (score.when == "prompt" and not votes):
        does = "keeps everything" if score.when == "never" else "scores prompts only"
        raise UsageError(
            f"`{pace.name}` says when decoded tokens are cut, and `{score.name}` {does}",
            hint=f"h2o+{pace.name} or snapkv+{pace.name}",
        )
    if reader is not None:
        raise UsageError(
            f"`{pace.name}` cuts slots while tokens are decoded, "
            f"and the tables of `{reader.name}` only grow"
        )
    if score.pace is not None:
        raise UsageError(
            f"`{score.name}` cuts every so many tokens by itself, which excludes `{pace.name}`",
            hint=_pace_setting(score, pace),
        )
    if score.layer_tokens == "same":
        raise UsageError(
            f"`{pace.name}` says when a layer is cut, and `{score.name}` cuts all layers at once"
        )


def _pace_setting(score: Score, pace: Pace) -> str | None:
    """Spell a score that cuts at its own pace with another one; None: no setting is the pace."""
    for name in ("buffer", "every"):
        if hasattr(score, name):
            return f"{score.name}({name}={pace.spare})"
    return None


def check_evicted(evicted: Evicted, score: Score, pace: Pace | None) -> None:
    """Refuse to make something of evicted tokens where that cannot be.

    Args:
        pace: beside the score; None: there is none.

    Raises:
        UsageError: nothing is evicted, or not by a layer itself; keys move; the score makes
            something else of them; a prompt is repaired that is not cut once.
    """
    name = evicted.name
    if isinstance(evicted, SelectOnly):
        raise UsageError(f"`{name}` needs a score that comes with a reader, as rocketkv-mt does")
    if not isinstance(evicted, (Merging, CaliDrop)):
        raise UsageError(
            f"`{name}` is no Merging, so no evicted token reaches it",
            hint="kvtool.policies.evicted.eviction.Merging is the part that is handed them",
        )
    if score.when == "never":
        raise UsageError(
            f"`{name}` makes something of evicted tokens, and `{score.name}` evicts none"
        )
    if score.layer_tokens == "same":
        raise UsageError(
            f"`{name}` makes something of tokens that a layer evicts by itself, "
            f"and `{score.name}` cuts all layers at once"
        )
    if isinstance(evicted, Merging) and evicted.queries:
        _check_cut_once(evicted, score, pace)
    if score.positions == "cache" and evicted.works_on_keys:
        raise UsageError(
            f"`{name}` works on keys that stand still, and with positions=cache they move",
            hint=f"{score.name}+{name}",
        )
    if score.evicted is not None:
        raise UsageError(
            f"`{score.name}` merges what it evicts already, which excludes `{name}`",
            hint=f"{score.name}(merge=none)+{name}",
        )


def _check_cut_once(repair: Merging, score: Score, pace: Pace | None) -> None:
    """Refuse to repair a prompt that goes on being cut while tokens are decoded."""
    if score.when != "prompt":
        raise UsageError(
            f"`{repair.name}` repairs kept values once, when a prompt is cut, "
            f"and `{score.name}` evicts while it decodes",
            hint=f"put it on a policy that cuts prompts only: snapkv+{repair.name}",
        )
    if pace is not None:
        raise UsageError(
            f"`{repair.name}` repairs kept values once, when a prompt is cut, "
            f"and `{pace.name}` cuts again while tokens are decoded",
            hint=f"{score.name}+{repair.name}",
        )


def check_reader(
    score: Score,
    read: Read | None,
    modifiers: Sequence[object],
    on_evict: Evicted | None,
    split: HeadSplit | None,
) -> None:
    """Refuse parts that a reader leaves nothing to do for, and scores that it cannot follow.

    Args:
        read: beside the score; None: at most the score's own.
        modifiers: of the score, codecs included.
        on_evict: what becomes of evicted tokens, the score's own included.
        split: how a layer's budget is split over its heads, the score's own included.

    Raises:
        UsageError: such a part.
    """
    budgeted = [part_name(part) for part in modifiers if not isinstance(part, Codec)]
    if score.reader is not None and budgeted:
        raise UsageError(
            f"the budget of `{score.name}` is what a step reads, and its plan says what "
            f"is stored; `{budgeted[0]}` has no part in it"
        )
    if read is None:
        return
    if score.when == "never" and budgeted:
        raise UsageError(
            f"`{read.name}` keeps everything and chooses what is read; "
            f"`{budgeted[0]}` has nothing to do there"
        )
    if score.reader is not None:
        raise UsageError(f"`{score.name}` comes with a reader of its own")
    if score.when == "always":
        raise UsageError(
            f"`{score.name}` writes over slots at every step, "
            f"and the tables of `{read.name}` only grow",
            hint="readers go on scores that keep everything or cut prompts, such as snapkv",
        )
    if on_evict is not None:
        raise UsageError(f"`{on_evict.name}` and `{read.name}` do not go together")
    if split is not None:
        raise UsageError(f"`{read.name}` needs KV heads that hold equally many tokens")
    if score.when == "prompt" and read.k is None:
        raise UsageError(
            f"the budget of `{score.name}` is what is stored; `{read.name}` needs its own k"
        )


def check_codec(codec: Codec, score: Score, read: Read | None, on_evict: Evicted | None) -> None:
    """Refuse codes where slots are read in part or changed after they have been written.

    Args:
        read, on_evict: as for `check_reader`.

    Raises:
        UsageError: such a reader, or such a use of evicted tokens.
    """
    reader = read if read is not None else score.reader
    if reader is not None:
        name = score.name if read is None else reader.name
        raise UsageError(
            f"`{name}` chooses tokens by tables of keys as they are, "
            f"which `{codec.name}` does not store",
            hint=f"put it on a policy without a reader: full+{codec.name}, snapkv+{codec.name}",
        )
    if isinstance(on_evict, Merging) and not on_evict.queries:
        name, without = on_evict.name, score.name
        if score.evicted is not None:
            name, without = score.name, f"{score.name}(merge=none)"
        raise UsageError(
            f"`{name}` changes kept slots again and again, "
            f"and `{codec.name}` rounds a slot once, when it is written",
            hint=f"{without}+{codec.name}",
        )
