"""What every policy of the table has to keep, each as one function of a case.

A check drives caches through public names only, on one tiny model: it knows no policy, and asks
none but the table's line what the budget of its base means. `CHECKS` holds them by name.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FunctionType, MethodType, ModuleType

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import kvtool
from kvtool.calls.policy_checks import (
    BLOCK,
    DIM,
    KV_HEADS,
    LAYERS,
    NEW,
    PROMPT,
    Skip,
    Subject,
    entries_are_entries_alone,
    padded,
)
from kvtool.calls.policy_checks import CHECKS as CLAUSES
from kvtool.cli.main import main
from kvtool.generation import decode_step, graphs, prefill
from kvtool.generation.graphs import StaticDecoding
from kvtool.maths.quantise import RandomRotation
from tests import tape
from tests.contract.cases import Case
from tests.models_for_tests import any_cache, instructed, peaky_model, random_ids

MODES = ("full", BLOCK)
ROUNDING = {"atol": 3e-4, "rtol": 3e-4}  # rows of a batch run in other kernels than alone
ONE_CODE = {"atol": 0.03, "rtol": 3e-4}  # so that a number may be rounded to the next code

CHECKS: dict[str, Callable[[Case], None]] = {}


def check(function: Callable[[Case], None]) -> Callable[[Case], None]:
    """Put a check into the battery."""
    CHECKS[function.__name__] = function
    return function


@functools.cache
def attached() -> PreTrainedModel:
    """The battery's model, running kvtool's attention."""
    return kvtool.attach(plain_model())


def plain_model(layers: int = LAYERS) -> PreTrainedModel:
    """The same with transformers' own; heads are as wide as the coarsest codec needs them."""
    return peaky_model("llama", num_hidden_layers=layers, head_dim=DIM)


def new_cache(case: Case, mode: str = "full", budget: int | None = None, **options):
    kept = None if "plan" in options else budget or case.budget
    kept = kept if case.bounded else None
    return any_cache(attached(), case.text, kept, mode, **options)


