"""Keep tokens by the presses of kvpress, in the environment in which kvpress is installed.

    PYTHON -I recipes/benchmarks/kvpress_side.py FOLDER

FOLDER has models as transformers saves them, one folder each, with the tokens of a prompt in
`prompt.json`, and `presses.json`: of each press its class, its settings and the part to remove.
The kept positions of each model, press, layer and head go to `kept.json`, and versions. Exits with
3 and the reason in one line where kvpress cannot be imported. Imports nothing of kvtool.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

try:
    import kvpress
    import transformers
    from transformers import AutoModelForCausalLM, DynamicCache
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(3)


def build(spelled):
    """A press of its class and settings, among which there may be a press again."""
    name, settings = spelled
    built = {
        key: build(value) if isinstance(value, list) else value for key, value in settings.items()
    }
    return getattr(kvpress, name)(**built)


def attention_layers(model):
    return [layer.self_attn for layer in model.model.layers]


@torch.no_grad()
def full_keys(model, ids):
    cache = DynamicCache()
    model.model(input_ids=ids, past_key_values=cache)
    return [layer.keys[0] for layer in cache.layers]


@torch.no_grad()
def kept(model, ids, spelled, ratio, full):
    """The kept positions of each layer and head."""
    for module in attention_layers(model):
        module.masked_key_indices = None
    press, cache = build(spelled), DynamicCache()
    press.compression_ratio = ratio
    with press(model):
        model.model(input_ids=ids, past_key_values=cache)
    found = []
    for module, layer, keys in zip(attention_layers(model), cache.layers, full, strict=True):
        masked = getattr(module, "masked_key_indices", None)
        if masked is None:
            found.append(
                [places(own, all_of) for own, all_of in zip(layer.keys[0], keys, strict=True)]
            )
            continue
        stays = torch.ones(keys.shape[:2], dtype=torch.bool)
        stays[masked[1], masked[2]] = False
        found.append([head.nonzero()[:, 0].tolist() for head in stays])
        module.masked_key_indices = None
    return found


def places(keys, full):
    """Where keys of a cut cache were before it was cut, ascending; all of a row are equal then."""
    same = (keys[:, None] == full[None]).all(-1)
    if not (same.sum(-1) == 1).all():
        raise ValueError("a key of the cut cache is not, or not once, among all keys")
    return sorted(same.int().argmax(-1).tolist())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    presses = json.loads((folder / "presses.json").read_text())
    answer = {
        "kvpress": getattr(kvpress, "__version__", None) or version("kvpress"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "kept": {},
    }
    for own in sorted(path.parent for path in folder.glob("*/prompt.json")):
        ids = torch.tensor([json.loads((own / "prompt.json").read_text())])
        model = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32).eval()
        full = full_keys(model, ids)
        answer["kept"][own.name] = [
            kept(model, ids, spelled, 1 - (budget + 0.5) / ids.shape[1], full)
            for spelled, budget in presses
        ]
    (folder / "kept.json").write_text(json.dumps(answer))


def version(package: str) -> str:
    from importlib.metadata import version as installed

    return installed(package)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
