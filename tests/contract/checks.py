"""What every policy of the table has to keep, each as one function of a case.

A check drives caches through public names only, on one tiny model: it knows no policy, and asks
none but the table's line what the budget of its base means. `CHECKS` holds them by name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FunctionType, MethodType, ModuleType

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvtool
from kvtool.cli.main import main
from kvtool.generation import decode_step, prefill
from kvtool.generation.compiled import CompiledDecoding
from kvtool.maths.quantise import RandomRotation
from kvtool.policies.policy import reads_whole
from tests.coded import TIE_LOGITS
from tests.contract.cases import Case
from tests.models_for_tests import any_cache, instructed, peaky_model, random_ids

PROMPT, NEW, BLOCK = 46, 7, "block:16"
LAYERS, KV_HEADS, DIM = 2, 2, 32
MODES = ("full", BLOCK)
LENGTHS = (PROMPT, 29, 9)  # of a padded batch; the last fits in the budget
SLOTS = (PROMPT + NEW) * KV_HEADS * LAYERS  # of a text that fits
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


def same_holdings(cache, other) -> None:
    """Equal kept positions, tokens seen and bytes."""
    same_slots(cache, other)
    assert cache.tokens_seen() == other.tokens_seen()
    assert cache.report() == other.report()


def rounding(case: Case) -> dict[str, float]:
    """How far logits of the same text may lie apart, where other kernels have run."""
    return ROUNDING if case.policy.codec is None else ONE_CODE


@functools.cache
def padded() -> tuple[Tensor, Tensor, list[Tensor]]:
    """A left-padded batch, its mask, and its rows alone."""
    rows = [random_ids(length, seed=length) for length in LENGTHS]
    ids = torch.zeros(len(rows), PROMPT, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, PROMPT - row.shape[1] :] = row[0]
    return ids, (ids > 0).long(), rows


def rows_are_rows_alone(case: Case, make: Callable[[], object]) -> None:
    """A padded batch, decoded, with a padded second turn, against each of its rows alone."""
    ids, mask, rows = padded()
    new, turn = random_ids(NEW, seed=9, batch=3), random_ids(11, seed=5, batch=3)
    turn_mask = torch.ones_like(turn)
    turn_mask[1, :-3] = 0
    both = make()
    together = [feed(both, ids, mask), steps(both, new), feed(both, turn, turn_mask)]
    together.append(steps(both, new[:, :2]))
    for i, row in enumerate(rows):
        one = make()
        alone = [feed(one, row), steps(one, new[i : i + 1])]
        alone += [feed(one, turn[i : i + 1, turn_mask[i].bool()]), steps(one, new[i : i + 1, :2])]
        ours = torch.cat(together)[:, i : i + 1]
        torch.testing.assert_close(ours, torch.cat(alone), **rounding(case))
        same_slots(both, one, row=i)


@check
def rows_of_a_padded_batch_are_the_rows_alone(case: Case) -> None:
    rows_are_rows_alone(case, lambda: new_cache(case))


@check
def so_they_are_where_the_prompt_comes_in_blocks(case: Case) -> None:
    rows_are_rows_alone(case, lambda: new_cache(case, BLOCK))


def short_batch(case: Case, mode: str, decoded: int) -> None:
    """Entries of 46, 0 and 1 tokens; some are decoded, then a turn comes in which all have some.

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
def so_it_does_where_the_prompt_comes_whole(case: Case) -> None:
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
def full_logits(policy: str, mode: str) -> Tensor:
    """The full cache's logits, by transformers alone where they are not of codes."""
    if policy != "full":
        cache = kvtool.build_cache(attached(), policy, prefill=mode)
        return torch.cat([feed(cache, random_ids(PROMPT)), steps(cache, random_ids(NEW, seed=1))])
    model = plain_model()
    cache, ids = DynamicCache(config=model.config), random_ids(PROMPT)
    with torch.no_grad():
        found = [model(ids, past_key_values=cache).logits[:, -1]]
        for token in random_ids(NEW, seed=1)[0]:
            found.append(model(token.view(1, 1), past_key_values=cache).logits[:, -1])
    return torch.stack(found)