def feed(cache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """A prompt or a turn; (1, batch, vocab) logits."""
    return prefill(attached(), cache, ids, mask)[None]


def steps(cache, tokens: Tensor) -> Tensor:
    """Single tokens, (batch, n); (n, batch, vocab) logits."""
    return torch.stack([decode_step(attached(), cache, each) for each in tokens.T])


def same_slots(cache, other, row: int | None = None) -> None:
    """Equal kept positions; or, with `row`, a row of `cache` that is all of `other`."""
    for layer in range(LAYERS):
        mine, theirs = cache.kept_positions(layer), other.kept_positions(layer)
        if row is not None:
            mine, rest = mine[row : row + 1].tensor_split([theirs.shape[2]], dim=2)
            assert (rest == -1).all()
        assert torch.equal(mine, theirs), f"layer {layer}"


def rounding(case: Case) -> dict[str, float]:
    """How far logits of the same text may lie apart, where other kernels have run."""
    return ROUNDING if case.policy.codec is None else ONE_CODE


@dataclass(frozen=True)
class Tried(Subject):
    """A case as the clauses of `kvtool policies X --check` take it."""

    case: Case
    options: dict = field(default_factory=dict)

    def cache(self, mode="full", budget=None):
        return new_cache(self.case, mode, budget, **self.options)


def tried(case: Case, **options) -> Tried:
    budget = case.budget if case.bounded else None
    return Tried(case.policy, budget, attached(), case, options)


def clause(run: Callable[[Subject], None]) -> Callable[[Case], None]:
    """A clause of the product as a check of a case."""

    def check(case: Case) -> None:
        with contextlib.suppress(Skip):
            run(tried(case))

    return check


CHECKS |= {name.replace(" ", "_"): clause(run) for name, run in CLAUSES.items()}


def short_batch(case: Case, mode: str, decoded: int) -> None:
    """Entries of 48, 0 and 1 tokens; some are decoded, then a turn comes in which all have some.

    An entry of padding alone has nothing to be compared with before the turn, and afterwards only
    where nothing was decoded: it is then an entry whose prompt is the turn.
    """
    rows = [random_ids(length, seed=length) for length in (PROMPT, 1)]
    ids, mask = torch.zeros(3, PROMPT, dtype=torch.long), torch.zeros(3, PROMPT, dtype=torch.long)
    for entry, row in ((0, rows[0]), (2, rows[1])):
        ids[entry, -row.shape[1] :], mask[entry, -row.shape[1] :] = row[0], 1
    new, turn = random_ids(2, seed=9, batch=3)[:, :decoded], random_ids(28, seed=7, batch=3)
    both = new_cache(case, mode)
    together = [feed(both, ids, mask), *([steps(both, new)] if decoded else [])]
    together += [feed(both, turn), steps(both, turn[:, :3])]
    for entry, row in ((0, rows[0]), (1, None), (2, rows[1])):
        if row is None and decoded:
            continue
        one, own = new_cache(case, mode), slice(entry, entry + 1)
        alone = [feed(one, row)] if row is not None else []
        alone += [steps(one, new[own])] if decoded else []
        alone += [feed(one, turn[own]), steps(one, turn[own, :3])]
        ours = torch.cat(together)[:, own][-sum(map(len, alone)) :]
        torch.testing.assert_close(ours, torch.cat(alone), **rounding(case))
        same_slots(both, one, row=entry)


@check
def an_entry_of_padding_alone_leaves_the_others_as_they_are(case: Case) -> None:
    short_batch(case, BLOCK, decoded=2)


@check
def an_entry_of_padding_alone_where_the_prompt_comes_whole(case: Case) -> None:
    short_batch(case, "full", decoded=2)


@check
def an_entry_may_begin_in_a_later_turn(case: Case) -> None:
    if case.repeats:
        return  # only a first prompt is repeated
    for mode in MODES:
        short_batch(case, mode, decoded=0)


def reachable(root: object) -> dict[int, int]:
    """Bytes of each storage that attributes, items and closures lead to from an object.

    Left out is what the model has anyway, and the constants of int4's rotation, which all caches
    of a process share.
    """
    model = attached()
    found: dict[int, int] = {}
    known = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    seen, ahead = set(), [root]
    plain = (str, bytes, int, float, type, ModuleType, CodeType, torch.nn.Module, RandomRotation)
    while ahead:
        one = ahead.pop()
        if id(one) in seen or isinstance(one, plain):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            ahead += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            ahead += one
        elif isinstance(one, MethodType):
            ahead.append(one.__self__)
        elif isinstance(one, FunctionType):
            ahead += [cell.cell_contents for cell in one.__closure__ or ()]
        elif isinstance(one, functools.partial):
            ahead += [one.func, one.args, one.keywords]
        else:
            slots = [name for kind in type(one).__mro__ for name in vars(kind).get("__slots__", ())]
            ahead += [getattr(one, name) for name in slots if hasattr(one, name)]
            ahead += getattr(one, "__dict__", {}).values()
    return found


@check
def every_tensor_of_a_cache_is_in_its_report(case: Case) -> None:
    ids, mask, rows = padded()
    number = 8 * LAYERS * KV_HEADS * len(rows)  # bytes of one for each head: which slot is next
    cache = new_cache(case)
    feed(cache, ids, mask), steps(cache, random_ids(3, seed=9, batch=3))
    report, found = cache.report(), reachable(cache).values()
    counted = report.allocated_bytes + report.state_bytes + report.host_bytes
    assert sum(size for size in found if size > number) <= counted <= sum(found)


@functools.cache
def full_beams(policy: str) -> list:
    if policy == "full":
        return plain_model().generate(random_ids(PROMPT), **BEAMS).tolist()
    cache = kvtool.build_cache(attached(), policy)
    return attached().generate(random_ids(PROMPT), past_key_values=cache, **BEAMS).tolist()


BEAMS = {"num_beams": 3, "max_new_tokens": NEW, "do_sample": False}


@check
def beams_are_those_of_the_full_cache(case: Case) -> None:
    cache = new_cache(case, budget=2 * (PROMPT + NEW))
    if case.repeats:
        with pytest.raises(kvtool.KvtoolError, match="has a prompt repeated"):
            attached().generate(random_ids(PROMPT), past_key_values=cache, **BEAMS)
    else:
        found = attached().generate(random_ids(PROMPT), past_key_values=cache, **BEAMS)
        assert found.tolist() == full_beams(case.full)


def same_files(path: Path, other: Path) -> None:
    """Equal labels and tensors, whatever empty slots hold."""
    labels = [safe_open(each, framework="pt").metadata() for each in (path, other)]
    for each in labels:
        del each["sha256"]
    assert labels[0] == labels[1]
    same_numbers(load_file(other), load_file(path))


def same_numbers(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal tensors of files, whatever empty slots hold."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        ours = found[name]
        positions = expected.get(".".join(name.split(".")[:2]) + ".positions")
        if positions is not None and tensor.shape[:3] == positions.shape == ours.shape[:3]:
            tensor, ours = tensor[positions >= 0], ours[positions >= 0]
        torch.testing.assert_close(ours, tensor, rtol=0, atol=0, equal_nan=True, msg=name)


@check
def a_loaded_cache_is_saved_as_the_same_file(case: Case) -> None:
    ids, mask, _ = padded()
    with TemporaryDirectory() as folder:
        path, again = Path(folder) / "a.safetensors", Path(folder) / "b.safetensors"
        for prompt, valid in ((ids, mask), (random_ids(PROMPT), None)):
            cache = new_cache(case, BLOCK)
            feed(cache, prompt, valid)
            steps(cache, random_ids(NEW, seed=9, batch=len(prompt)))
            kvtool.save_cache(cache, path)
            kvtool.save_cache(kvtool.load_cache(path, attached()), again)
            same_files(again, path)


@check
def a_reordered_cache_is_saved_as_the_entries_that_were_taken(case: Case) -> None:
    ids, mask, _ = padded()
    order = torch.tensor([2, 0, 0])
    cache = new_cache(case)
    feed(cache, ids, mask), steps(cache, random_ids(NEW, seed=9, batch=3))
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.safetensors" for name in ("before", "after")]
        kvtool.save_cache(cache, paths[0])
        cache.reorder_cache(order)
        kvtool.save_cache(cache, paths[1])
        before, after = map(load_file, paths)
    for name, tensor in before.items():
        if tensor.dim() and len(tensor) == len(order):
            width = after[name].shape[2] if tensor.dim() > 2 else None  # the longest entry may go
            before[name] = tensor[order][:, :, :width] if width else tensor[order]
    same_numbers(after, before)


@check
def a_plain_forward_cuts_as_a_driven_prompt_in_blocks(case: Case) -> None:
    if case.policy.score.layer_tokens == "same" or case.repeats:
        return  # a plain forward has the logits of its prompt all at once, and cuts afterwards
    ids = random_ids(PROMPT)
    driven, generated = new_cache(case, BLOCK), new_cache(case, BLOCK)
    likeliest = feed(driven, ids)[0].argmax(-1)
    out = attached().generate(ids, past_key_values=generated, max_new_tokens=1, do_sample=False)
    same_slots(generated, driven)
    assert out[0, -1:].tolist() == likeliest.tolist()


def held(cache) -> int:
    """Tokens that all heads of all layers hold together."""
    return sum(int((cache.kept_positions(layer) >= 0).sum()) for layer in range(LAYERS))


@functools.cache
def model_folder() -> TemporaryDirectory:
    folder = TemporaryDirectory()
    attached().config.save_pretrained(folder.name)
    return folder


def make_plan(case: Case, allocator: str) -> dict:
    """What `kvtool plan-budget` plans for a case, of the battery's prompt and new tokens."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        asked = ("-m", model_folder().name, "-p", case.text, "-b", str(case.budget))
        text = ("--context", str(PROMPT + NEW), "-n", str(NEW), "--allocator", allocator)
        assert main(["plan-budget", "-q", *asked, *text, "-o", str(path)]) == 0
        return json.loads(path.read_text())


@check
def a_plan_of_unequal_layers_is_obeyed_to_the_byte(case: Case) -> None:
    if not case.bounded:
        return
    plan = make_plan(case, "pyramid")
    assert len(set(plan["layers"]["tokens"])) > 1
    split = case.policy.head_split
    across = split is not None and split.across_layers
    if case.policy.score.layer_tokens == "same" or across:
        told = "compete for one budget" if across else "keeps the same tokens in all layers"
        with pytest.raises(kvtool.UsageError, match=told):
            new_cache(case, plan=plan)
        plan = make_plan(case, "uniform")
    planned, cache = plan["layers"]["tokens"], new_cache(case, plan=plan)
    prefill(attached(), cache, random_ids(PROMPT), new_tokens=NEW)
    kept, report = cache.report().kept_per_layer, cache.report()
    assert held(cache) <= sum(planned) * KV_HEADS or case.reads
    most = report.allocated_bytes + report.state_bytes
    for token in random_ids(NEW, seed=9)[0]:
        decode_step(attached(), cache, token[None])
        report = cache.report()
        most = max(most, report.allocated_bytes + report.state_bytes)
    assert most == plan["totals"]["storage"]["bytes"]
    assert report.traffic_bytes == plan["totals"]["traffic"]["bytes"]
    if not case.reads and case.policy.head_split is None:
        assert kept == planned
    entries_are_entries_alone(tried(case, plan=plan), "full")


@check
def the_bytes_held_are_the_bytes_asked_for(case: Case) -> None:
    if not case.bounded:
        return
    plan = make_plan(case, "uniform")
    size = plan["totals"]["storage"]["bytes"]
    cache = new_cache(case, budget=f"{size}B")
    prefill(attached(), cache, random_ids(PROMPT), new_tokens=NEW)
    for token in random_ids(NEW, seed=9)[0]:
        report = cache.report()
        assert report.allocated_bytes + report.state_bytes <= size
        decode_step(attached(), cache, token[None])
    filled = sum(layer.shape[-1] for layer in map(cache.kept_positions, range(LAYERS)))
    report = cache.report()
    assert filled == sum(report.kept_per_layer)
    assert report.kv_bytes <= report.allocated_bytes


@check
def heads_of_unequal_counts_are_stored_row_by_row(case: Case) -> None:
    text = f"{case.text}+ada"
    try:
        kvtool.parse_policy(text)
    except kvtool.UsageError:
        return  # no attention scores by which heads could compete
    entries_are_entries_alone(tried(Case(text, case.kind)), "full")


@check
def compiled_steps_are_the_eager_ones(case: Case) -> None:
    """On one layer, which every layer is compiled like; what cannot be compiled runs as it is."""
    torch._dynamo.reset()
    model = kvtool.attach(plain_model(1))
    ids, mask, _ = padded()
    eager, compiled = (kvtool.build_cache(model, case.text, case.budget) for _ in range(2))
    for cache in (eager, compiled):
        prefill(model, instructed(cache), ids, mask)
    step = StaticDecoding(model, NEW, backend="eager", required=False, compiled=True)
    for token in random_ids(NEW, seed=9, batch=3).T:
        found, expected = step(model, compiled, token), decode_step(model, eager, token)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(compiled.kept_positions(0), eager.kept_positions(0))
    assert compiled.report().kv_bytes == eager.report().kv_bytes
    report = step.steps
    assert report.compiled_steps + report.eager_steps == NEW
    assert report.graphs <= 1


ASKING = ("sirllm", "calidrop")  # the host, in every step
WHOLE_ROWS = ("exact-topk", "quest", "sparq", "loki", "hsa", "rocketkv", "rocketkv-mt")


@check
def replayed_steps_are_the_eager_ones(case: Case) -> None:
    """One recording serves them between two cuts, but of policies that ask the host."""
    model = attached()
    ids, mask, _ = padded()
    if any(name in case.text for name in WHOLE_ROWS):  # others have rows of other lengths
        mask = torch.ones_like(mask)
    eager, static = new_cache(case), new_cache(case)
    for cache in (eager, static):
        prefill(model, instructed(cache), ids, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "recorder", tape.recorder())
        step = StaticDecoding(model, NEW)
    for token in random_ids(NEW, seed=9, batch=3).T:
        found, expected = step(model, static, token), decode_step(model, eager, token)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    same_slots(static, eager)
    replayed = step.steps.replayed_steps
    assert (replayed == 0) == any(name in case.text for name in ASKING)
