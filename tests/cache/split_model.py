"""What a model does in each of several processes, or in one, under every policy of the table.

python -m tests.cache.split_model MODEL FOLDER, which writes FOLDER/RANK.json.
"""

import json
import sys
from pathlib import Path

import torch

import kvtool
from kvtool.errors import UsageError
from kvtool.generation import generate
from kvtool.generation.feeding import decode_step, prefill
from kvtool.models.load import load
from kvtool.policies.table import BASES, MODIFIERS
from kvtool.processes import joined
from tests.cache.test_planned_heads import planned
from tests.models_for_tests import any_cache, random_ids

BUDGET, PROMPT, NEW = 24, 61, 4


def policies() -> list[str]:
    """Every base, a base with every modifier, and a few of their settings."""
    combined = [f"{base}+{name}" for name in MODIFIERS for base in ("h2o", "snapkv(window=4)")]
    settings = {"snapkv": "window=4", "pyramidkv": "window=4", "adakv": "window=4"}
    settings["triattention"] = "every=6,prompt=false"
    bases = [f"{name}({settings[name]})" if name in settings else name for name in BASES]
    more = [
        "random(per_head=true)",
        "tova+caote",
        "tova+ada",
        "h2o+ada+caote",
        "adakv(window=4)+critical",
        "kvzip(plus=true)",
        "triattention(every=6,prompt=false)+ada",
        "snapkv(window=4)+every(steps=5)",
        "adakv(window=4)+every(steps=5)",
        "h2o+calidrop(granularity=layer)",
        "tova+d2o-alloc",
    ]
    return [*bases, *combined, *more]


def few_policies() -> list[str]:
    """Every base, and every modifier on the first base that takes it."""
    texts = [text for text in policies() if _parses(text)]
    taken = {text.partition("+")[2] for text in texts if text.startswith("h2o+")}
    return [
        text
        for text in texts
        if not (text.startswith("snapkv") and text.partition("+")[2] in taken)
    ]


def _parses(text: str) -> bool:
    try:
        return bool(kvtool.parse_policy(text))
    except UsageError:
        return False


def cases(model) -> dict[str, dict]:
    """Tokens and kept positions under each policy that a budget is enough for."""
    found = {}
    for i, policy in enumerate(few_policies()):
        prefill_mode = ("full", "block:16")[i % 2]
        try:
            cache = any_cache(model, policy, BUDGET, prefill=prefill_mode)
        except UsageError:
            continue
        found[f"{policy} {prefill_mode}"] = one(model, cache)
    cache = kvtool.build_cache(model, "tova", BUDGET)
    found["tova padded"] = one(model, cache, padded=True)
    cache = kvtool.build_cache(model, "adakv(window=4)", BUDGET)
    found["adakv padded"] = one(model, cache, padded=True)
    plan = planned(model, [[11, 29], [33, 7]], context=PROMPT)
    found["h2o planned"] = one(model, kvtool.build_cache(model, "h2o", plan=plan), padded=True)
    found["h2o bytes"] = one(model, kvtool.build_cache(model, "h2o", "32KiB"))
    return found


@torch.no_grad()
def one(model, cache, *, padded: bool = False) -> dict:
    """Two turns: a prompt, decoded tokens, and the same again."""
    rows, tokens = (2 if padded else 1), []
    for turn in range(2):
        ids = random_ids(PROMPT, seed=turn, batch=rows)
        mask = torch.ones_like(ids)
        if padded and turn == 0:
            mask[1, :17] = 0
        logits = prefill(model, cache, ids, mask)
        for _ in range(NEW):
            token = logits.argmax(-1)
            tokens.append(token.tolist())
            logits = decode_step(model, cache, token)
    report = cache.report(of_all_processes=True)
    return {
        "tokens": tokens,
        "logits": logits[0].tolist(),
        "kept": [cache.kept_positions(i).tolist() for i in range(len(cache.layers))],
        "kv_bytes": report.kv_bytes,
        "full_bytes": report.full_bytes,
        "kept_per_layer": report.kept_per_layer,
    }


def sampled(model, tokenizer) -> list[int]:
    """Tokens that are drawn, not the likeliest ones."""
    cache = kvtool.build_cache(model, "tova", BUDGET)
    ids = random_ids(PROMPT)
    drawn = generate(model, tokenizer, cache, ids, max_new_tokens=NEW, temperature=1.0, seed=5)
    return drawn.token_ids[0]


def main(folder: str, out: str) -> None:
    with joined() as processes:
        loaded = load(folder, tensor_parallel=True)
        kvtool.attach(loaded.model)
        results = {"cases": cases(loaded.model)}
        results["sampled"] = sampled(loaded.model, loaded.tokenizer)
        results["refused"] = refused(loaded.model, Path(out))
        Path(out, f"{processes.rank}.json").write_text(json.dumps(results))


def refused(model, folder: Path) -> str:
    """What saving a part of the heads says."""
    cache = kvtool.build_cache(model, "h2o", BUDGET)
    prefill(model, cache, random_ids(PROMPT))
    try:
        kvtool.save_cache(cache, folder / "part.safetensors", model=model)
    except UsageError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    main(*sys.argv[1:])
