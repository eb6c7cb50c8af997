"""Every policy by name, and its description from its class and the file that it is in.

A new policy is a line here, a file of its own and a test.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from kvtool.errors import UsageError
from kvtool.policies.allocate import table as allocators
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.outside import build_outside, is_outside
from kvtool.policies.parts import Read, Score
from kvtool.policies.policy import Part, Policy, compose
from kvtool.policies.spelling import (
    defaults,
    field_types,
    known_name,
    part_name,
    read_part,
    spell_settings,
    split_outside,
)

BASES: dict[str, str] = {
    "full": "scores.full:Full",
    "random": "scores.random:Random",
    "recency": "scores.recency:Recency",
    "streaming": "scores.streaming:Streaming",
    "scissorhands": "scores.scissorhands:Scissorhands",
    "h2o": "scores.h2o:H2O",
    "tova": "scores.tova:TOVA",
    "roco": "scores.roco:RoCo",
    "snapkv": "scores.snapkv:SnapKV",
    "pyramidkv": "scores.pyramidkv:PyramidKV",
    "adakv": "scores.adakv:AdaKV",
    "duoattention": "scores.duoattention:DuoAttention",
    "d2o": "scores.d2o:D2O",
    "rkv": "scores.rkv:RKV",
    "triattention": "scores.triattention:TriAttention",
    "keydiff": "scores.keydiff:KeyDiff",
    "knorm": "scores.knorm:Knorm",
    "expected": "scores.expected:Expected",
    "lagkv": "scores.lagkv:LagKV",
    "kvzip": "scores.kvzip:KVzip",
    "sirllm": "scores.sirllm:SirLLM",
    "pyramidinfer": "scores.pyramidinfer:PyramidInfer",
    "exact-topk": "read.exact_topk:ExactTopK",
    "quest": "read.quest:Quest",
    "sparq": "read.sparq:SparQ",
    "loki": "read.loki:Loki",
    "hsa": "read.hsa:HSA",
    "rocketkv": "scores.rocketkv:RocketKV",
    "rocketkv-mt": "scores.rocketkv:RocketKVMT",
}
MODIFIERS: dict[str, str] = {
    "caote": "rescore.caote:CAOTE",
    "fastcaote": "rescore.caote:FastCAOTE",
    "critical": "rescore.critical:Critical",
    "every": "every:Every",
    "chunk": "chunk:Chunk",
    "d2o-merge": "evicted.d2o_merge:D2OMerge",
    "cam": "evicted.cam:CaM",
    "calidrop": "evicted.calidrop:CaliDrop",
    "refit": "evicted.refit:Refit",
}
CODECS: dict[str, str] = {
    "int8": "codec.int8:Int8",
    "int4": "codec.int4:Int4",
    "fp8": "codec.fp8:FP8",
    "int": "codec.mixed:Int",
    "k8v4": "codec.mixed:K8V4",
}
ALLOCATORS: dict[str, str] = {  # modifiers that split the budget; `d2o` itself is a base
    "d2o-alloc" if name == "d2o" else name: f"allocate.{place}"
    for name, place in allocators.ALLOCATORS.items()
    if name != "curves"  # whose shares are in a file that only plans are made from
}
MODIFIERS |= ALLOCATORS | CODECS
REFUSED: dict[str, str] = {
    "auto": "`generate`, `compress` and `serve` choose one for a memory; here name one",
    "loco": "it merges tokens with weights that need training, and there are none to ship",
}

_BUDGET_KINDS = {
    "always": "tokens held after every step",
    "prompt": "prompt tokens kept; what is generated is appended",
    "never": "none: everything is kept",
}
_READ = "pairs of key and value read per decoded token; everything is kept"
_READ_AFTER_CUT = "pairs of key and value read per decoded token; the rest follows from it"


@dataclass(frozen=True)
class Entry:
    """One line of the policy table.

    Attributes:
        parameters: defaults by name; a computed one is shown as what it is computed from.
        goes_on: bases that take the modifier, with the setting under which they do; empty for a
            base.
        origin: the package that it comes from, with its version where that is not kvtool.
    """

    name: str
    kind: Literal["base", "modifier"]
    summary: str
    parameters: dict[str, Any]
    paper: str
    budget_kind: str
    goes_on: tuple[str, ...] = ()
    origin: str = "kvtool"


def offered(name: str, table: Iterable[str], kind: str) -> str:
    """Return a name of a table, in lower case.

    Raises:
        UsageError: it is not in there, or kvtool does not offer it.
    """
    if (key := name.strip().lower()) in REFUSED:
        raise UsageError(f"policy `{key}` is not offered: {REFUSED[key]}")
    return known_name(name, table, kind)


Base = type[Score] | type[Read]


def policy_class(name: str) -> Any:
    """Return the class behind a name of the table."""
    return _class_at((BASES | MODIFIERS)[name])


def _class_at(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(f"kvtool.policies.{module}"), attribute)


def describe() -> list[Entry]:
    """List every policy and modifier, in the order of the table."""
    entries = []
    bases = {name: _spellings(policy_class(name)) for name in BASES}
    entries += [describe_base(name, policy_class(name)) for name in BASES]
    for name in MODIFIERS:
        cls, budget = policy_class(name), "that of its base"
        if name in ALLOCATORS:
            budget = f"the mean over {'heads' if issubclass(cls, HeadSplit) else 'layers'}"
        about = _summary(cls), defaults(cls), cls.paper, budget
        carriers = (_carrier(base, spellings, cls()) for base, spellings in bases.items())
        taken = tuple(spelled for spelled in carriers if spelled is not None)
        entries.append(Entry(name, "modifier", *about, taken))
    return entries


def describe_base(name: str, base: Base) -> Entry:
    """Describe one base, which may be from outside."""
    paper = getattr(base, "paper", "-")
    return Entry(name, "base", _summary(base), defaults(base), paper, _budget_kind(base))


def modifiers_of(base: Base) -> dict[str, str]:
    """Return the modifiers that go on a base, each with the spelling under which it takes them."""
    spellings = _spellings(base)
    own = part_name(spellings[0])
    found = {name: _carrier(own, spellings, policy_class(name)()) for name in MODIFIERS}
    return {name: spelled for name, spelled in found.items() if spelled is not None}


def _summary(cls: type) -> str:
    """Return the first line of a class's docstring, and nothing of one that dataclasses make."""
    text = (cls.__doc__ or "").strip()
    made = text.startswith(f"{cls.__name__}(")
    return text.splitlines()[0] if text and not made else "(no docstring)"


