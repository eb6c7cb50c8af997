"""Every document and every part of one can be dumped, copied, pickled and described."""

import copy
import importlib
import json
import pickle
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

import kvtool.documents
from kvtool.documents.document import (
    Document,
    RecipeSection,
    Section,
    ShownDocument,
    SparseSection,
)
from kvtool.documents.generation import (
    CompileSection,
    CompressionDocument,
    CompressionTiming,
    ExportDocument,
    Fidelity,
    PlanSection,
    StagesSection,
    TurnSection,
)
from kvtool.documents.memory import CacheMemory, DeviceMemory, RunMemory
from kvtool.documents.plan import Device, Peaks, PlanDocument, Way, WayLoss
from kvtool.documents.profile import ProfileDocument
from kvtool.documents.prompts import AnswerLine, PromptEntry
from kvtool.documents.recipe import PrefillMapping, Recipe
from kvtool.documents.results import (
    Average,
    CurveEntry,
    GateResult,
    ResultsDocument,
    SampleRecord,
    SamplesDocument,
)
from kvtool.documents.source import read_file
from kvtool.documents.verdict import Bounded, Guarantee
from kvtool.evaluation.claims import judge_claim
from kvtool.evaluation.verdict import differences, make_verdict
from tests.documents.test_generation_document import CACHE, document
from tests.old_files.make import DATA
from tests.planning.documents import shape

ROOT = Path(__file__).parents[2]
TIMING = {"prefill_s": 0.5, "decode_s": 0.1, "decode_tokens_per_s": None}
STAGES = StagesSection(
    split_factor=None, token_budget=32, stage1_tokens=[9], page_size=2, head_dims=4, top_k=16
)
TURN = TurnSection(
    user="a",
    prompt_tokens=3,
    new_tokens=1,
    text="b",
    token_ids=[4],
    cache=CACHE,
    timing=TIMING,
    fidelity=None,
)
PLANNED = PlanSection(prompt_tokens=9, storage=None, held=4, tokens=[3, 5], rocketkv=STAGES)
PROFILE = {  # what a profile of the defaults lacks
    "kind": "profile",
    "model": shape().model_dump(),
    "metrics": {
        "jaccard": {"rates": [0.5], "aas": [[1.0]] * 4},
        "output_error": {"policy": "h2o", "budgets": [8], "errors": [[0.5]] * 4},
        "answer_loss": {
            "policy": "h2o",
            "budgets": [8],
            "losses": [[0.5]] * 4,
            "standard_errors": [[0.0]] * 4,
            "by_sample": [[[0.5]] * 4] * 2,
            "heads": {
                "losses": [[[0.5], [0.25]], None, [[0.5], [0.25]], [[0.5], [0.25]]],
                "standard_errors": [[[0.0], [0.0]], None, [[0.0], [0.0]], [[0.0], [0.0]]],
                "by_sample": [[[[0.5], [0.25]], None, [[0.5], [0.25]], [[0.5], [0.25]]]] * 2,
            },
        },
        "memory": {
            "dtype": "float32",
            "layer_bytes_per_token": [256] * 4,
            "layer_window": [None] * 4,
            "contexts": [64],
            "batches": [1],
            "bytes": [[65536]],
            "memory": [2**20],
            "largest_context": [[None]],
            "largest_batch": [[32]],
        },
    },
    "curves": {
        "recompute_frequency": {
            "queries": "decode",
            "grid": [
                {"theta1": 0.5, "theta2": 0.7, "recompute": 0.1, "calibrate": 0.2, "idle": 0.8}
            ],
        },
        "robustness": {"steps": [1], "values": [[0.5], None, [0.5], [0.5]]},
    },
}
RECIPE = {
    "kind": "recipe",
    "policy": ["h2o", {"name": "tova", "scope": 1}],
    "budget": {"ratio": ["20%"]},
    "generation": {"stop": ["x"]},
    "eval": {"tasks": [{"task": "niah"}, {"task": "ppl", "samples": 2}]},
    "gates": [{"task": "niah", "min": 0.5}],
    "output": {"plots": True},
    "claim": {"says": "h2o is better", "pairs": [{"variant": "h2o", "than": "tova"}]},
}
NEEDS = {"prompt_tokens": 5, "new_tokens": 1, "tokens": [5], "kv_bytes": 9, "state_bytes": 1}