def same_but_for_ties(case: Case, found: Tensor, expected: Tensor) -> None:
    """Compare logits; under a codec a number between two codes may be rounded to the other one."""
    close = torch.isclose(found, expected, atol=2e-5, rtol=2e-5)
    if case.policy.codec is not None and not close.all():
        assert close.float().mean() > 0.5
        torch.testing.assert_close(found, expected, atol=TIE_LOGITS, rtol=2e-5)
    else:
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@check
def a_budget_that_fits_gives_the_full_caches_logits(case: Case) -> None:
    for mode in MODES:
        cache = new_cache(case, mode, budget=2 * (PROMPT + NEW))
        found = torch.cat([feed(cache, random_ids(PROMPT)), steps(cache, random_ids(NEW, seed=1))])
        read = "full" if reads_whole(case.policy, planned=False) else mode
        same_but_for_ties(case, found, full_logits(case.full, read))
        report = cache.report()
        assert report.kept_per_layer == [PROMPT + NEW] * LAYERS
        codec = case.policy.codec
        sides = () if codec is None else codec.sides()
        coded = sum(side.vector_bytes(DIM) for side in sides) * SLOTS
        assert report.kv_bytes == (coded or report.full_bytes)


@functools.cache
def full_beams(policy: str) -> list:
    if policy == "full":
        return plain_model().generate(random_ids(PROMPT), **BEAMS).tolist()
    cache = kvtool.build_cache(attached(), policy)
    return attached().generate(random_ids(PROMPT), past_key_values=cache, **BEAMS).tolist()


BEAMS = {"num_beams": 3, "max_new_tokens": NEW, "do_sample": False}


@check
def beams_are_reordered_with_all_that_is_known_of_them(case: Case) -> None:
    cache = new_cache(case, budget=2 * (PROMPT + NEW))
    if case.repeats:
        with pytest.raises(kvtool.KvtoolError, match="has a prompt repeated"):
            attached().generate(random_ids(PROMPT), past_key_values=cache, **BEAMS)
    else:
        found = attached().generate(random_ids(PROMPT), past_key_values=cache, **BEAMS)
        assert found.tolist() == full_beams(case.full)
    ids, mask, rows = padded()
    new, order = random_ids(NEW, seed=9, batch=3), [2, 0, 0]
    cache = new_cache(case)
    feed(cache, ids, mask), steps(cache, new)
    cache.reorder_cache(torch.tensor(order))
    then = steps(cache, new)
    for place in (0, 2):
        row = order[place]
        one = new_cache(case)
        feed(one, rows[row]), steps(one, new[row : row + 1])
        alone = steps(one, new[place : place + 1])
        torch.testing.assert_close(then[:, place : place + 1], alone, **rounding(case))
        same_slots(cache, one, row=place)


