"""Every policy with its model on another device than the CPU's: nothing is left behind on it."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.utils._pytree import tree_map

import kvtool
from kvtool.cache.steps import attend
from kvtool.cache.whole.batching import append_entries, keep_entries
from kvtool.generation import decode_step, prefill
from kvtool.generation.shared_prefill import prefill_shared
from kvtool.kernels import trust
from kvtool.kernels.checks import CODES, Family
from kvtool.policies.codec.codec import Codec
from kvtool.policies.codec.int8 import Int8
from kvtool.policies.policy import compose, reads_whole
from kvtool.policies.scores.h2o import H2O
from recipes.benchmarks.gpu.right import (
    CODED,
    LOGITS,
    NEW,
    PROMPT,
    SHIFT,
    Run,
    build,
    check_same,
    padded_turns,
    tokens,
)
from tests.cache import split_model
from tests.models_for_tests import instructed, peaky_model, random_ids
from tests.pretend_device import DEVICE, pretended, put
from tests.tiers import first

READING = ["sparq", "quest", "loki", "hsa", "exact-topk", "rocketkv-mt"]


def policies():
    """Those that look at weights refuse this class of tensors."""
    look = ("critical", "plus=true", "optimal")
    return [text for text in split_model.few_policies() if not any(each in text for each in look)]


@functools.cache
def plain():
    return kvtool.attach(peaky_model("llama", head_dim=32))


@functools.cache
def elsewhere():
    return kvtool.attach(put(peaky_model("llama", head_dim=32)))


@functools.cache
def on_both():
    """A model whose second layer runs on the CPU; what it is given is moved, as accelerate does."""
    model = peaky_model("llama", head_dim=32)
    inner = model.model
    for part in (inner.embed_tokens, inner.rotary_emb, inner.layers[0], inner.norm, model.lm_head):
        put(part)
    for part, there in ((inner.layers[0], True), (inner.layers[1], False), (inner.norm, True)):
        part.register_forward_pre_hook(functools.partial(bring, there=there), with_kwargs=True)
    inner.layers[1]._hf_hook = SimpleNamespace(execution_device="cpu")
    model.hf_device_map = {"model.layers.0": str(DEVICE), "model.layers.1": "cpu"}
    return kvtool.attach(model)


def bring(module, args, kwargs, *, there: bool):
    def move(thing):
        if isinstance(thing, torch.Tensor):
            return thing.to(DEVICE) if there else thing.cpu()
        return thing

    return tree_map(move, args), {name: tree_map(move, thing) for name, thing in kwargs.items()}


def run(model, policy: str, mode: str, scenario) -> Run:
    with pretended():
        return scenario(model, policy, mode)


def check(model, policy: str, mode: str, scenario) -> None:
    expected = scenario(plain(), policy, mode)
    coded = kvtool.parse_policy(policy).codec is not None
    allowed = CODED if coded else LOGITS
    check_same(run(model, policy, mode, scenario), expected, policy, allowed)


@torch.no_grad()
def one_token(model, policy, mode: str) -> Run:
    """Two rows, one of them padded, and a token of each."""
    cache, done = build(model, policy, mode), Run()
    first, answer = (each.to(model.device) for each in tokens(2, PROMPT, 1))
    mask = torch.ones_like(first)
    mask[1, :17] = 0
    done.note(cache, prefill(model, cache, first, mask))
    done.note(cache, decode_step(model, cache, answer[:, 0].contiguous()))
    return done


@torch.no_grad()
def there_and_back(model, policy: str, mode: str) -> Run:
    """Two rows, one of them padded, decoded, through a file, and a second turn."""
    cache, done = build(model, policy, mode), Run()
    first, answer, more, second = (each.to(model.device) for each in tokens(2, PROMPT, 2, 2, SHIFT))
    mask = torch.ones_like(first)
    mask[1, :17] = 0
    done.note(cache, prefill(model, cache, first, mask))
    for column in answer.T:
        done.note(cache, decode_step(model, cache, column.contiguous()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        kvtool.save_cache(cache, path, model=model)
        cache = instructed(kvtool.load_cache(path, model))
    done.note(cache, prefill(model, cache, second))
    for column in more.T:
        done.note(cache, decode_step(model, cache, column.contiguous()))
    return done


def by_mode():
    """Every policy once, in one of two modes where it takes blocks; few by default."""
    for i, policy in enumerate(policies()):
        whole = i % 2 == 0 or reads_whole(kvtool.parse_policy(policy), planned=False)
        mode = "full" if whole else "block:16"
        by_default = policy in ("h2o+calidrop", "rocketkv")
        marks = [] if by_default else [pytest.mark.exhaustive]
        yield pytest.param(policy, mode, id=f"{policy} {mode}", marks=marks)


@pytest.mark.parametrize(("policy", "mode"), list(by_mode()))
def test_a_padded_batch_a_file_and_a_turn_stay_on_the_device(policy, mode):
    check(elsewhere(), policy, mode, there_and_back)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["h2o+calidrop", "d2o", "sirllm", "rocketkv", "tova+ada"])
def test_layers_on_two_devices_keep_to_their_own(policy):
    check(on_both(), policy, "full", padded_turns)


@torch.no_grad()
def static_steps(model, policy: str, mode: str, padding: int = 0) -> Run:
    """A row, or two, decoded in steps that change nothing but the contents of tensors."""
    cache, done, rows = build(model, policy, mode), Run(), 2 if padding else 1
    prompt = random_ids(61, batch=rows).to(model.device)
    mask = torch.ones_like(prompt)
    mask[-1, :padding] = 0
    done.note(cache, prefill(model, cache, prompt, mask if padding else None))

    def forward(**inputs):
        with cache.static_step():
            return model(**inputs)

    static = 0
    for token in range(5, 11):
        fixed = cache.fix_shapes(8)
        static += fixed
        ids = torch.full((rows,), token, device=model.device)
        done.note(cache, decode_step(model, cache, ids, forward if fixed else None))
    assert static >= 4
    return done


@pytest.mark.parametrize("padding", [0, 17])
@pytest.mark.parametrize("policy", first(1, ["rocketkv", "h2o+caote", "adakv(window=4)", *READING]))
def test_static_steps_run_on_the_device_alone(policy, padding):
    check(elsewhere(), policy, "full", functools.partial(static_steps, padding=padding))


@torch.no_grad()
def read_together(model, policy: str, mode: str) -> Run:
    """A prompt that one run reads for two caches; a block behind it that is taken back."""
    caches, done = [build(model, each, mode) for each in (policy, "full")], Run()
    first, block, answer = tokens(1, PROMPT, NEW, NEW)
    logits = prefill_shared(model, caches, first.to(model.device), new_tokens=NEW)
    for cache in caches:
        done.note(cache, logits)
        with cache.rollback():
            done.note(cache, prefill(model, cache, block.to(model.device)))
        for column in answer.to(model.device).T:
            done.note(cache, decode_step(model, cache, column.contiguous()))
    return done


@torch.no_grad()
def joined_in_flight(model, policy: str, mode: str) -> Run:
    """Two prompts, read alone, of which the second joins the first's batch and outlives it."""
    caches, done = [build(model, policy, mode) for _ in range(2)], Run()
    first, answer = tokens(2, PROMPT, 2 * NEW)
    for i, cache in enumerate(caches):
        done.note(cache, prefill(model, cache, first[i : i + 1, i:].to(model.device)))
    batch, going = caches[0], [0, 1]
    append_entries(batch, caches[1:], 2 * NEW)
    for step, column in enumerate(answer.to(model.device).T):
        if step == NEW:
            going = [1]
            keep_entries(batch, torch.tensor(going), NEW)
        done.note(batch, decode_step(model, batch, column[going].contiguous()))
    return done


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("scenario", "policy"),
    [
        (joined_in_flight, "tova+ada"),
        (joined_in_flight, "d2o"),
        (joined_in_flight, "snapkv(window=4)+int8"),
        (read_together, "h2o+calidrop"),
        (read_together, "quest"),
        (read_together, "adakv(window=4)"),
    ],
)
def test_shared_prompts_and_batches_in_flight_run_on_the_device_alone(scenario, policy):
    check(elsewhere(), policy, "full", scenario)