def examples() -> Iterator[BaseModel]:
    """Documents of every kind, with and without what may be left out."""
    for cls in (ProfileDocument, PlanDocument):
        yield read_file(DATA / f"{cls.model_fields['kind'].default}.yaml", option="x").validate(cls)
    yield PlanDocument.model_validate(
        data_of(DATA / "plan.yaml") | {"totals": None, "rocketkv": None, "policy": "h2o"}
    )
    planned = data_of(DATA / "plan.yaml")
    heads = [[tokens - 1, tokens + 1] for tokens in planned["layers"]["tokens"]]
    layers = planned["layers"] | {"heads": heads, "min_tokens": 1}
    yield PlanDocument.model_validate(planned | {"layers": layers})
    loss = {"equal": 1.5, "planned": 0.5, "standard_error": 0.1}
    yield PlanDocument.model_validate(data_of(DATA / "plan.yaml") | {"predicted_loss": loss})
    for reads, known in ((None, 0.5), (4, None)):
        yield Way(
            policy="quest",
            kind="reading",
            tokens=9,
            share=1.0,
            key_bits=16,
            value_bits=16,
            reads=reads,
            bytes=9,
            share_of_full=1.0,
            traffic=4,
            peak=Peaks(block=9, full=10),
            prefill="block",
            loss=WayLoss(known=known),
            fits=True,
            command="kvtool generate",
        )
    yield Device(memory=9, weights=5)
    yield ProfileDocument.model_validate(PROFILE)
    yield ResultsDocument.model_validate_json((DATA / "run/results.json").read_text())
    claims = sorted((ROOT / "recipes/claims/results").glob("*.json"))
    claimed = ResultsDocument.model_validate_json(claims[0].read_text())
    parts = (claimed.results, claimed.variants)
    derived = {
        "claim_verdict": judge_claim(claimed.claim, claimed),
        "differences": differences(*parts),
        "verdict": make_verdict(*parts, within=5),
    }
    yield claimed.model_copy(update=derived)
    yield SamplesDocument.model_validate_json((DATA / "run/samples.json").read_text())
    line = next((DATA / "run/samples").rglob("*.jsonl")).read_text().splitlines()[0]
    yield SampleRecord.model_validate_json(line)
    yield Average(variant="full", suite="ruler", tasks=["ruler/vt"], value=0.5, delta=None)
    yield GateResult(gate="min", variant="h2o", task="niah", value=None, limit=0.5, passed=False)
    yield CurveEntry(name="a", x=[1.0], y=[2.0], x_label="tokens", y_label="loss")
    for why in (None, "the run is not complete"):
        cell = Bounded(variant="h2o@8", task="niah", why=why)
        yield Guarantee(loss=5, level=0.05, chain=[cell])
    yield PrefillMapping(mode="block")
    yield Recipe()
    yield Recipe.model_validate(RECIPE)
    yield document()
    compiled = CompileSection(
        graphs=1, eager_steps=2, compiled_steps=3, compile_s=0.5, cuda_graphs=False
    )
    fidelity = Fidelity(agreement=1.0, kl=0.0, first_divergence=None)
    yield document(plan=PLANNED, fidelity=fidelity, compiled=compiled, turns=[TURN])
    yield CompressionDocument(
        model="reference",
        policy="h2o",
        budget=5,
        prompt_tokens=9,
        saved="a.st",
        cache=CACHE,
        plan=PLANNED.model_copy(update={"rocketkv": None}),
        timing=CompressionTiming(prefill_s=0.1),
    )
    yield ExportDocument(
        model="reference",
        policy="h2o",
        saved="a.st",
        slots=5,
        tokens_seen=9,
        dtype="float32",
        bytes=9,
        virtual_ids=[1, 2],
    )
    for reads in (None, [3]):
        yield RunMemory(
            device="cpu",
            free_bytes=9,
            weights_bytes=None,
            full_bytes=9,
            **{"peak_bytes": None, "fits": None, "reads": reads, **NEEDS},
        )
    yield DeviceMemory(device="cpu", free_bytes=None, weights_bytes=5)
    yield CacheMemory(**NEEDS, full_bytes=9, peak_bytes=None, fits=None)
    yield PromptEntry(prompt="x")
    yield AnswerLine(index=0, id=None, text="x", token_ids=[1], prompt_tokens=1, new_tokens=1)


