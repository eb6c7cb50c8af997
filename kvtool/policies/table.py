"""Every policy by name. A new one is a line here, a file of its own and a test."""

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Literal

from kvtool.policies.allocate import table as allocators
from kvtool.policies.allocate.room import Allocator, HeadSplit
from kvtool.policies.parts import Evicted, Rescore, Score
from kvtool.policies.read.reader import Read

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
    "sirllm": "scores.sirllm:SirLLM",
    "pyramidinfer": "scores.pyramidinfer:PyramidInfer",
    "exact-topk": "read.exact_topk:ExactTopK",
    "quest": "read.quest:Quest",
    "sparq": "read.sparq:SparQ",
    "loki": "read.loki:Loki",
    "hsa": "read.hsa:HSA",
    "rocketkv": "scores.rocketkv:RocketKV",
    "rocketkv-mt": "scores.rocketkv_mt:RocketKVMT",
}
MODIFIERS: dict[str, str] = {
    "caote": "rescore.caote:CAOTE",
    "fastcaote": "rescore.caote:FastCAOTE",
    "d2o-merge": "evicted.d2o_merge:D2OMerge",
    "cam": "evicted.cam:CaM",
    "calidrop": "evicted.calidrop:CaliDrop",
}
ALLOCATORS: dict[str, str] = {  # modifiers that split the budget; `d2o` itself is a base
    "d2o-alloc" if name == "d2o" else name: f"allocate.{place}"
    for name, place in allocators.ALLOCATORS.items()
}
MODIFIERS |= ALLOCATORS
REFUSED: dict[str, str] = {
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
    """One line of the policy table."""

    name: str
    kind: Literal["base", "modifier"]
    summary: str
    parameters: dict[str, Any]
    paper: str
    budget_kind: str


Part = type[Score] | type[Read] | type[Rescore] | type[Allocator] | type[Evicted]


def policy_class(name: str) -> Part:
    """The class behind a name of the table."""
    module, _, attribute = (BASES | MODIFIERS)[name].partition(":")
    return getattr(import_module(f"kvtool.policies.{module}"), attribute)


def describe() -> list[Entry]:
    """Every policy and modifier, in the order of the table."""
    entries = []
    for name in BASES | MODIFIERS:
        cls = policy_class(name)
        summary = (cls.__doc__ or "").strip().splitlines()[0]
        parameters = {field.name: field.default for field in fields(cls)}
        kind = "base" if name in BASES else "modifier"
        budget = _budget_kind(cls) if kind == "base" else "that of its base"
        if name in ALLOCATORS:
            budget = f"the mean over {'heads' if issubclass(cls, HeadSplit) else 'layers'}"
        entries.append(Entry(name, kind, summary, parameters, cls.paper, budget))
    return entries


def _budget_kind(base: type[Score] | type[Read]) -> str:
    if issubclass(base, Read):
        return _READ
    return _READ_AFTER_CUT if base.reads else _BUDGET_KINDS[base.when]
