"""Decode the answers of many samples in one batch, before their task asks for them.

Each is the one that its sample gets alone (`kvtool.generation.serving`), and so is what it costs:
bytes are those of its own sequence, seconds its share of the steps that have decoded it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtool.cache.whole.batching import take_entry, why_apart
from kvtool.evaluation.bench.ask import ids_of_first
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.bench.meter import Meter, Peak
from kvtool.evaluation.samples.sample import Sample
from kvtool.generation.serving import Drawing, Running, Served, Waiting, serve
from kvtool.models.placement import room_beside
from kvtool.planning.estimate import row_bytes
from kvtool.policies.draws import drawn_for

if TYPE_CHECKING:
    from kvtool.cache.whole.cache import KVCache


def joins(bench: Bench) -> bool:
    """Return whether texts under a variant can share a batch; it has one policy, and one draw."""
    try:
        cache = bench.new_cache()
    except Exception:  # any: each sample says what is wrong
        return False
    apart = why_apart(cache.policy, recurrent=cache.recurrent) is not None
    apart = apart or drawn_for(cache.policy, "") is not cache.policy
    return not apart and cache.link.shards.processes == 1


def decode_together(
    bench: Bench, task: Any, samples: Sequence[Sample], most: int
) -> Iterator[tuple[int, tuple[list[int], Meter]]]:
    """Decode answers, `most` at a time and no more than half of the free memory holds.

    Args:
        samples: of one turn each, which hold the question in the prompt.

    Yields:
        Each answer as it ends, by the place of its sample, and its cost; some are missing where
        one fails.
    """
    waiting, costs = [], _Costs()
    for index, sample in enumerate(samples):
        with suppress(Exception):  # any: it is measured alone, and says what is wrong with it
            ids, new = ids_of_first(bench, sample, task)
            size = row_bytes(bench.model, bench.variant, ids.shape[1], new)
            waiting.append(Waiting(index, ids, new, size))
    try:
        for answer in serve(
            bench.model,
            bench.tokenizer,
            bench.new_cache,
            waiting,
            memory=room_beside(bench.model),
            most_sequences=most,
            drawing=Drawing(stop=(*task.stop, *bench.protocol.stop)),
            served=costs,
        ):
            yield answer.index, (answer.token_ids, costs.meters.pop(answer.index))
    except Exception:  # any: those that are left are measured alone, and one of them fails again
        return


@dataclass
class _Costs(Served):
    """Counts for each sample what its answer costs.

    Attributes:
        meters: by the index of the sample.
    """

    meters: dict[int, Meter] = field(default_factory=dict)

    def read(self, seconds: float, prompt: Waiting, cache: KVCache) -> None:
        super().read(seconds, prompt, cache)
        meter = self.meters[prompt.index] = Meter(Peak([]))
        meter.count_prefill(cache, tokens=prompt.ids.numel(), seconds=seconds)

    def count(self, sequences: Sequence[Running], seconds: float) -> None:
        share = (seconds - self.seconds) / len(sequences)
        super().count(sequences, seconds)
        for each in sequences:
            self.meters[each.prompt.index].count_step(share, len(sequences))

    def end(self, sequence: Running, cache: KVCache, place: int) -> None:
        own, tokens = take_entry(cache, place), len(sequence.new)
        own.meter.forget()  # the peak of another; its own was read with its prompt
        for layer in own.slot_layers:  # a step has read as many as the longest text has
            held = (layer.stored_positions() >= 0).sum(-1).float().mean().item()
            cut = not layer.appends and held == layer.budget.max_budget
            layer.read(min(layer.pairs_read, held + cut))
        meter = self.meters[sequence.prompt.index]
        meter.count_decoding(own, steps=tokens - 1, seconds=0.0, tokens=tokens)
