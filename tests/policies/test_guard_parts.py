"""Readers, merging, splits and codecs from outside: a mistake is one line with its place."""

import pickle
import re
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import kvtool
from kvtool.errors import PolicyError
from kvtool.generation import decode_step, prefill
from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.codec.int8 import Int8
from kvtool.policies.evicted.eviction import Merging
from kvtool.policies.pace.every import Every
from kvtool.policies.parts import Allocator, Read
from kvtool.policies.policy import compose
from kvtool.policies.read.rows import reads_together
from kvtool.policies.read.view import Choice
from tests.cache.test_readers import Newest, Oldest
from tests.models_for_tests import peaky_model, random_ids
from tests.policies.test_guard import BUDGET, Own, kept, run


@dataclass(frozen=True)
class Reader(Read):
    """The newest tokens and a table of one number, with nothing wrong."""

    k: int | None = None

    name: ClassVar = "mine"
    paper: ClassVar = "-"

    def sized(self, step):
        return replace(self, k=4)

    def start(self, stored):
        return {"mean": stored.keys.mean(2)}

    def choose(self, view):
        newest = torch.arange(view.tokens - 4, view.tokens)
        return Choice(newest.expand(*view.query.shape[:2], -1))


@dataclass(frozen=True)
class Merge(Merging):
    """Nothing is merged, and nothing is wrong."""

    name: ClassVar = "merge"
    paper: ClassVar = "-"

    def absorb(self, memory, eviction):
        return eviction.evicted_positions < -1


@dataclass(frozen=True)
class Split(Allocator):
    name: ClassVar = "mine"
    paper: ClassVar = "-"

    def split(self, problem):
        return problem.by_weight([0.0] * problem.layers)


@dataclass(frozen=True)
class ByHead(HeadSplit):
    name: ClassVar = "mine"
    paper: ClassVar = "-"

    def tokens(self, heads):
        return torch.full(heads.importance.shape[:2], int(heads.budget))


@dataclass(frozen=True)
class Codes(Int8):
    name: ClassVar = "mine"

    def encode(self, numbers):
        return super().encode(numbers)

    def decode(self, codes, scales):
        return super().decode(codes, scales)


def policy_of(part):
    if isinstance(part, Read):
        return compose(part, [])
    base = kvtool.parse_policy("snapkv(window=4)" if isinstance(part, HeadSplit) else "h2o")
    return compose(base.score, [part])


@pytest.mark.parametrize("part", [Reader(), Merge(), Split(), ByHead(), Codes()])
def test_one_with_nothing_wrong_runs(part):
    found = run(policy_of(part))
    if not isinstance(part, Reader | Codes):
        same = "snapkv(window=4)" if isinstance(part, HeadSplit) else "h2o"
        assert kept(found) == kept(run(same))


def slots(wrong):
    return lambda self, view: Choice(wrong(Reader.choose(self, view).slots))


def shared(self, view):
    heads = torch.full(view.query.shape[:3], float("nan"))
    return Choice(Reader.choose(self, view).slots, 0, heads, view.keys.mean(2))


def fills(self, memory, eviction):
    eviction.kept_values.fill_(float("inf"))
    return eviction.evicted_positions < 0


def fills_while_decoding(self, memory, eviction):
    return fills(self, memory, eviction) if eviction.decoded else Merge.absorb(self, {}, eviction)