def same_files(path: Path, other: Path) -> None:
    """Equal labels and tensors, whatever empty slots hold."""
    labels = [safe_open(each, framework="pt").metadata() for each in (path, other)]
    for each in labels:
        del each["sha256"]
    assert labels[0] == labels[1]
    mine, theirs = load_file(path), load_file(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        found = theirs[name]
        positions = mine.get(".".join(name.split(".")[:2]) + ".positions")
        if positions is not None and tensor.shape[:3] == positions.shape == found.shape[:3]:
            tensor, found = tensor[positions >= 0], found[positions >= 0]
        torch.testing.assert_close(found, tensor, rtol=0, atol=0, equal_nan=True, msg=name)


@check
def a_saved_cache_goes_on_like_the_unbroken_one(case: Case) -> None:
    ids, mask, _ = padded()
    new = random_ids(2 * NEW, seed=9, batch=3)
    with TemporaryDirectory() as folder:
        path, again = Path(folder) / "a.safetensors", Path(folder) / "b.safetensors"
        for prompt, valid, tokens in ((ids, mask, new), (random_ids(PROMPT), None, new[:1])):
            cache = new_cache(case, BLOCK)
            feed(cache, prompt, valid), steps(cache, tokens[:, :NEW])
            kvtool.save_cache(cache, path)
            loaded = kvtool.load_cache(path, attached())
            same_slots(loaded, cache)
            kvtool.save_cache(loaded, again)
            same_files(again, path)
            found, expected = steps(loaded, tokens[:, NEW:]), steps(cache, tokens[:, NEW:])
            torch.testing.assert_close(
                found, expected, **rounding(case)
            )  # slots lie in another order
            same_slots(loaded, cache)
            turn = random_ids(11, seed=5, batch=len(prompt))
            torch.testing.assert_close(feed(loaded, turn), feed(cache, turn), **rounding(case))


@check
def a_rollback_leaves_no_trace(case: Case) -> None:
    ids, mask, _ = padded()
    new, turn = random_ids(NEW, seed=9, batch=3), random_ids(11, seed=5, batch=3)
    for mode in MODES:
        asked, never = new_cache(case, mode), new_cache(case, mode)
        for cache in (asked, never):
            feed(cache, ids, mask)
        with asked.rollback():
            first = feed(asked, turn)
            steps(asked, new)
            asked.reorder_cache(torch.tensor([2, 0, 0]))
        with asked.rollback():
            steps(asked, new)
        with asked.rollback():
            assert torch.equal(feed(asked, turn), first)
        same_holdings(asked, never)
        assert torch.equal(steps(asked, new), steps(never, new))
        assert torch.equal(feed(asked, turn), feed(never, turn))
        same_holdings(asked, never)


@check
def a_copy_and_a_reset_cache_owe_the_first_nothing(case: Case) -> None:
    ids, new = random_ids(PROMPT), random_ids(NEW, seed=9)
    cache = new_cache(case)
    first = torch.cat([feed(cache, ids), steps(cache, new)])
    copied = cache.copy()
    expected = cache.copy()
    steps(cache, random_ids(NEW, seed=3))
    assert torch.equal(steps(copied, new), steps(expected, new))
    same_holdings(copied, expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(torch.cat([feed(cache, ids), steps(cache, new)]), first)


@check
def blocks_are_counted_from_the_text_whoever_feeds_them(case: Case) -> None:
    ids, new = random_ids(PROMPT), random_ids(NEW, seed=9)
    whole, one_block = new_cache(case), new_cache(case, f"block:{PROMPT}")
    found = torch.cat([feed(one_block, ids), steps(one_block, new)])
    expected = torch.cat([feed(whole, ids), steps(whole, new)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    same_slots(one_block, whole)
    if case.policy.score.layer_tokens == "same" or case.repeats:
        return  # a plain forward has the logits of its prompt all at once, and cuts afterwards
    driven, generated = new_cache(case, BLOCK), new_cache(case, BLOCK)
    likeliest = feed(driven, ids)[0].argmax(-1)
    out = attached().generate(ids, past_key_values=generated, max_new_tokens=1, do_sample=False)
    same_slots(generated, driven)
    assert out[0, -1:].tolist() == likeliest.tolist()


@check
def no_step_holds_more_than_the_budget(case: Case) -> None:
    if not case.bounded or case.reads:
        return  # what is read is compared with the estimate, with the bytes
    for mode in MODES:
        cache = new_cache(case, mode)
        feed(cache, random_ids(PROMPT))
        after_prompt = held(cache)
        for i, token in enumerate(random_ids(NEW, seed=9).T, 1):
            decode_step(attached(), cache, token)
            more = i * KV_HEADS * LAYERS if case.appends else 0
            most = case.budget + max(case.policy.spare - 1, 0)  # before its next cut
            assert held(cache) <= most * KV_HEADS * LAYERS + more
            assert held(cache) >= after_prompt  # nothing is given up that fits
    assert cache.report().tokens_seen == PROMPT + NEW


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
    rows_are_rows_alone(case, lambda: new_cache(case, plan=plan))


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
    rows_are_rows_alone(case, lambda: new_cache(Case(text, case.kind)))


@check
def compiled_steps_are_the_eager_ones(case: Case) -> None:
    """On one layer, which every layer is compiled like; what cannot be compiled runs as it is."""
    torch._dynamo.reset()
    model = kvtool.attach(plain_model(1))
    ids, mask, _ = padded()
    eager, compiled = (kvtool.build_cache(model, case.text, case.budget) for _ in range(2))
    for cache in (eager, compiled):
        prefill(model, instructed(cache), ids, mask)
    step = CompiledDecoding(model, NEW, backend="eager", required=False)
    for token in random_ids(NEW, seed=9, batch=3).T:
        found, expected = step(model, compiled, token), decode_step(model, eager, token)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(compiled.kept_positions(0), eager.kept_positions(0))
    assert compiled.report().kv_bytes == eager.report().kv_bytes
    report = step.report()
    assert report.compiled_steps + report.eager_steps == NEW
    assert report.graphs <= 1
