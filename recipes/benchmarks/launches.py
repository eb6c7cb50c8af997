"""Launches a layer of a compiled decode step, counted in the code that torch writes for an H200.

    python -m recipes.benchmarks.launches  # 2 min

No GPU is needed (see `pretended`). A layer is what a step of three layers launches more than one of
two. A kernel that several layers share counts for none. Flash attention counts twice, since it
splits the keys and joins the parts. kvtool's operators count as the kernels that they launch, as if
these had been right on the device.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, StaticCache

import kvtool
from kvtool.cache.whole.cache import KVCache
from kvtool.generation import decode_step, prefill
from kvtool.generation.compiled import ONE_ROW_OPTIONS
from kvtool.kernels import trust
from recipes.benchmarks.decoding import ATTENTIONS
from recipes.benchmarks.models import SHAPES
from recipes.benchmarks.pretended import CUDA, OnDevice, pretend_device, written_code

POLICIES = ("static", "full", "h2o", "h2o+caote", "snapkv", "quest")
BOUNDS = {"full": 13, "snapkv": 13, "h2o": 14, "h2o+caote": 15, "quest": 18}
UNMASKED = ATTENTIONS[1]
STEPS = 40  # for which slots are taken
KINDS = ("triton", "product", "flash", "aten", "kvtool")
_CALLS = re.compile(
    r"(?:(extern_kernels|aten|torch\.ops\.\w+)\.(\w+)[.\w]*\(|(\w+)\.(run|copy_)\()"
)
_OWN = {"page_scores": 1, "row_product": 1}  # kernels of an operator, of others 2
_BY_VALUES = "by_values=True"  # so that a third kernel of `decode_token` chooses
_TWICE = {"_scaled_dot_product_flash_attention", "_flash_attention_forward"}


@dataclass(frozen=True)
class Launch:
    """What the host launches once.

    Attributes:
        kind: one of `KINDS`.
        name: of the operator, or the names in the model's and kvtool's source of what a kernel
            computes; of several in one, those of the first.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class LayerLaunches:
    """The launches of a layer.

    Attributes:
        counts: by kind.
        launches: their names with how many there are, in the order in which they come first.
    """

    policy: str
    budget: int
    rows: int
    total: int
    counts: dict[str, int]
    launches: dict[str, int]


def find_launches(code: str) -> list[Launch]:
    """List what the code of a step launches, in order."""
    found: list[Launch] = []
    source = ""
    for line in code[code.index("def call(") :].splitlines():
        if "Source Nodes: [" in line:
            nodes = line.partition("Source Nodes: [")[2].partition("]")[0].split(", ")
            source = " ".join(dict.fromkeys(re.sub(r"_\d+$", "", node) for node in nodes))
        if not line.lstrip().startswith(("#", "assert_")):
            for call in _CALLS.findall(line):
                found += _launches(source, *call)
                if call[1] == "decode_token" and _BY_VALUES in line:
                    found.append(found[-1])
    return found


def _launches(source: str, space: str, operator: str, kernel: str, method: str) -> list[Launch]:
    if space == "extern_kernels":
        return [Launch("product", f"{operator}: {source}")]
    if space.endswith("kvtool"):
        return [Launch("kvtool", operator)] * _OWN.get(operator, 2)
    if space:
        twice = operator in _TWICE
        return [Launch("flash" if twice else "aten", operator)] * (1 + twice)
    if method == "copy_":
        return [Launch("aten", f"copy_ {kernel}")]
    if kernel.startswith("triton_"):
        return [Launch("triton", source)]
    return [Launch("kvtool", re.sub(r"_\d+$", "", kernel))]


