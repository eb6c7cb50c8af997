"""Compile the kernels to machine code as calls on a kind of GPU would, without one.

The functions around the kernels run as they are, on tensors of the CPU. So every argument is
specialised as in a real call: a stride or a count that is 1 becomes a constant, and one that 16
divides is known to be so. Prints what each kernel takes.

python -m tests.kernels.compiling 80 bf16 wide long
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvtool.kernels import tiles
from kvtool.kernels.attend_codes import attend_codes
from kvtool.kernels.attend_rows import attend_rows
from kvtool.kernels.attend_slots import attend_slots
from kvtool.kernels.checks import CODES, QUANTISED
from kvtool.kernels.column_sums import column_sums
from kvtool.kernels.decode_token import decode_token
from kvtool.kernels.read_tables import page_scores, row_product
from kvtool.maths.columns import COLUMNS
from kvtool.maths.quantise import GROUP

SHARED = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
"""KiB that a program may take, by capability."""

THREADS = 128  # of a program, by default

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """Sizes of the calls.

    Attributes:
        shown: heads of the attention; `cached` of them are stored.
        plain: whether nothing is masked, capped or padded, and one column is wanted.
    """

    batch: int = 2
    cached: int = 2
    shown: int = 2
    heads: int = 8
    new: int = 33
    kept: int = 95
    dim: int = 128
    value_dim: int = 128
    plain: bool = False


CASES = {
    "usual": Case(),
    "ones": Case(1, 1, 1, 1, new=1, kept=0, dim=64, value_dim=64),  # every count and stride is 1
    "plain": Case(1, 8, 8, 32, new=512, kept=1024, plain=True),
    "odd": Case(3, 1, 1, 71, new=7, kept=1301, dim=80, value_dim=80),  # 71 queries of one head
    "mla": Case(1, 1, 16, 16, new=64, kept=700, dim=192, value_dim=128),
    "narrow": Case(dim=64, value_dim=64, plain=True),
    "96": Case(dim=96, value_dim=96),
    "wide": Case(dim=256, value_dim=256),
}


class NoDevice:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def call_kernels(case: Case, dtype: torch.dtype) -> None:
    """One call of each function at least; with most options, or with few."""
    batch, total = case.batch, case.kept + case.new
    query = torch.empty(batch, case.new, case.heads, case.dim, dtype=dtype).transpose(1, 2)
    key = torch.zeros(batch, case.shown, total, case.dim, dtype=dtype)
    value = torch.zeros(batch, case.shown, total, case.value_dim, dtype=dtype)
    new = torch.zeros(batch, case.new, dtype=torch.int64)
    stored = torch.zeros(batch, case.cached, total, dtype=torch.int32)
    sinks = None if case.plain else torch.zeros(batch, case.heads, dtype=dtype)
    softcap = None if case.plain else 30.0
    names = COLUMNS[:1] if case.plain else COLUMNS
    sums = {name: torch.zeros(batch, case.cached, total) for name in names}
    masks = {"scale": 0.1, "softcap": softcap, "window": None if case.plain else 40}
    for in_order in (False, True):
        _, lse, seen = attend_rows(
            query, key, value, new, stored, sinks=sinks, in_order=in_order, **masks
        )
    column_sums(query, key, new, stored, lse, seen, sums, **masks)
    decode = {"scale": 0.1, "softcap": softcap, "sinks": sinks}
    token = query[:, :, :1]
    counted = decode | {"place": torch.ones(batch, dtype=torch.int64), "weights": True}
    masked, wanted = (None, decode) if case.plain else (stored, counted)
    attend_slots(token, key, value, masked, sums, **wanted)
    if case.cached == case.shown:
        decode_tokens(case, token, key, value, stored, sums, sinks)
    constants = torch.zeros(batch, case.heads)
    for of_keys, of_values in CODES:
        if "int4" in (of_keys, of_values) and (case.dim % GROUP or case.value_dim % GROUP):
            continue
        codes = *QUANTISED[of_keys](key), *QUANTISED[of_values](value)
        options = wanted | {"forms": (of_keys, of_values), "value_dim": case.value_dim}
        attend_codes(token, codes, masked, sums, constants=constants, **options)
    chosen = torch.zeros(batch, case.shown, min(total, 100), dtype=torch.int64)
    for places in (None, chosen):
        attend_slots(token, key, value, places, {}, chosen=chosen, **decode)
    grouped = token.reshape(batch, case.shown, -1, case.dim)
    bounds = torch.empty(batch, case.shown, 2 * case.dim, total, dtype=dtype)
    page_scores(grouped, bounds, total)
    rows = torch.zeros(batch, case.shown, 16, dtype=torch.int64)
    row_product(grouped[..., :16], bounds, rows, total)


def decode_tokens(case, query, key, value, positions, sums, sinks) -> None:
    """A decoded token in each form: appended, or in place of one that is chosen."""
    batch, heads, slots = positions.shape
    slot, place = torch.zeros(2, batch, heads, dtype=torch.int64)
    buffers = [key, value, positions, slot]
    new = [key[:, :, :1], value[:, :, :1], place[:, 0]]
    forms = [(True, "", False), (False, "position", False)]
    forms += [(False, "attention_sum", by_values) for by_values in (False, True)]
    for appends, score, by_values in forms:
        own = sums if score not in ("", "position") else {}
        decode_token(
            *(query, buffers, [*own.values()], new, sinks, place[:, 0]),
            names=" ".join(own),
            used=slots,
            scale=0.1,
            softcap=None if case.plain else 30.0,
            masked=not case.plain,
            weights=False,
            appends=appends,
            score=score,
            by_values=by_values,
            limits=[slots // 2, 4, slots - 1],
        )


def loads_of_codes(ptx: str, *, KEY, VALUE, KEYS: int, **_) -> dict[str, object]:
    """Count 16-byte loads of a thread, and how many there are if all codes are loaded so.

    A loop loads tiles of keys and of values in three places: two ahead of it, and one inside.
    """
    words = [KEYS * layout.width for layout in (KEY, VALUE)]
    return {
        "dims": (KEY.dim, VALUE.dim),
        "wide": len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*, 0x10,", ptx)),
        "all": 3 * sum(max(1, count // (8 * THREADS)) for count in words),
    }


def main(arch: str, dtype: str, *cases: str) -> None:
    found: dict[str, int] = {}
    loads: list[dict[str, object]] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert compiled.asm["cubin"]
        assert grid[0] < 2**31
        assert max(*grid[1:], 0, 0) < 2**16
        name = self.fn.__name__
        found[name] = max(found.get(name, 0), compiled.metadata.shared)
        if name == "attend_codes_part_kernel":
            loads.append(loads_of_codes(compiled.asm["ptx"], **kwargs))

    tiles.shared_memory = lambda device: SHARED[int(arch)] * 1024
    JITFunction.run = compile_only
    driver.set_active(NoDevice(int(arch)))
    for case in cases:
        call_kernels(CASES[case], DTYPES[dtype])
    sys.stdout.write(json.dumps({"shared": found, "loads": loads}))


if __name__ == "__main__":
    main(*sys.argv[1:])