def data_of(path: Path) -> dict:
    return read_file(path, option="x").data


def parts(value: object) -> Iterator[BaseModel]:
    """A document and all of its parts."""
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from parts(getattr(value, name))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from parts(each)
    elif isinstance(value, dict):
        yield from parts(list(value.values()))


def one_of_each() -> list[BaseModel]:
    """Parts that differ in their class, or in which of their values are None."""
    found = {}
    for whole in examples():
        for part in parts(whole):
            empty = tuple(getattr(part, name) is None for name in type(part).model_fields)
            found.setdefault((type(part), empty), part)
    return list(found.values())


PARTS = one_of_each()
NONE_OF = {Section, Document, ShownDocument, RecipeSection, SparseSection}  # bases, never made


def every_class() -> set[type[BaseModel]]:
    for module in pkgutil.walk_packages(kvtool.documents.__path__, "kvtool.documents."):
        importlib.import_module(module.name)

    def below(cls: type) -> Iterator[type]:
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    return {cls for cls in below(BaseModel) if cls.__module__.startswith("kvtool.documents")}


def test_every_class_has_an_example():
    public = {cls for cls in every_class() if not cls.__name__.startswith("_")}
    assert public - NONE_OF - {type(part) for part in PARTS} == set()


def test_every_part_is_dumped_whatever_is_left_out():
    for part in PARTS:
        names = list(type(part).model_fields)
        flags = [{}, {"by_alias": True}, {"round_trip": True}]
        flags += [{f"exclude_{what}": True} for what in ("none", "unset", "defaults")]
        flags += [{"exclude_none": True, "exclude_unset": True, "exclude_defaults": True}]
        for flag in flags:
            data = part.model_dump(**flag)
            assert set(data) <= {*names, *(part.model_extra or ())}, (type(part), flag)
            assert json.loads(part.model_dump_json(**flag)) == part.model_dump(mode="json", **flag)
            if flag.get("exclude_none"):
                assert None not in data.values(), type(part)
        left_out = {name for name in names if type(part).model_fields[name].exclude}
        for name in names:
            assert name not in part.model_dump(exclude={name})
            given = part.model_dump(include={name})
            assert set(given) == {name} - left_out or getattr(part, name) is None, type(part)


def test_every_part_is_copied_and_pickled():
    for part in PARTS:
        for other in (copy.copy(part), copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            assert type(other) is type(part)
            assert other == part
            assert other.model_dump_json() == part.model_dump_json()
        left_out = {name for name, field in type(part).model_fields.items() if field.exclude}
        kept = {name: getattr(part, name) for name in left_out}
        assert type(part).model_validate(part.model_dump(exclude_unset=True) | kept) == part


def test_every_class_has_a_schema():
    for cls in every_class():
        for mode in ("validation", "serialization"):
            assert json.dumps(cls.model_json_schema(mode=mode)), cls


def test_a_plan_without_what_is_null_reads_back():
    plan = read_file(DATA / "plan.yaml", option="x").validate(PlanDocument)
    for flags in ({"exclude_none": True}, {"exclude_unset": True}, {"exclude_defaults": True}):
        assert PlanDocument.model_validate_json(plan.model_dump_json(**flags)) == plan
