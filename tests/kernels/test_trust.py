"""Kernels are used only where they were right once; else plain torch, and one line says so."""

import logging
from contextlib import nullcontext

import pytest
import torch

from kvtool.kernels import checks, reference, tables, trust
from kvtool.kernels.checks import CODES, Family, Kind
from kvtool.maths.columns import COLUMNS
from recipes.benchmarks.gpu import kernels
from recipes.benchmarks.gpu.results import Wrong
from recipes.benchmarks.gpu.settings import Settings
from tests.kernels import torch_kernels
from tests.kernels.drawn import DEVICE

pytest.importorskip("triton")

from kvtool.kernels import (
    attend_causal,
    attend_codes,
    attend_rows,
    attend_slots,
    column_sums,
    join_parts,
    read_tables,
)

MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (attend_causal, attend_codes, attend_rows, attend_slots, column_sums)
} | {"page_scores": read_tables, "row_product": read_tables}
FAMILIES = {
    "attend_causal": Family.CAUSAL,
    "attend_rows": Family.ROWS,
    "column_sums": Family.ROWS,
    "attend_slots": Family.SLOTS,
    "attend_codes": Family.INT8,
    "page_scores": Family.PAGES,
    "row_product": Family.PRODUCTS,
}


@pytest.fixture(autouse=True)
def small_problems(monkeypatch):
    """The interpreter is slow, and a CPU has none of torch's kernels for a GPU."""
    if DEVICE == "cpu":
        torch_kernels.put_in_place(monkeypatch)
        monkeypatch.setattr(checks, "_KEPT", 70)
        monkeypatch.setattr(checks, "_NEW", 20)
        monkeypatch.setattr(checks, "_STORED", 200)
        monkeypatch.setattr(join_parts, "_SPLIT", 64)
    trust.trusted.cache_clear()
    yield
    trust.trusted.cache_clear()


def kind(family: Family, dtype=torch.float32, options: bool = False) -> Kind:
    four_bits = family in (Family.INT4, Family.K8V4, Family.K4V8)
    dims = (96, 32) if four_bits else (24, 16)
    return Kind(family, torch.device(DEVICE), dtype, *dims, 2, *3 * [options])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        (Family.ROWS, torch.float32, True),
        (Family.ROWS, torch.bfloat16, False),
        (Family.CAUSAL, torch.bfloat16, False),
        (Family.PAGES, torch.bfloat16, False),
        (Family.PRODUCTS, torch.float16, False),
        (Family.K8V4, torch.float32, False),
        (Family.INT4, torch.bfloat16, True),
        (Family.INT8, torch.float16, False),
        (Family.FP8, torch.bfloat16, True),
        (Family.SLOTS, torch.float16, True),
        (Family.SLOTS, torch.float32, False),
        (Family.K4V8, torch.float16, True),
    ],
)
def test_right_kernels_are_trusted(caplog, family, dtype, options):
    assert trust.trusted(kind(family, dtype, options)), caplog.text
    assert not caplog.records


def spoil(monkeypatch, name: str, change) -> None:
    """Let `change` alter what a kernel's function returns, or the sums that it was given."""
    right = getattr(MODULES[name], name)

    def wrong(*args, **kwargs):
        found = right(*args, **kwargs)
        sums = [arg for arg in args if isinstance(arg, dict)]
        return change(found, sums[0] if sums else None)

    monkeypatch.setattr(MODULES[name], name, wrong)


def last_is_nan(found, sums):
    found = found[0] if isinstance(found, tuple) else found
    found[-1, ..., -1] = float("nan")
    return (found, None) if sums is not None else found


def weights_in_empty_slots(found, sums):
    return found[0], found[1] + 0.1


def one_key_more(found, sums):
    return found[0], found[1], found[2] + 1


def later_queries_left_out(found, sums):
    return found[0] * (torch.arange(found[0].shape[2], device=DEVICE) < 15)[:, None], *found[1:]


def one_slot_too_high(column):
    def change(found, sums):
        sums[column][-1, -1, -1] += 0.2
        return found

    return change


def other_logarithms(found, sums):
    return found[0], found[1] / torch.tensor(2.0, device=DEVICE).log()


def counts_double(found, sums):
    sums["above_average"] += 1
    return found


WRONG = [
    ("attend_rows", later_queries_left_out),
    ("attend_causal", other_logarithms),
    ("column_sums", counts_double),
    ("attend_slots", weights_in_empty_slots),
    ("attend_codes", one_slot_too_high(COLUMNS[0])),
    ("page_scores", last_is_nan),
    ("row_product", last_is_nan),
    ("attend_rows", one_key_more),
    *(("column_sums", one_slot_too_high(name)) for name in COLUMNS[:3]),
    ("attend_slots", one_slot_too_high(COLUMNS[1])),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "change"), WRONG)
def test_wrong_kernels_are_never_used_and_one_line_says_so(monkeypatch, caplog, name, change):
    spoil(monkeypatch, name, change)
    for _ in range(2):
        assert not trust.trusted(kind(FAMILIES[name]))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    other = "Triton" if name == "attend_causal" else "plain torch"
    assert f"{other} instead" in record.message
    assert "is off by" in record.message
    assert "\n" not in record.message