def _spellings(base: Base) -> list[Score | Read]:
    """Return a base with its defaults, then with each of its choices."""
    return [base(**settings) for settings in ({}, *_choices(base))]


def _carrier(name: str, spellings: list[Score | Read], modifier: Part) -> str | None:
    """Spell the first of a base's settings under which it takes a modifier, if any does."""
    for carrier in spellings:
        try:
            compose(carrier, [modifier])
        except UsageError:
            continue
        return name + spell_settings(carrier)
    return None


def _choices(base: type) -> Iterator[dict[str, Any]]:
    """Yield each value that one of a base's choices and switches may have."""
    hints = field_types(base)
    for each in fields(base):
        if get_origin(hints[each.name]) is Literal:
            yield from ({each.name: value} for value in get_args(hints[each.name]))
        if hints[each.name] is bool:
            yield {each.name: not each.default}


def _budget_kind(base: Base) -> str:
    if issubclass(base, Read):
        return _READ
    return _READ_AFTER_CUT if Policy(base()).two_stages else _BUDGET_KINDS[base.when]


_ARGUMENT = re.compile(r"    (\w+): (.*)")


@dataclass(frozen=True)
class Setting:
    """A parameter.

    Attributes:
        default: a computed one is shown as what it is computed from.
        values: that it may have; empty: any of its type.
    """

    name: str
    default: Any
    values: tuple[Any, ...]
    meaning: str


@dataclass(frozen=True)
class About:
    """A policy or modifier in full.

    Attributes:
        takes: modifiers that go on a base, with the spelling of the base where a setting of it is
            needed for them.
        text: how it works and where it differs from its paper, as the head of its file says it.
    """

    entry: Entry
    settings: tuple[Setting, ...]
    takes: dict[str, str]
    text: str


def about(name: str) -> About:
    """Find a policy or modifier by its name, with or without a `+` before it, in any case.

    A score from outside is imported by its module and class.

    Raises:
        UsageError: there is none of this name.
    """
    if is_outside(name):  # its settings and modifiers, if any, are left out
        cls = type(build_outside(*read_part(split_outside(name, "+")[0]), imports=True))
        entry = describe_base(f"{cls.__module__}:{cls.__qualname__}", cls)
    else:
        key = offered(name.strip().removeprefix("+"), BASES | MODIFIERS, "policy or modifier")
        cls = policy_class(key)
        entry = next(each for each in describe() if each.name == key)
    takes = modifiers_of(cls) if entry.kind == "base" else {}
    text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    return About(entry, _settings(cls), takes, text)


def _settings(cls: type) -> tuple[Setting, ...]:
    shown, meanings, hints = defaults(cls), _meanings(cls), field_types(cls)
    return tuple(
        Setting(each.name, shown[each.name], _values(hints[each.name]), meanings.get(each.name, ""))
        for each in fields(cls)
    )


def _meanings(cls: type) -> dict[str, str]:
    """Read what the docstrings of a class and of its bases say of its arguments."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        name = ""
        text = inspect.cleandoc(base.__doc__ or "")
        for line in text.partition("Args:\n")[2].splitlines():
            begins = _ARGUMENT.fullmatch(line)
            if begins:
                name = begins[1]
                found[name] = begins[2]
            elif name:
                found[name] += f" {line.strip()}"
    return {name: text.strip() for name, text in found.items()}


def _values(kind: Any) -> tuple[Any, ...]:
    if kind is bool:
        return (True, False)
    return get_args(kind) if get_origin(kind) is Literal else ()