MISTAKES = {
    "no choice": (Reader, "choose", lambda self, view: None, "returns None, not a Choice"),
    "a reader raises": (Reader, "choose", lambda self, view: 1 // 0, "raised ZeroDivisionError: "),
    "a reader exits": (Reader, "choose", lambda self, view: exit(3), "raised SystemExit: 3"),
    "numbers for slots": (Reader, "choose", slots(torch.Tensor.float), "slots that are Tensor"),
    "slots of one head": (
        Reader,
        "choose",
        slots(lambda found: found[:, :1]),
        r"has slots of shape \(1, 1, 4\), not \(1, 2, \.\.\) or \(1, 2, 4, \.\.\)",
    ),
    "a slot too many": (
        Reader,
        "choose",
        slots(lambda found: found + 1),
        "has slot 41, and there are 0 to 40",
    ),
    "slots elsewhere": (
        Reader,
        "choose",
        slots(lambda found: found.to("meta")),
        "has slots on meta, and the slots are on cpu",
    ),
    "a weight of nan": (Reader, "choose", shared, "leaves nan in weight"),
    "a list of tables": (Reader, "start", lambda self, stored: [], "returns list, not tensors by"),
    "a table of another batch": (
        Reader,
        "start",
        lambda self, stored: {"mean": torch.zeros(3)},
        "as `mean`, not a tensor with a row for each of 1 batch entries",
    ),
    "no reader": (Reader, "sized", lambda self, step: 4, "returns 4, not a reader"),
    "nothing absorbed": (Merge, "absorb", lambda *shown: None, "returns None, not a bool tensor"),
    "absorbed of one head": (
        Merge,
        "absorb",
        lambda self, memory, eviction: eviction.evicted_positions[:, :1] < 0,
        r"returns shape \(1, 1, 20\), not \(1, 2, 20\): batch, KV heads, evicted",
    ),
    "merging raises": (Merge, "absorb", lambda *shown: [][0], "raised IndexError: list index"),
    "infinite values": (Merge, "absorb", fills, "leaves inf in kept_values"),
    "infinite values later": (Merge, "absorb", fills_while_decoding, "leaves inf in kept_values"),
    "memory that is none": (Merge, "start", lambda *shown: None, "returns None, not tensors by"),
    "no allocation": (Split, "split", lambda self, problem: [20, 20], "list, not an Allocation"),
    "a layer less": (
        Split,
        "split",
        lambda self, problem: Allocation([20], 40),
        r"gives \[20\], not a count for each of 2 layers",
    ),
    "more than there is": (
        Split,
        "split",
        lambda self, problem: Allocation([30, 30], 40),
        "gives 60 tokens in all, more than 40",
    ),
    "heads as numbers": (
        ByHead,
        "tokens",
        lambda self, heads: torch.full(heads.importance.shape[:2], 20.0),
        "returns Tensor of shape .*, not an int64 tensor",
    ),
    "codes of four bytes": (
        Codes,
        "encode",
        lambda self, numbers: (numbers, numbers),
        "has codes that are Tensor of shape .*, not 1 bytes each",
    ),
    "one codec for two sides": (
        Codes,
        "sides",
        lambda self: self,
        "returns Broken, not the codecs of keys and of values",
    ),
    "decoded to nan": (
        Codes,
        "decode",
        lambda self, codes, scales: Int8.decode(self, codes, scales) * float("nan"),
        "leaves nan in what is decoded",
    ),
}


def broken(cls, hook, function):
    return dataclass(frozen=True)(type("Broken", (cls,), {hook: function, "__module__": __name__}))


@pytest.mark.parametrize(("cls", "hook", "function", "told"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_in_one_line_with_its_place(cls, hook, function, told):
    with pytest.raises(PolicyError, match=told) as raised:
        run(policy_of(broken(cls, hook, function)()))
    message = raised.value.report()
    assert message.startswith(f"{__name__}:Broken: {hook} ")
    assert re.search(r"\(test_guard_parts\.py, line \d+\)$", message)
    assert "\n" not in message
    assert raised.value.exit_code == 1


@pytest.mark.parametrize(
    ("cls", "hook", "value"), [(Every, "spare", 0), (Reader, "min_budget", "")]
)
def test_what_is_no_count_is_refused_before_it_runs(cls, hook, value):
    with pytest.raises(PolicyError, match=f"Broken: {hook} is {value!r}, not a count of 1 or more"):
        policy_of(broken(cls, hook, property(lambda self: value))())


def test_the_parts_of_a_score_are_checked_alike():
    class Wrong(Merge):
        def absorb(self, memory, eviction):
            return 1 // 0

    @dataclass(frozen=True)
    class Mine(Own):
        @property
        def evicted(self):
            return Wrong()

    with pytest.raises(PolicyError, match=r"Wrong: absorb raised ZeroDivisionError: .*line \d+\)"):
        run(compose(Mine(), []))


def test_a_guarded_part_is_of_its_kind_and_can_be_copied():
    policy = policy_of(Merge())
    again = pickle.loads(pickle.dumps(policy))
    for one in (policy.on_evict, deepcopy(policy.on_evict), again.on_evict):
        assert isinstance(one, Merge)
        with pytest.raises(PolicyError, match="absorb raised"):
            one.absorb({}, None)
    assert policy.evicted == Merge()
    assert again == policy


def test_rows_are_read_together_as_without_the_checks():
    for reader in (Newest(), Oldest(page=4, k=8)):
        assert not reads_together(compose(reader, []).reader)


def test_those_of_the_package_are_not_wrapped():
    for text in ("quest", "h2o+cam", "h2o+pyramid", "snapkv+ada", "h2o+int8"):
        policy = kvtool.parse_policy(text)
        parts = (policy.read, policy.evicted, policy.allocate, policy.heads, policy.codec)
        found = (
            policy.reader,
            policy.on_evict,
            policy.allocator,
            policy.head_split,
            policy.coding,
        )
        assert all(one is other for one, other in zip(parts, found, strict=True))


def test_a_reader_is_looked_at_again_behind_every_prompt():
    class Later(Reader):
        def choose(self, view):
            newest = torch.arange(view.tokens - 4, view.tokens) + (view.tokens > 50)
            return Choice(newest.expand(*view.query.shape[:2], -1))

    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, compose(dataclass(frozen=True)(Later)(), []), BUDGET)
    prefill(model, cache, random_ids(40))
    decode_step(model, cache, random_ids(1)[0])
    prefill(model, cache, random_ids(20, seed=1))
    with pytest.raises(PolicyError, match="choose has slot 62, and there are 0 to 61"):
        decode_step(model, cache, random_ids(1)[0])
