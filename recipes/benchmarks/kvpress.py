"""Which tokens do kvtool and kvpress keep on the same weights?

    python -m recipes.benchmarks.kvpress --python /path/to/venv/bin/python  # 2 min
    python -m recipes.benchmarks.kvpress --python .. --model FOLDER

kvpress 0.5.5 needs transformers below 5.3, kvtool newer ones. So `--python` names the Python of an
environment of its own: `pip install 'transformers<5.3' kvpress torch`. Where that cannot import
kvpress the comparison is skipped, and says why.

Both sides read the same weights in float32 and the same prompt, at once, and cut it to the same
budget. Compared are the kept positions of every layer and head.

- Models are random Llamas and Qwen3s. The weights of their norms are random, too, so that keys
  differ in length. Weights are so small that no expected attention rounds to 0.
- Prompts say no token twice, whose keys would be of one length.
- `lagkv` by ranks is compared at budgets at which every partition keeps equally many: among equal
  ranks of several partitions torch's top-k takes any.
- `kvzip` is compared without sinks: kvpress repeats them with the text, kvtool does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import kvtool
from kvtool.cache.features.repetition import Instructions, Repetition
from kvtool.errors import UsageError
from kvtool.generation import prefill
from kvtool.models.load import load_tokenizer
from kvtool.policies.evidence import RepetitionAsked

SIDE = Path(__file__).with_name("kvpress_side.py")
TOKENS, BUDGETS = 300, (150, 75)
WITHOUT = 3  # the exit status of the other side without kvpress
Kept = list[list[list[int]]]  # layers, heads, positions


def press(name: str, **settings: Any) -> list:
    return [f"{name}Press", settings]


@dataclass(frozen=True)
class Case:
    """A policy and the press of the same formula.

    Attributes:
        press: its class, and its settings.
        ranked: tokens of a partition that are ranked; 0: the budgets are `BUDGETS`.
    """

    policy: str
    press: list
    ranked: int = 0

    def budgets(self, tokens: int) -> list[int]:
        """A half and a quarter of the prompt, or near them where partitions keep equally many."""
        halves = [tokens * budget // TOKENS for budget in BUDGETS]
        if not self.ranked:
            return halves
        scored = (tokens - 4) // self.ranked - 1
        always = tokens - scored * self.ranked
        return [always + (budget - always) // scored * scored for budget in halves]


EXPECTED = press("ExpectedAttention", use_vnorm=False)
RAW = press("LagKV", lag_size=16, cross_scoring=True)
CASES = (
    Case("knorm", press("Knorm")),
    Case("lagkv(lag=16)", press("LagKV", lag_size=16), ranked=16),
    Case("lagkv(lag=16,rank=false)", RAW),
    Case("lagkv(lag=16,rank=false)+ada(safeguard=force)", press("AdaKV", press=RAW)),
    Case("keydiff", press("KeyDiff")),
    Case("expected(epsilon=0)", press("ExpectedAttention")),
    Case("expected(values=false)+critical", press("CriticalKV", press=EXPECTED)),
    Case(
        "expected(values=false)+critical+ada(safeguard=force)",
        press("CriticalAdaKV", press=EXPECTED),
    ),
    Case("kvzip(sinks=0)", press("KVzip", n_sink=0)),
    Case("kvzip(sinks=0,plus=true)", press("KVzip", n_sink=0, kvzip_plus_normalization=True)),
)


def random_model(family: str, vocabulary: int, seed: int) -> PreTrainedModel:
    """A small model whose every weight is random, those of norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * drawn if weight.dim() == 1 else 0.15 * drawn)
    return model


def write_model(own: Path, model: PreTrainedModel | None, tokenizer: Any, seed: int) -> None:
    """Save a model, or leave the one that is there, with a prompt that says no token twice.

    The tokenizer comes without a chat template, in which kvpress would put the instruction.
    """
    if model is not None:
        model.save_pretrained(own)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(own)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(len(tokenizer), generator=generator)[:TOKENS].tolist()
    (own / "prompt.json").write_text(json.dumps(ids))


def write_models(folder: Path, given: list[Path], seeds: int) -> None:
    """Save random models, or copies of the given ones by links to their files."""
    for place in given:
        own = folder / place.name
        own.mkdir()
        for file in place.iterdir():
            if file.suffix == ".safetensors" or file.name.endswith("config.json"):
                (own / file.name).symlink_to(file.resolve())
        tokenizer = AutoTokenizer.from_pretrained(place)
        for file in own.glob("tokenizer*"):
            file.unlink()  # a link, over which the tokenizer is written
        write_model(own, None, tokenizer, 0)
    if given:
        return
    tokenizer, _ = load_tokenizer()
    for family in ("llama", "qwen3"):
        for seed in range(seeds):
            model = random_model(family, len(tokenizer), seed)
            write_model(folder / f"{family}-{seed}", model, tokenizer, seed)