def count_layer(
    policy: str,
    budget: int = 512,
    *,
    rows: int = 1,
    layers: int = 3,
    options: dict[str, Any] | None = None,
    codes: Path | None = None,
) -> LayerLaunches:
    """Count the launches of a layer in a step that has reached its budget.

    Args:
        policy: of kvtool; `static`: transformers' StaticCache, without a mask.
        layers: of the larger step; the other one has a layer less.
        options: for torch.compile.
        codes: a folder for the code.
    """
    found = []
    for count in (layers, layers - 1):
        code = step_code(
            policy, budget, rows, count, ONE_ROW_OPTIONS if options is None else options
        )
        if codes is not None:
            (codes / f"{policy}-{count}.py").write_text(code)
        found.append(Counter(find_launches(code)))
    more, less = found
    more.subtract(less)
    counts = {kind: sum(n for each, n in more.items() if each.kind == kind) for kind in KINDS}
    names = {f"{each.kind}: {each.name}": n for each, n in more.items() if n}
    return LayerLaunches(policy, budget, rows, more.total(), counts, names)


def step_code(policy: str, budget: int, rows: int, layers: int, options: dict[str, Any]) -> str:
    """Write the code of a decode step whose shapes are fixed."""
    torch._dynamo.reset()
    mode, inside = FakeTensorMode(allow_non_fake_inputs=True), nullcontext()
    with mode, CUDA:
        model = _build(layers, *SHAPES["8b"][:3])
    cache: Any
    if policy == "static":
        model.set_attn_implementation(UNMASKED)
        with mode:
            cache = _static_cache(model, budget, rows)
    else:
        kvtool.attach(model)
        held = _fill(policy, budget, rows, layers)
        with OnDevice(mode):
            cache = copy.deepcopy(held)
        for layer in cache.slot_layers:
            layer.parts.allow_kernel(not (layer.chunked or layer.policy.observes_rows))
        inside = cache.static_step()
    forward = torch.compile(model.forward, fullgraph=True, dynamic=False, options=options)

    def step() -> None:
        with mode, torch.no_grad(), inside:
            token, place = torch.full((2, rows, 1), budget - 1, device=CUDA)
            forward(input_ids=token, position_ids=place, past_key_values=cache, use_cache=True)

    return written_code(step)


def _build(layers: int, vocabulary: int, hidden: int, between: int) -> PreTrainedModel:
    *_, heads, kv_heads, head_dim = SHAPES["8b"]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=131072,
    )
    how = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    return AutoModelForCausalLM.from_config(config, **how).eval()


def _static_cache(model: PreTrainedModel, length: int, rows: int) -> StaticCache:
    config = model.config
    cache = StaticCache(config=config, max_cache_len=length)
    sizes = config.num_key_value_heads, config.head_dim, model.dtype, CUDA
    cache.early_initialization(rows, *sizes)
    return cache


def _fill(policy: str, budget: int, rows: int, layers: int) -> KVCache:
    """Fill a cache on the CPU, by a model with the same heads that is small otherwise."""
    model = kvtool.attach(_build(layers, 1024, 64, 64))
    appends = policy == "full"
    cache = kvtool.build_cache(model, policy, None if appends else budget)
    ids = torch.randint(0, 1024, (rows, budget if appends else 2 * budget))
    prefill(model, cache, ids, new_tokens=STEPS)
    while not cache.fix_shapes(STEPS):
        decode_step(model, cache, ids[:, 0])
    return cache


def table(lines: Sequence[LayerLaunches]) -> str:
    """A Markdown table, with the launches of each layer below it."""
    head = ["policy", "launches", *KINDS, "bound"]
    rows = [
        [line.policy, line.total, *line.counts.values(), BOUNDS.get(line.policy, "-")]
        for line in lines
    ]
    text = ["| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows]]
    for line in lines:
        text += [
            "",
            f"{line.policy}:",
            *(f"  {n:2} {each:.110}" for each, n in line.launches.items()),
        ]
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.launches")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--options", type=json.loads, help="of torch.compile, as JSON")
    parser.add_argument("--code", type=Path, help="an existing folder to write the code to")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    pretend_device()
    vars(trust)["trusted"] = lambda kind: True
    how = {"rows": args.rows, "layers": args.layers, "options": args.options, "codes": args.code}
    with TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        lines = [count_layer(policy, args.budget, **how) for policy in args.policies]
    print(json.dumps([asdict(line) for line in lines], indent=1) if args.json else table(lines))


if __name__ == "__main__":
    main()