@dataclass(frozen=True)
class Halves(Codec):
    """Even whole numbers from -126 to 126, which no kernel reads."""

    name: ClassVar = "halves"
    paper: ClassVar = "-"

    def encode(self, numbers):
        codes, scales = Int8().encode(numbers)
        return codes // 2, scales

    def decode(self, codes, scales):
        return Int8().decode(codes * 2, scales)


@dataclass(frozen=True)
class Coarse(Int8):
    """The same, as a kind of int8 whose codes mean something else."""

    name: ClassVar = "coarse"
    encode, decode = Halves.encode, Halves.decode


@dataclass(frozen=True)
class Rounded(Int8):
    """Even whole numbers, in codes that mean the same as int8's."""

    name: ClassVar = "rounded"

    def encode(self, numbers):
        codes, scales = Halves().encode(numbers)
        return codes * 2, scales


@pytest.mark.parametrize(
    ("codec", "forms"),
    [
        (Halves, None),
        (Coarse, None),
        (Rounded, ("int8", "int8")),
    ],
)
def test_kernels_are_asked_for_codes_that_they_know(monkeypatch, codec, forms):
    """They run on CUDA; here the device replaces it, and plain torch computes in their place."""
    asked: set[Family] = set()
    monkeypatch.setattr(attend, "TRITON_DEVICES", frozenset({DEVICE.type}))
    monkeypatch.setattr(trust, "usable", lambda family, *_, **__: asked.add(family))
    check(elsewhere(), compose(H2O(), [codec()]), "full", one_token)
    assert asked & set(CODES.values()) == ({CODES[forms]} if forms else set())
