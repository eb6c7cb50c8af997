"""The results of `kvtool generate` and `kvtool compress` as documents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt

from kvtool.documents.document import PER_HEAD, PER_LAYER, Document, Section, ShownDocument, Unit
from kvtool.documents.plan import PlanDocument
from kvtool.sizes import bytes_in_words


class CacheSection(Section):
    """What the cache held at the end, counted from its tensors.

    `kv_bytes` counts filled slots, `allocated_bytes` the tensors, `state_bytes` the policy's own
    statistics, `full_bytes` a cache that kept everything in the dtype of the model, `peak_bytes`
    the most there ever was.
    `host_bytes` counts evicted tokens in host memory, `recompute_frequency` says of each layer how
    often they were attended to anew (CaliDrop; null without it).
    The last decoded token has read `traffic_pairs` of key and value per layer and KV head, choosing
    included, and `traffic_bytes` in all.
    """

    tokens_seen: NonNegativeInt
    kept_per_layer: Annotated[list[NonNegativeInt], Unit("tokens in the fullest KV head")]
    kv_bytes: NonNegativeInt
    allocated_bytes: NonNegativeInt
    state_bytes: NonNegativeInt
    full_bytes: NonNegativeInt
    peak_bytes: NonNegativeInt
    host_bytes: NonNegativeInt = 0
    recompute_frequency: Annotated[list[NonNegativeFloat | None] | None, PER_LAYER] = None
    traffic_pairs: NonNegativeFloat
    traffic_bytes: NonNegativeInt

    def in_words(self) -> str:
        """Say how many of the tokens seen were kept."""
        kept = [tokens for tokens in self.kept_per_layer if tokens > 0] or [0]
        span = f"{min(kept)}" if min(kept) == max(kept) else f"{min(kept)} to {max(kept)}"
        smaller = f" ({self.full_bytes / self.kv_bytes:.1f}x smaller)" if self.kv_bytes else ""
        return (
            f"kept {span} of {self.tokens_seen} tokens, {bytes_in_words(self.kv_bytes)} "
            f"of {bytes_in_words(self.full_bytes)}{smaller}"
        )


class StagesSection(Section):
    """RocketKV's stages for the prompt, as the plan has them.

    `stage1_tokens` are those of each layer whose budget is free, the planned new ones included.
    """

    split_factor: FiniteFloat | None
    token_budget: NonNegativeInt
    stage1_tokens: Annotated[list[NonNegativeInt], PER_HEAD]
    page_size: PositiveInt
    head_dims: PositiveInt
    top_k: PositiveInt


class PlanSection(Section):
    """What was taken from a plan.

    Attributes:
        prompt_tokens: of the prompt that was planned for.
        storage: bytes that the plan says are held; null where it has no totals.
        held: the same for this run: its prompt, new tokens, policy and dtype.
        tokens: of every layer, for this prompt.
        rocketkv: null for policies without its stages.
    """

    prompt_tokens: NonNegativeInt
    storage: NonNegativeInt | None
    held: NonNegativeInt
    tokens: Annotated[list[NonNegativeInt], PER_HEAD]
    rocketkv: StagesSection | None

    @classmethod
    def of(cls, plan: PlanDocument, tokens: list[int], stages: Any, held: int) -> PlanSection:
        """Take from a plan the values that a run uses.

        Args:
            stages: RocketKV's for the prompt, as `kvtool.planning.rocketkv` has them; or None.
        """
        rocketkv = None
        if stages is not None and plan.rocketkv is not None:
            rocketkv = StagesSection(
                split_factor=plan.rocketkv.split_factor,
                token_budget=stages.token_budget,
                stage1_tokens=[kept + plan.target.max_new_tokens for kept in stages.kept],
                page_size=stages.page_size,
                head_dims=stages.head_dims,
                top_k=stages.top_k,
            )
        return cls(
            prompt_tokens=plan.target.prompt_tokens,
            storage=plan.planned_bytes,
            held=held,
            tokens=tokens,
            rocketkv=rocketkv,
        )

    def in_words(self, cache: CacheSection) -> str:
        """Say what was planned, and what is held in fact."""
        held = cache.allocated_bytes + cache.state_bytes
        planned = "" if self.storage is None else f" of {self.storage} planned"
        split = ""
        if self.rocketkv is not None and self.rocketkv.split_factor is not None:
            split = f", split factor {self.rocketkv.split_factor:.4g}"
        return f"{held} bytes held{planned}, for prompts of {self.prompt_tokens}{split}"


class GenerationTiming(Section):
    """Wall-clock times."""

    prefill_s: NonNegativeFloat
    decode_s: NonNegativeFloat
    decode_tokens_per_s: NonNegativeFloat | None


class Fidelity(Section):
    """How close the run stayed to a full cache on the same tokens."""

    agreement: float
    kl: float
    first_divergence: NonNegativeInt | None

    def in_words(self) -> str:
        """Say how close the run stayed."""
        where = self.first_divergence
        differs = "no difference" if where is None else f"first difference at new token {where}"
        return f"full cache: {self.agreement:.1%} of tokens agree, KL {self.kl:.3g}, {differs}"


class CompileSection(Section):
    """How decode steps ran that were to be compiled or replayed as CUDA graphs.

    `compile_s` is part of the decode time; `replayed_steps` were replayed without being compiled.
    """

    graphs: NonNegativeInt
    eager_steps: NonNegativeInt
    compiled_steps: NonNegativeInt
    compile_s: NonNegativeFloat
    cuda_graphs: bool
    replayed_steps: NonNegativeInt = 0

    def in_words(self) -> str:
        """Say what was compiled, and what was replayed."""
        steps = self.eager_steps + self.compiled_steps + self.replayed_steps
        if self.compiled_steps == 0 and self.replayed_steps == 0:
            why = "their shapes change, or they cannot be compiled"
            return f"none of {steps} steps ran compiled: {why}"
        if self.compiled_steps == 0:
            return f"{self.replayed_steps} of {steps} steps replayed as a CUDA graph"
        how = ", as CUDA graphs" if self.cuda_graphs else ""
        graphs = "1 graph" if self.graphs == 1 else f"{self.graphs} graphs"
        return (
            f"{self.compiled_steps} of {steps} steps ran compiled{how} "
            f"({graphs}, {self.compile_s:.1f} s of the decode time)"
        )


class TurnSection(Section):
    """A turn of a conversation; `cache` is what was held at its end."""

    user: str
    prompt_tokens: NonNegativeInt
    new_tokens: NonNegativeInt
    text: str
    token_ids: list[NonNegativeInt]
    cache: CacheSection
    timing: GenerationTiming
    fidelity: Fidelity | None


class GenerationDocument(ShownDocument):
    """`kvtool generate`: `text` and `token_ids` hold generated tokens only.

    With `turns` the tokens and times are those of all turns and of what was read before them. The
    texts are on lines of their own, and `cache` is that of the last turn. `prefill` is `block:M`
    where prompts are read in blocks.
    """

    kind: Literal["generation"] = "generation"
    model: str
    policy: str
    budget: int | str | None
    prefill: str | None = None
    prompt_tokens: NonNegativeInt
    new_tokens: NonNegativeInt
    text: str
    token_ids: list[NonNegativeInt]
    cache: CacheSection
    plan: PlanSection | None = None
    timing: GenerationTiming
    fidelity: Fidelity | None = None
    compiled: CompileSection | None = None
    turns: list[TurnSection] | None = None

    def in_words(self) -> str:
        """Say what was held and how fast it went."""
        rate = self.timing.decode_tokens_per_s
        parts = [
            f"{self.new_tokens} tokens"
            + (f" at {rate:.1f} tokens/s" if rate is not None else "")
            + f" after {self.timing.prefill_s:.2f} s of prefill",
            self.cache.in_words(),
        ]
        if self.plan is not None:
            parts.append(self.plan.in_words(self.cache))
        parts += [each.in_words() for each in (self.fidelity, self.compiled) if each is not None]
        return "; ".join(parts)


class CompressionTiming(Section):
    """Wall-clock times."""

    prefill_s: NonNegativeFloat


class CompressionDocument(Document):
    """`kvtool compress`: what was read, and what the saved cache holds."""

    kind: Literal["compression"] = "compression"
    model: str
    policy: str
    budget: int | str | None
    prefill: str | None = None
    prompt_tokens: NonNegativeInt
    saved: str
    cache: CacheSection
    plan: PlanSection | None = None
    timing: CompressionTiming

    def in_words(self) -> str:
        """Say what was read and what is held."""
        planned = "" if self.plan is None else f"; {self.plan.in_words(self.cache)}"
        read = f"{self.prompt_tokens} tokens read in {self.timing.prefill_s:.2f} s"
        return f"{read}; {self.cache.in_words()}{planned}"


class ExportDocument(Document):
    """`kvtool export`: what the exported cache holds, and its ids (and text) in a prompt."""

    kind: Literal["export"] = "export"
    model: str
    policy: str
    saved: str
    slots: PositiveInt
    tokens_seen: PositiveInt
    dtype: str
    bytes: NonNegativeInt
    virtual_ids: list[NonNegativeInt]
    text: str | None = None

    def in_words(self) -> str:
        """Say what was exported."""
        return (
            f"{self.slots} slots for {self.tokens_seen} tokens, {bytes_in_words(self.bytes)} in "
            f"{self.dtype}"
        )
