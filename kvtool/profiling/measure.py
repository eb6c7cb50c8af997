"""Run the measurements of a profile: one pass over each text with a full cache shows them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.entry.build import build_cache
from kvtool.cache.hooks.attachment import attachment
from kvtool.cache.hooks.probes import find_query_rotations
from kvtool.cache.whole.layers import attention_layers
from kvtool.errors import KvtoolError
from kvtool.generation import decode_step, prefill
from kvtool.generation.broken_numbers import broken_entries, explain
from kvtool.profiling.calidrop import QueryCosine, RecomputeFrequency
from kvtool.profiling.column_sums import Density
from kvtool.profiling.key_basis import KeyMoments, with_basis
from kvtool.profiling.output_error import OutputError
from kvtool.profiling.query_centres import QueryCentres
from kvtool.profiling.request import Plan
from kvtool.profiling.roco import Jaccard, Robustness
from kvtool.profiling.seen import Seen, Study
from kvtool.profiling.topk_union import TopKUnion

_BATCH = 32768  # tokens that are read together: decoding several texts costs little more than one


def measure(
    model: PreTrainedModel,
    samples: Sequence[Tensor],
    plan: Plan,
    step: Callable[[int], None] = lambda done: None,
) -> dict[str, Tensor]:
    """Measure how a model uses its cache.

    Args:
        model: with kvtool's attention.
        samples: (1, n) int64 each, all of one length.
        step: called after each sample with the number done so far.

    Returns:
        By name (layers, heads, ...) float64 on the CPU, means over samples; NaN for layers that a
        measurement does not judge. Heads are query heads, KV heads, or 1 where a layer is judged as
        a whole.

    Raises:
        KvtoolError: a model that does not show its queries and keys.
        BrokenNumbers: its logits are not finite.
    """
    attached = attachment(model)
    if attached is not None and attached.eager:
        raise KvtoolError(
            f"`{model.config.model_type}` does not show its queries and keys, so it has no profile",
            hint="--metrics memory needs only its configuration",
        )
    together = 1 if "output_error" in plan.metrics else max(1, _BATCH // samples[0].shape[1])
    found: list[dict[str, Tensor]] = []
    for start in range(0, len(samples), together):
        ids = torch.cat(list(samples[start : start + together]))
        studies = [make_studies(model, plan, ids.shape[1]) for _ in ids]
        layers = _read(model, ids, studies, plan.steps)
        for own in studies:
            found.append(_numbers(own, layers))
            step(len(found))
    means = {name: torch.stack([each[name] for each in found]).mean(0) for name in found[0]}
    return with_basis(means)


def make_studies(model: PreTrainedModel, plan: Plan, tokens: int) -> list[Study]:
    """Return the studies that will watch one text of `tokens` tokens."""
    wanted, steps = set(plan.metrics), plan.steps

    def query_centres() -> Study:
        layers = attention_layers(model.config.get_text_config(decoder=True))
        rotations = find_query_rotations(model, layers, "--metrics query_centres")
        return QueryCentres(dict(zip(layers, rotations, strict=True)))

    def output_error() -> Study:
        assert plan.policy is not None, "output_error is measured of a policy"
        return OutputError([build_cache(model, plan.policy, budget) for budget in plan.budgets])

    makers: dict[tuple[str, ...], Callable[[], Study]] = {
        ("f_variance", "entropy"): Density,
        ("query_cosine",): lambda: QueryCosine(tokens + steps),
        ("recompute_frequency",): lambda: RecomputeFrequency(steps),
        ("key_basis",): KeyMoments,
        ("query_centres",): query_centres,
        ("topk_union",): lambda: TopKUnion(steps),
        ("jaccard",): lambda: Jaccard(tokens + steps),
        ("robustness",): lambda: Robustness(tokens + steps),
        ("output_error",): output_error,
    }
    return [make() for names, make in makers.items() if wanted & set(names)]


@torch.inference_mode()
def _read(
    model: PreTrainedModel, ids: Tensor, studies: Sequence[Sequence[Study]], steps: int
) -> int:
    """Read texts, (texts, n), and generate; return how many layers the model has."""
    cache = build_cache(model, "full")

    def watch(step, call, out) -> None:
        for row, own in enumerate(studies):
            for study in own:
                study.see(Seen(step, call, out, row))

    cache.watch_steps(watch)
    cache.expect_length(ids.shape[1] + steps)
    logits = prefill(model, cache, ids)
    text, broken = [ids], broken_entries(logits)
    for _ in range(steps):
        text.append(logits.argmax(-1)[:, None])
        logits = decode_step(model, cache, text[-1][:, 0])
        broken |= broken_entries(logits)
    if bool(broken.any()):  # the one device sync of all steps
        row = int(broken.nonzero()[0])
        raise explain(model, torch.cat(text, 1)[row : row + 1])
    return len(cache.layers)


def _numbers(studies: Sequence[Study], layers: int) -> dict[str, Tensor]:
    """Return what was found in one text by name, (layers, heads, ...)."""
    return {
        name: _stack(values, layers)
        for study in studies
        for name, values in study.results().items()
    }


def _stack(values: dict[int, Tensor], layers: int) -> Tensor:
    """Join the layers, those without numbers as NaN."""
    if not values:
        return torch.full((layers, 1), float("nan"), dtype=torch.float64)
    shape = next(iter(values.values())).shape
    stacked = torch.full((layers, *shape), float("nan"), dtype=torch.float64)
    for layer, found in values.items():
        stacked[layer] = found.double().cpu()
    return stacked