@torch.inference_mode()
def kept(model: PreTrainedModel, ids: list[int], policy: str, budget: int) -> Kept:
    """Cut a prompt; KVzip repeats it in the words and with the line break of kvpress."""
    cache = kvtool.build_cache(model, policy, budget)
    part = Repetition.of(cache)
    if part is not None:
        tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
        words = [
            tuple(
                each
                for text in (said, "\n")
                for each in tokenizer.encode(text, add_special_tokens=False)
            )
            for said in (RepetitionAsked().first, RepetitionAsked().later)
        ]
        part.instruct(Instructions(*words))
    prefill(model, cache, torch.tensor([ids]))
    layers = range(model.config.num_hidden_layers)
    return [
        [sorted(p for p in head if p >= 0) for head in cache.kept_positions(layer)[0].tolist()]
        for layer in layers
    ]


def differing(ours: Kept, theirs: Kept) -> int:
    """Count the tokens that ours keeps and theirs does not, in all layers and heads."""
    pairs = zip(ours, theirs, strict=True)
    heads = [pair for layers in pairs for pair in zip(*layers, strict=True)]
    return sum(len(set(own) - set(other)) for own, other in heads)


@dataclass
class Line:
    """What a case has come to.

    Attributes:
        tokens: kept by kvtool in all layers, heads, models and budgets.
        budgets: that were compared.
        differ: of them, not kept by kvpress.
        without: why the case was not compared.
    """

    case: Case
    budgets: list[int]
    tokens: int = 0
    differ: int = 0
    without: str = ""


def known(cases: tuple[Case, ...]) -> Iterator[Line]:
    """Begin a line for each case; one whose policy is not there says so."""
    for case in cases:
        try:
            kvtool.parse_policy(case.policy)
        except UsageError as error:
            yield Line(case, [], without=str(error).partition(";")[0])
        else:
            yield Line(case, case.budgets(TOKENS))


def compare(folder: Path, python: str) -> tuple[str, list[Line]] | str:
    """Return the versions of the other side and the lines; or why there is no other side."""
    lines = list(known(CASES))
    asked = [(line, budget) for line in lines for budget in line.budgets]
    presses = [(line.case.press, budget) for line, budget in asked]
    (folder / "presses.json").write_text(json.dumps(presses))
    program = [python, "-I", str(SIDE), str(folder)]
    side = subprocess.run(program, check=False, capture_output=True, text=True)
    if side.returncode == WITHOUT:
        return side.stdout.strip()
    if side.returncode:
        raise RuntimeError(f"{' '.join(program)} has failed:\n{side.stderr}")
    answer = json.loads((folder / "kept.json").read_text())
    for name, found in answer["kept"].items():
        own = folder / name
        model = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32).eval()
        kvtool.attach(model)
        ids = json.loads((own / "prompt.json").read_text())
        for (line, budget), theirs in zip(asked, found, strict=True):
            ours = kept(model, ids, line.case.policy, budget)
            line.tokens += sum(len(head) for layer in ours for head in layer)
            line.differ += differing(ours, theirs)
    versions = [f"{name} {answer[name]}" for name in ("kvpress", "transformers", "torch")]
    return f"{', '.join(versions)}; {len(answer['kept'])} models, {TOKENS} tokens", lines


def spelled(press: list) -> str:
    """Spell a press as Python does."""
    name, settings = press
    inside = (
        f"{key}={spelled(value) if isinstance(value, list) else value}"
        for key, value in settings.items()
    )
    return f"{name}({', '.join(inside)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="a Python that has kvpress")
    parser.add_argument("--model", type=Path, action="append", default=[], help="saved models")
    parser.add_argument("--seeds", type=int, default=5, help="random models of each family")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with TemporaryDirectory() as scratch:
        write_models(Path(scratch), args.model, args.seeds)
        compared = compare(Path(scratch), args.python)
    if isinstance(compared, str):
        print(f"skipped: {args.python} cannot import kvpress ({compared})")
        print("kvpress 0.5.5 needs transformers below 5.3; name the Python that has it: --python")
        print("nothing was compared")
        return
    versions, lines = compared
    table = Table("policy", "kvpress", "budgets", "tokens kept", "not by kvpress", title=versions)
    for line in lines:
        numbers = [" / ".join(map(str, line.budgets)), f"{line.tokens}", f"{line.differ}"]
        cells = [line.without, "-", "-"] if line.without else numbers
        table.add_row(line.case.policy, spelled(line.case.press), *cells)
    Console(width=150).print(table)
    differ = sum(line.differ for line in lines)
    print(f"{differ} tokens differ" if differ else "the same tokens everywhere")
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
