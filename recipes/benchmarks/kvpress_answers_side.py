"""Answer questions with the presses of kvpress, in the environment in which it is installed.

    PYTHON -I recipes/benchmarks/kvpress_answers_side.py FOLDER

FOLDER has a model as transformers saves it, `asked.json` (the tokens of each text and question),
`presses.json` (of each press its class and settings; null: nothing is compressed) and `setup.json`
(the budget, and the tokens of an answer). As in kvpress' own pipeline a press is active while the
text is read, and the question comes behind it, at the positions of the whole text. The tokens of
the answers go to `answers.json`, press by press, and versions; broken off, it goes on. Exits with 3
and the reason in one line where kvpress cannot be imported. Imports nothing of kvtool.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch

try:
    import kvpress
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging
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


@torch.no_grad()
def answer(model, spelled, budget, asked, new_tokens):
    """The tokens of an answer, the likeliest each, up to the end of the text."""
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    context = torch.tensor([asked["context"]])
    length, cache = context.shape[1], DynamicCache()
    if spelled is None:
        model.model(input_ids=context, past_key_values=cache)
    else:
        press = build(spelled)
        press.compression_ratio = 1 - (budget + 0.5) / length
        with press(model):
            model.model(input_ids=context, past_key_values=cache)
    ids, said = torch.tensor([asked["question"]]), []
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for _ in range(new_tokens):
        places = torch.arange(length, length + ids.shape[1])[None]
        logits = model(input_ids=ids, past_key_values=cache, position_ids=places).logits
        length += ids.shape[1]
        said.append(int(logits[0, -1].argmax()))
        if said[-1] in ends:
            break
        ids = torch.tensor([[said[-1]]])
    return said


def main(folder: Path) -> None:
    asked = json.loads((folder / "asked.json").read_text())
    presses = json.loads((folder / "presses.json").read_text())
    budget, new_tokens = json.loads((folder / "setup.json").read_text())
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    file = folder / "answers.json"
    found = json.loads(file.read_text())["answers"] if file.is_file() else []
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    for spelled in presses[len(found) :]:
        found.append([answer(model, spelled, budget, each, new_tokens) for each in asked])
        file.write_text(json.dumps({**versions, "answers": found}))
        print(f"answered {len(found)} of {len(presses)}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
