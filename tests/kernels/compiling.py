"""Compile every kernel to machine code for a kind of GPU, without one; prints what each takes.

python -m tests.kernels.compiling 80 bf16 128
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtool.kernels import attend_rows, attend_slots, column_sums, page_scores, row_product
from kvtool.kernels.tiles import tile_edge, width
from kvtool.maths.columns import COLUMNS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOATS = ("scale", "softcap")
INTEGERS = {"query_positions": "*i64", "chosen": "*i64", "rows": "*i64"}
INTEGERS |= {"key_positions": "*i32", "positions": "*i32", "valid": "*i32"}
# in the dtype of the model
TENSORS = ("query", "key", "value", "sinks", "out", "bounds", "part", "table")
NUMBERS = (
    *COLUMNS,
    *("lse", "seen", "logits", "part_mean", "part_top", "part_total", "part_seen", "scores"),
)


def types(kernel, dtype: str) -> dict[str, str]:
    """The type of every argument, in Triton's words."""
    known = dict.fromkeys(TENSORS, f"*{dtype}") | dict.fromkeys(NUMBERS, "*fp32")
    known |= INTEGERS | dict.fromkeys(FLOATS, "fp32")
    return {
        p.name: "constexpr" if p.is_constexpr else known.get(p.name, "i32") for p in kernel.params
    }


def constants(kernel, dtype: str, dim: int) -> dict[str, object]:
    """Everything switched on, at this head dimension."""
    edge = tile_edge(torch.empty(1, dim, dtype=DTYPES[dtype]))
    values = {"DIM": dim, "VALUE_DIM": dim, "DIM_WIDTH": width(dim), "VALUE_WIDTH": width(dim)}
    values |= {"ROWS": edge, "KEYS": edge, "SHARE_WIDTH": width(8), "PARTS_WIDTH": 64}
    values |= {"GROUP_WIDTH": width(8), "PAGES": 64, "CHANNELS": 32, "COLUMNS": 64}
    values |= {"LEAST": 1 - 1e-6}
    names = [p.name for p in kernel.params if p.is_constexpr]
    return {name: values.get(name, True) for name in names}


def main(arch: str, dtype: str, dim: str) -> None:
    found = {}
    for kernel in (
        attend_rows.attend_rows_kernel,
        column_sums.column_sums_kernel,
        attend_slots.attend_part_kernel,
        attend_slots.join_parts_kernel,
        page_scores.page_scores_kernel,
        row_product.row_product_kernel,
    ):
        source = ASTSource(
            kernel,
            signature=types(kernel, dtype),
            constexprs=constants(kernel, dtype, int(dim)),
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", int(arch), 32))
        assert compiled.asm["cubin"]
        found[kernel.__name__] = compiled.metadata.shared
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