@pytest.mark.parametrize("name", ["attend_rows", "attend_codes"])
def test_kernels_that_raise_are_never_used(monkeypatch, caplog, name):
    def out_of_room(*args, **kwargs):
        raise RuntimeError("at 3:4: keys = load\n\nout of resource: shared memory\n")

    monkeypatch.setattr(MODULES[name], name, out_of_room)
    for _ in range(2):
        assert not trust.trusted(kind(FAMILIES[name], torch.bfloat16))
    (record,) = caplog.records
    assert record.message.endswith("RuntimeError: out of resource: shared memory")
    assert "(bfloat16, 24/16)" in record.message


def ask(query: torch.Tensor) -> bool:
    return trust.usable(Family.PAGES, query, group=query.shape[2])


@pytest.mark.few(1)
@pytest.mark.parametrize("forms", [("int8", "int8"), ("int4", "int4")], ids="-".join)
def test_scales_of_other_slots_are_found(monkeypatch, forms):
    right = attend_codes.attend_codes

    def shifted(query, codes, *rest, **options):
        codes[1] = codes[1].roll(1, 2)
        return right(query, codes, *rest, **options)

    monkeypatch.setattr(attend_codes, "attend_codes", shifted)
    assert not trust.trusted(kind(CODES[forms]))


@pytest.mark.parametrize("name", ["choose_by_values", "join_parts"])
def test_a_slot_that_is_not_the_one_to_evict_is_found(monkeypatch, name):
    right = getattr(attend_slots, name)

    def without_a_choice(*args, **options):
        options.pop("choice", None)
        return None if name == "choose_by_values" else right(*args, **options)

    monkeypatch.setattr(attend_slots, name, without_a_choice)
    assert not trust.trusted(kind(Family.SLOTS))


@pytest.mark.parametrize("apart", [0, 1])
def test_a_chosen_slot_is_right_or_off_by_one(monkeypatch, tmp_path, apart):
    """To the check at first use and to the benchmark: no integer is right within rounding."""
    right = attend_slots.join_parts

    def shifted(*args, **options):
        joined = right(*args, **options)
        if options.get("choice") is not None:
            options["slot"] += apart
        return joined

    monkeypatch.setattr(attend_slots, "join_parts", shifted)
    monkeypatch.setattr(kernels, "forms", lambda *_: [{}])
    assert not apart or not trust.trusted(kind(Family.SLOTS, torch.bfloat16))
    settings = Settings("cpu", True, 0, tmp_path)
    with pytest.raises(Wrong, match="slot, group 3") if apart else nullcontext():
        kernels.compare(settings, Family.SLOTS, torch.bfloat16, (16, 16))


def test_a_kind_is_checked_once_and_every_kind_for_itself(monkeypatch):
    checked = []
    monkeypatch.setattr(trust, "_can_run", lambda query: True)
    monkeypatch.setattr(trust, "_disagreement", lambda kind: checked.append(kind))
    for dim, group, dtype in ((8, 2, torch.float32),) * 3 + ((16, 2, torch.float32),):
        assert ask(torch.zeros(1, 1, group, dim, dtype=dtype))
    assert [kind.head_dim for kind in checked] == [8, 16]
    assert ask(torch.zeros(1, 1, 3, 8))
    assert ask(torch.zeros(1, 1, 2, 8, dtype=torch.float16))
    assert len(checked) == 4


def test_plain_torch_takes_the_place_of_kernels_that_fail(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(trust, "_can_run", lambda query: True)
    monkeypatch.setattr(read_tables, "page_scores", fail)
    query, bounds = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 16, 5)
    found = tables.page_scores(query, bounds, 5)
    assert torch.equal(found, reference.page_scores(query, bounds, 5))


def test_checking_leaves_random_numbers_alone():
    before = torch.get_rng_state()
    assert trust.trusted(kind(Family.PAGES))
    assert torch.equal(before, torch.get_rng_state())


def test_no_kernel_runs_on_a_cpu_or_where_gradients_are_wanted(monkeypatch):
    class Query:
        is_cuda, dtype, requires_grad = True, torch.bfloat16, False

    assert not trust._can_run(torch.zeros(1))
    assert trust._can_run(Query)
    Query.requires_grad = True
    assert not trust._can_run(Query)
    Query.requires_grad, Query.dtype = False, torch.float64
    assert not trust._can_run(Query)


def test_compiled_code_is_given_plain_torch_without_a_break(monkeypatch):
    monkeypatch.setattr(trust, "_can_run", lambda query: True)
    monkeypatch.setattr(trust, "_disagreement", lambda kind: None)

    def doubled_by_kernels(query):
        return query * 2 if ask(query) else query

    query = torch.ones(1, 1, 2, 8)
    assert torch.equal(doubled_by_kernels(query), 2 * query)
    compiled = torch.compile(doubled_by_kernels, fullgraph=True, backend="eager")
    assert torch.equal(compiled(query), query)
