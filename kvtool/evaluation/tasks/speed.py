"""Seconds and bytes of reading a prompt and of decoding, on random tokens.

Every variant is warmed up once for each size. Decoding takes exactly the asked number of steps. On
a CPU the figures are those of a CPU: they say nothing about a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from kvtool.documents.results import Amount, Number
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter
from kvtool.evaluation.tasks.task import Lengths, Samples, Task, Tokens
from kvtool.lazy_torch import torch
from kvtool.planning.estimate import largest_batch
from kvtool.sizes import Budget

if TYPE_CHECKING:
    from kvtool.evaluation.bench.bench import Bench

_COMPILING = 3  # steps: one that fills the budget, one that makes the graph, one that runs it
_GRIDS = {  # prompt, new tokens, batch
    "d2o": [(256, 1024, 1), (512, 2048, 1), (1024, 4096, 1), (2048, 8192, 1)],
    "calidrop": [(1024, 128, batch) for batch in (1, 2, 4, 8, 16, 32)],
    "rocketkv": [(length * 1024, 128, 1) for length in (16, 32, 64, 96)],
}


def _memory(text: str) -> str:
    size = Budget.parse(text)
    if size.bytes is None:
        raise ValueError(f"memory is a number of bytes such as 512MiB, got `{text}`")
    return str(size)


Memory = Annotated[str, AfterValidator(_memory)]


class Timed(BaseModel):
    """What is recorded of a sample: tokens and the seconds that they took."""

    prefill_s: Annotated[Number, Field(gt=0)]
    decode_s: Annotated[Number, Field(gt=0)]
    prefilled: Amount
    decoded: Amount
    batch: Amount = 1


class Speed(Task):
    """Decoded tokens per second, time to the first token, bytes held.

    Attributes:
        lengths: tokens of a prompt.
        new_tokens: decoded steps.
        batch: prompts at a time, one number or several.
        memory: in place of `batch`, as many prompts as it holds (`512MiB`), of each variant; see
            `kvtool.planning.estimate`.
        compile: whether decoding is compiled; graphs are made before the clock starts.
        samples: timed repetitions of each size.
        preset: the sizes that a paper measured, in place of `lengths`, `new_tokens` and `batch`.
    """

    lengths: Lengths = (1024, 4096)
    new_tokens: Tokens = 64
    batch: Lengths = (1,)
    memory: Memory | None = None
    compile: bool = False
    samples: Samples = 3
    preset: Literal["d2o", "calidrop", "rocketkv"] | None = None

    record: ClassVar[type[BaseModel]] = Timed
    metric: ClassVar[str] = "decode_tokens_per_s"
    best: ClassVar[float | None] = None
    droppable: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, values: Any) -> Any:
        """Let the lengths be those of the preset, so that whoever checks lengths sees them."""
        preset = values.get("preset") if isinstance(values, dict) else None
        grid = _GRIDS.get(preset) if isinstance(preset, str) else None
        return values if grid is None else values | {"lengths": sorted({row[0] for row in grid})}

    @property
    def chat(self) -> bool:
        return False

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        grid = [(length, self.new_tokens, b) for length in self.lengths for b in self.batch]
        if self.preset is not None:
            grid = _GRIDS[self.preset]
        sizes: list[tuple[int, int, int | str]] = [*grid]
        last = "batch"
        if self.memory is not None:
            sizes = list(dict.fromkeys((length, new, self.memory) for length, new, _ in grid))
            last = "memory"
        for length, new, batch in sizes:
            for i in range(self.samples):
                cell = {"length": length, "new_tokens": new, last: batch}
                seed = {"seed": self.seed}
                yield Sample(f"{length}+{new}x{batch}/{i}", "", cell=cell, facts=seed)

    def work(self, sample: Sample) -> int:
        tokens = int(sample.cell["length"]) + int(sample.cell["new_tokens"])
        return 4 * tokens * int(sample.cell.get("batch", 1))  # a token is about 4 characters

    def run(self, bench: Bench, sample: Sample) -> Json:
        length, new = int(sample.cell["length"]), int(sample.cell["new_tokens"])
        batch = int(sample.cell.get("batch", 0))
        if self.memory is not None:
            batch = self._largest(bench, length, new, self.memory)
        size = (length, new, batch)
        bench.warm_up_for((self.name, *size), lambda: self._once(bench, *size))
        return self._once(bench, *size)

    def _largest(self, bench: Bench, length: int, new: int, memory: str) -> int:
        dtype = str(bench.model.dtype).removeprefix("torch.")
        size = Budget.parse(memory).bytes or 0  # a number of bytes, as `Memory` has checked
        return largest_batch(bench.model.config, dtype, bench.variant, length, new, size)

    def _once(self, bench: Bench, length: int, new: int, batch: int) -> Json:
        from kvtool.generation.broken_numbers import broken_entries, explain
        from kvtool.generation.feeding import wait
        from kvtool.generation.graphs import StaticDecoding

        draws = torch.Generator().manual_seed(self.seed)
        vocabulary = bench.model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(vocabulary, (batch, length), generator=draws).to(bench.model.device)
        cache = bench.new_cache()
        device = bench.model.device
        setting_up = _COMPILING if self.compile or device.type == "cuda" else 0
        to_come = new + setting_up
        logits = bench.feed(cache, ids, new_tokens=to_come).to(bench.model.device)
        step = StaticDecoding(bench.model, to_come, compiled=self.compile)
        for _ in range(setting_up):
            logits = step(bench.model, cache, logits.argmax(-1))
        wait(bench.model)
        start = time.perf_counter()
        for _ in range(new):
            logits = step(bench.model, cache, logits.argmax(-1))
        broken = bool(broken_entries(logits).any())  # waits for a GPU
        bench.meter.count_decoding(cache, steps=new * batch, seconds=time.perf_counter() - start)
        if broken:
            raise explain(bench.model, ids[:1])
        meter = bench.meter
        return {
            "prefill_s": meter.prefill_s,
            "decode_s": meter.decode_s,
            "prefilled": batch * length,
            "decoded": batch * new,
            "batch": batch,
        }

    def score(self, record: Json) -> dict[str, float]:
        return {
            "decode_tokens_per_s": record["decoded"] / record["decode_s"],
            "prefill_tokens_per_s": record["prefilled"] / record["prefill_s"],
            "ttft_s": record["prefill_s"],
            **({"batch": record["batch"]} if "batch" in record else {}),
        }
