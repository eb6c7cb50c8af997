"""Every Triton kernel against plain torch, and how fast it is at the sizes of an 8B model."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.table import Table

from kvtool.generation.graphs import CudaRecording
from kvtool.kernels.checks import CODES, QUANTISED, Family, Kind, comparisons
from kvtool.maths.columns import COLUMNS
from kvtool.maths.quantise import GROUP
from recipes.benchmarks.decoding import recorded
from recipes.benchmarks.gpu.results import Case, Record, Skip, Wrong
from recipes.benchmarks.gpu.settings import Settings

TITLE = "Triton kernels against plain torch on the CPU in float32"
# of the norm of what is expected; rounding stays below a third of it
TOLERANCE = {torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
FEW = 0.01  # of the weights may fall on the other side of the average
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
GROUPS = (1, 2, 4, 8)
DECODING = (Family.SLOTS, *CODES.values())
FOUR_BITS = [family for forms, family in CODES.items() if "int4" in forms]  # groups of channels
OPTIONS = {
    "plain": {},
    "window": {"window": True},
    "soft cap": {"softcap": True},
    "sinks": {"sinks": True},
    "all": {"window": True, "softcap": True, "sinks": True},
}
REPOSITORY = Path(__file__).parents[3]
SECONDS = 150  # of one run of tests

Wanted = tuple[Family, torch.dtype, tuple[int, int]]


def cases(settings: Settings) -> Iterator[Case]:
    """Compare every kernel in every form, time each, and run the tests for GPUs."""
    for family, dtype, dim in kinds(settings):
        name = f"{family}, {str(dtype).removeprefix('torch.')}, {_dims(dim)}"
        yield Case(name, partial(compare, settings, family, dtype, dim), beside=True)
    for name in TIMED:
        yield Case(f"time of {name}", partial(time_kernel, settings, name))
    for name, arguments in {
        "tests marked gpu": ("-m", "gpu", *tests_marked("gpu")),
        "tests of the kernels": ("tests/kernels",),
    }.items():
        yield Case(name, partial(run_tests, settings, arguments))


def kinds(settings: Settings) -> Iterator[Wanted]:
    """Families of kernels, dtypes and head sizes, whole groups of channels in 4 bits."""
    dtypes = (torch.float32,) if settings.tiny else tuple(TOLERANCE)
    for family in Family:
        step = GROUP if family in FOUR_BITS else 1
        dims = ((max(16, step),) * 2,) if settings.tiny else DIMS
        yield from product([family], dtypes, [dim for dim in dims if dim[0] % step == 0])


def _dims(dim: tuple[int, int]) -> str:
    return f"{dim[0]}" if dim[0] == dim[1] else f"{dim[0]}/{dim[1]}"


def forms(family: Family, dim: tuple[int, int], tiny: bool) -> list[dict[str, bool]]:
    """What a model may ask of a family of kernels; all of it, or nothing, at most head sizes."""
    if family not in (Family.ROWS, *DECODING):
        return [{}]
    names = OPTIONS if dim == (128, 128) and not tiny else ("plain", "all")
    windowed = family is Family.ROWS  # a decoded token finds nothing beyond its window
    wanted = [OPTIONS[name] for name in names]
    if not windowed:
        wanted = [{k: v for k, v in form.items() if k != "window"} for form in wanted]
    return [form for i, form in enumerate(wanted) if form not in wanted[:i]]


def compare(settings: Settings, family: Family, dtype: torch.dtype, dim: tuple[int, int]) -> Record:
    """Compute by a family of kernels and by plain torch; the largest error of all is returned.

    Raises:
        Wrong: it is larger than rounding.
    """
    needs_triton(settings)
    if family is Family.CAUSAL and torch.device(settings.device).type != "cuda":
        raise Skip("torch's own kernels of whole prompts run on CUDA alone")
    worst, where, count = 0.0, "", 0
    groups = (3,) if settings.tiny else GROUPS
    for group, form in product(groups, forms(family, dim, settings.tiny)):
        device = torch.device(settings.device)
        value_dim = dim[1] if family in (Family.ROWS, Family.CAUSAL, *DECODING) else 0
        kind = Kind(family, device, dtype, dim[0], value_dim, group, **form)
        for name, found, expected in comparisons(kind):
            error = _error(name, found, expected) / _allowed(name, dtype)
            count += 1
            if not error <= worst:
                worst, where = error, f"{name}, group {group}, {', '.join(form) or 'plain'}"
    found = {"error": worst * TOLERANCE[dtype], "worst": where, "results": count}
    if not worst <= 1:
        raise Wrong(f"{where}: {worst:.3g} times the error that rounding makes", found)
    return found


def _error(name: str, found: torch.Tensor, expected: torch.Tensor) -> float:
    if name == "above_average":  # counts, of which few may differ
        return ((found - expected).abs() > 0.5).float().mean().item()
    if not expected.is_floating_point():  # positions and slots, of which none may differ
        return float((found != expected).sum())
    return ((found - expected).norm() / expected.norm()).item()


def _allowed(name: str, dtype: torch.dtype) -> float:
    return FEW if name == "above_average" else TOLERANCE[dtype]


def needs_triton(settings: Settings) -> None:
    """Skip a case where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        raise Skip("triton is not installed")


