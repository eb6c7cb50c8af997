"""Measure exported caches in llama.cpp itself, against transformers over the same keys and values.

    KVTOOL_LLAMACPP_WHEELS=FOLDER python -m tests.engines.llamacpp -m smollm2

`tests.engines.llamacpp.engine` says what is in the folder. For each policy and type it prints the
largest difference of a logit over all steps of five answers, and how many answers are equal. The
last lines are the same for the whole text, which is what llama.cpp's own rounding comes to. It ends
with 1 if an answer in f32 differs by more than twice that.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import kvtool as kv
from kvtool.engines.targets import Target
from kvtool.engines.virtual_prompt import export_cache
from kvtool.models.chat import continued_ids
from kvtool.models.load import load
from tests.engines.llamacpp import gguf_files
from tests.engines.llamacpp.engine import Engine
from tests.engines.vllm.test_export import engine_cache

ROOT = Path(__file__).parents[3]
CODES = {"falcon": 7429103, "tiger": 5581290, "heron": 9034417, "otter": 2267851}
NEW = 16
KINDS = (("f32", False), ("f16", False), ("f16", True), ("q8_0", True))


def words(tokenizer, tokens: int) -> str:
    """A page of this repository of about so many tokens, with a code in each quarter."""
    page = (ROOT / "kvtool" / "README.md").read_text()
    parts = tokenizer(page, add_special_tokens=False)["input_ids"][: tokens - 60]
    quarter = len(parts) // len(CODES)
    text = ""
    for i, (name, code) in enumerate(CODES.items()):
        text += tokenizer.decode(parts[i * quarter : (i + 1) * quarter])
        text += f"\nThe secret code for {name}: {code}.\n"
    return text


@torch.no_grad()
def answer(model, tensors, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers behind a question over exported slots, and their logits."""
    cache, slots = engine_cache(model, tensors), len(tensors["virtual_ids"])
    said, rows, given = list[int](), [], torch.tensor([ids])
    for _ in range(NEW):
        place = torch.arange(slots, slots + given.shape[1])[None]
        rows.append(model(given, past_key_values=cache, position_ids=place).logits[0, -1].float())
        said.append(int(rows[-1].argmax()))
        slots, given = slots + given.shape[1], torch.tensor([said[-1:]])
    return said, torch.stack(rows)


def compare(engine, prepare, place: int, asked) -> tuple[float, bool, str]:
    """Feed each question and the right answer behind what `prepare` has put into the context.

    Returns:
        The largest difference, whether all answers are equal, and both in words.
    """
    worst, equal, margins = 0.0, 0, list[str]()
    for ids, said, rows in asked:
        prepare()
        found = engine.read([*ids, *said[:-1]], place=place)[len(ids) - 1 :]
        same = found.argmax(-1) == torch.tensor(said)
        steps = NEW if same.all() else int((~same).nonzero()[0]) + 1
        equal += bool(same.all())
        if not same.all():
            first, second = rows[steps - 1].topk(2).values.tolist()
            margins.append(f"{first - second:.2g}")
        worst = max(worst, float((found - rows)[:steps].abs().max()))
    parting = f" (parts at {', '.join(margins)})" if margins else ""
    return worst, not margins, f"{worst:.2g}, {equal} of {len(asked)}{parting}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.llamacpp", description=__doc__)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--policies", default="snapkv,keydiff,expected,full")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("-b", "--budget", type=int, default=256)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    loaded = load(options.model)
    model, tokenizer = loaded.model, loaded.tokenizer
    file = folder / f"{Path(options.model).name}.gguf"
    if not file.exists():
        gguf_files.write(file, model, tokenizer)
    text = words(tokenizer, options.tokens)
    questions = [f"The secret code for {name}:" for name in CODES] + ["In short, kvtool"]
    ids = [continued_ids(tokenizer, each) for each in questions]
    prompt = tokenizer(text)["input_ids"]
    exact: dict[str, tuple[float, bool]] = {}
    print(f"{loaded.name}: {len(prompt)} tokens, {model.dtype}", flush=True)
    for policy in options.policies.split(","):
        whole = policy == "full"
        budget = None if whole else options.budget
        cache = kv.compress(loaded, text, policy, budget, chat_template="off")
        exported = export_cache(cache, to="llamacpp", model=model, tokenizer=tokenizer)
        kv.detach(model)
        asked = [(each, *answer(model, exported.tensors, each)) for each in ids]
        slots = len(exported.ids)
        for kind, flash in KINDS:
            path = folder / f"{policy}.{kind}.bin"
            with Engine(file, kind=kind, flash=flash, context=slots + 128) as engine:
                if not whole:
                    Target(to="llamacpp", type=kind, flash_attention=flash).write(exported, path)
                began = time.process_time()
                if whole:
                    engine.read(prompt)
                    engine.save(path, prompt)
                else:
                    assert engine.restore(path) == exported.ids
                engine.read(ids[0], place=slots)
                took = time.process_time() - began
                found = compare(engine, lambda path=path: engine.restore(path), slots, asked)
            if kind == "f32":
                exact[policy] = found[:2]
            size = path.stat().st_size / 2**20
            flashed = "flash" if flash else "no flash"
            told = f"{policy:9} {kind:5} {flashed:9} {found[2]}; {size:.2f} MiB, first token"
            print(f"{told} {took:.2f} s", flush=True)
    floor = 2 * exact["full"][0] if "full" in exact else float("inf")
    if any(worst > floor or not equal for worst, equal in exact.values()):
        raise SystemExit("an answer in f32 differs by more than twice the whole text's")


if __name__ == "__main__":
    main()