def time_kernel(settings: Settings, name: str) -> Record:
    """Time one call of a kernel at the sizes of one layer of an 8B model at batch 1.

    Returns:
        Median milliseconds, and the bytes a second of what it must read and write.
    """
    needs_triton(settings)
    call, moved, size = TIMED[name](settings)
    call, calls = _without_host(settings, call)
    times = []
    for i in range(2 if settings.tiny else 25):
        settings.wait()
        start = time.perf_counter()
        call()
        settings.wait()
        if i >= (1 if settings.tiny else 5):
            times.append(time.perf_counter() - start)
    seconds = statistics.median(times) / calls
    return {"ms": seconds * 1e3, "bytes_per_s": moved / seconds, "size": size}


def _without_host(settings: Settings, call: Callable[[], object]) -> tuple[Callable, int]:
    """Return a function that makes some calls, and how many: on a GPU by one launch of a graph.

    The host takes as long to launch a kernel as many kernels run.
    """
    if not settings.cuda:
        return call, 1
    calls = 10

    def repeated() -> None:
        for _ in range(calls):
            call()

    call()  # what is compiled
    return recorded(repeated, CudaRecording(torch.device(settings.device))), calls


def _draw(settings: Settings, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    wanted = dtype or (torch.float32 if settings.tiny else torch.bfloat16)
    return torch.randn(shape, device=settings.device, dtype=wanted)


def _layer(settings: Settings) -> tuple[int, int, int, int, int]:
    """KV heads, query heads, head size, slots and new tokens."""
    return (2, 4, 16, 64, 16) if settings.tiny else (8, 32, 128, 32768, 1024)


def _rows(settings: Settings):
    from kvtool.kernels.attend_rows import attend_rows

    kv_heads, heads, dim, slots, new = _layer(settings)
    query = _draw(settings, 1, heads, new, dim)
    key, value = (_draw(settings, 1, kv_heads, slots, dim) for _ in range(2))
    order = torch.arange(slots, device=settings.device)
    stored = order.expand(1, kv_heads, -1).to(torch.int32).contiguous()
    given = query, key, value, order[None, -new:], stored
    moved = 2 * query.nbytes + key.nbytes + value.nbytes
    return lambda: attend_rows(*given, scale=dim**-0.5), moved, f"{new} queries, {slots} keys"


def _sums(settings: Settings):
    from kvtool.kernels.column_sums import column_sums

    kv_heads, heads, dim, slots, new = _layer(settings)
    query, key = _draw(settings, 1, heads, new, dim), _draw(settings, 1, kv_heads, slots, dim)
    order = torch.arange(slots, device=settings.device)
    stored = order.expand(1, kv_heads, -1).to(torch.int32).contiguous()
    lse, seen = (_draw(settings, 1, heads, new, dtype=torch.float32) for _ in range(2))
    sums = {COLUMNS[0]: torch.zeros(1, kv_heads, slots, device=settings.device)}
    given = query, key, order[None, -new:], stored, lse, seen, sums
    moved = query.nbytes + key.nbytes + 2 * sums[COLUMNS[0]].nbytes
    return lambda: column_sums(*given, scale=dim**-0.5), moved, f"{new} queries, {slots} keys"


def _slots(settings: Settings):
    from kvtool.kernels.attend_slots import attend_slots

    kv_heads, heads, dim, slots, _ = _layer(settings)
    query = _draw(settings, 1, heads, 1, dim)
    key, value = (_draw(settings, 1, kv_heads, slots, dim) for _ in range(2))
    sums = {COLUMNS[0]: torch.zeros(1, kv_heads, slots, device=settings.device)}
    moved = key.nbytes + value.nbytes + 2 * sums[COLUMNS[0]].nbytes
    call = partial(attend_slots, query, key, value, None, sums, scale=dim**-0.5)
    return call, moved, f"1 query, {slots} keys"


def _chosen(settings: Settings):
    from kvtool.kernels.attend_slots import attend_slots

    kv_heads, heads, dim, slots, _ = _layer(settings)
    count = slots // 64
    query = _draw(settings, 1, heads, 1, dim)
    key, value = (_draw(settings, 1, kv_heads, slots, dim) for _ in range(2))
    chosen = torch.rand(1, kv_heads, slots, device=settings.device).argsort(-1)[..., :count]
    moved = 2 * count * kv_heads * dim * key.element_size()
    call = partial(attend_slots, query, key, value, None, {}, scale=dim**-0.5, chosen=chosen)
    return call, moved, f"1 query, {count} of {slots} keys"


def _token(by_values: bool, settings: Settings):
    from kvtool.kernels.decode_token import decode_token

    kv_heads, heads, dim, slots, _ = _layer(settings)
    budget = slots // 64
    query, *new = (_draw(settings, 1, n, 1, dim) for n in (heads, kv_heads, kv_heads))
    key, value = (_draw(settings, 1, kv_heads, budget + 1, dim) for _ in range(2))
    order = torch.arange(budget + 1, device=settings.device)
    positions = order.expand(1, kv_heads, -1).to(torch.int32).contiguous()
    slot = torch.zeros(1, kv_heads, dtype=torch.int64, device=settings.device)
    sums = torch.zeros(1, kv_heads, budget + 1, device=settings.device)
    call = partial(
        decode_token,
        *(query, [key, value, positions, slot], [sums], [*new, order[-1:]], None, order[-1:]),
        names=COLUMNS[0],
        used=budget + 1,
        scale=dim**-0.5,
        softcap=None,
        masked=False,
        weights=False,
        appends=False,
        score=COLUMNS[0],
        by_values=by_values,
        limits=[budget // 2, 0, budget],
    )
    return call, key.nbytes + value.nbytes + 2 * sums.nbytes, f"1 query, {budget + 1} keys"


def _codes(forms: tuple[str, str], settings: Settings):
    from kvtool.kernels.attend_codes import attend_codes

    kv_heads, heads, dim, slots, _ = _layer(settings)
    dim = max(dim, GROUP)
    query = _draw(settings, 1, heads, 1, dim)
    pair = [_draw(settings, 1, kv_heads, slots, dim) for _ in range(2)]
    codes = [
        each for form, tensor in zip(forms, pair, strict=True) for each in QUANTISED[form](tensor)
    ]
    sums = {COLUMNS[0]: torch.zeros(1, kv_heads, slots, device=settings.device)}
    moved = sum(each.nbytes for each in codes) + 2 * sums[COLUMNS[0]].nbytes
    options = {"forms": forms, "value_dim": dim, "scale": dim**-0.5}
    call = partial(attend_codes, query, codes, None, sums, **options)
    return call, moved, f"1 query, {slots} keys"


def _pages(settings: Settings):
    from kvtool.kernels.read_tables import page_scores

    kv_heads, heads, dim, slots, _ = _layer(settings)
    query = _draw(settings, 1, kv_heads, heads // kv_heads, dim)
    bounds = _draw(settings, 1, kv_heads, 2 * dim, slots // 16)
    return partial(page_scores, query, bounds, slots // 16), bounds.nbytes, f"{slots // 16} pages"


def _products(settings: Settings):
    from kvtool.kernels.read_tables import row_product

    kv_heads, heads, dim, slots, _ = _layer(settings)
    part = _draw(settings, 1, kv_heads, heads // kv_heads, dim // 4)
    table = _draw(settings, 1, kv_heads, dim, slots)
    rows = torch.rand(1, kv_heads, dim, device=settings.device).argsort(-1)[..., : dim // 4]
    call = partial(row_product, part, table, rows, slots)
    return call, table.nbytes // 4, f"{dim // 4} of {dim} channels, {slots} keys"


def _named(forms: tuple[str, str]) -> str:
    return " and ".join(dict.fromkeys(forms))


TIMED: dict[str, Callable[[Settings], tuple[Callable[[], object], int, str]]] = {
    "attend_rows": _rows,
    "column_sums": _sums,
    "attend_slots": _slots,
    "attend_slots, chosen": _chosen,
    "decode_token": partial(_token, False),
    "decode_token, by values": partial(_token, True),
    **{f"attend_codes, {_named(forms)}": partial(_codes, forms) for forms in CODES},
    "page_scores": _pages,
    "row_product": _products,
}


def tests_marked(mark: str) -> list[str]:
    """Name the files with such tests: others may need packages that are not there."""
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    named = [file for file in files if f"pytest.mark.{mark}" in file.read_text()]
    return [str(file.relative_to(REPOSITORY)) for file in named]


def run_tests(settings: Settings, arguments: tuple[str, ...]) -> Record:
    """Run some of the package's tests on the device.

    Raises:
        Skip: there is no GPU, or no pytest.
        Wrong: some failed, or they take too long.
    """
    if not settings.cuda:
        raise Skip("needs a CUDA device")
    for name in ("pytest", "hypothesis", "xdist"):
        if importlib.util.find_spec(name) is None:
            raise Skip(f"{name} is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "8", "-p", "no:cacheprovider"]
    seconds = min(SECONDS, max(settings.deadline - time.time(), 1))
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise Wrong(f"not at their end after {seconds:.0f} s") from None
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    found = {"tests": lines[-1], "failed": failed}
    if done.returncode:
        raise Wrong(lines[-1], found)
    return found


def table(records: dict[str, Record], machine: Record) -> list[Table]:
    """Show errors by kernel, dtype and head size, and times."""
    errors = Table(title=TITLE, show_edge=False)
    for name in ("kernels", "error", "where it is largest"):
        errors.add_column(name, justify="right" if name == "error" else "left")
    times = Table(title="time of one call", show_edge=False)
    for name in ("kernel", "size", "ms", "GB/s"):
        times.add_column(name, justify="left" if name in ("kernel", "size") else "right")
    for key, record in records.items():
        if "error" in record:
            errors.add_row(key, f"{record['error']:.1e}", record["worst"])
        if "ms" in record:
            speed = f"{record['bytes_per_s'] / 1e9:.0f}"
            times.add_row(
                key.removeprefix("time of "), record["size"], f"{record['ms']:.3f}", speed
            )
    return [errors, times]
