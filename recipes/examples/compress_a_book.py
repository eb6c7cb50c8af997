"""Compress a book once, save its cache, and ask it several questions.

    python recipes/examples/compress_a_book.py

prints

    roco: 1651 tokens read, 256 kept,
      6.4x smaller; 0.0 MiB in host memory
      kettle: 72829.
      coral: 55812.
      falcon: 950. (wrong, it is 90417)
    h2o+calidrop: 1651 tokens read, 256 kept,
      6.4x smaller; 5.5 MiB in host memory
      kettle: 72 72 7282 (wrong, it is 72829)
      coral: 55812.
      falcon: 90417.
"""

from __future__ import annotations

import random

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

import kvtool
from kvtool.models import reference

NAMES = ("Olga", "Boris", "Irene", "Walter", "Jonas", "Yusuf")
THINGS = ("lamp", "turban", "robin", "puppet", "violet", "walnut", "compass", "flute")
PLACES = ("library", "hospital", "school", "mountain", "harbor", "museum")
CODES = {"kettle": "72829", "coral": "55812", "falcon": "90417"}


def write_book(sentences: int = 200) -> str:
    """Return filler that hides three codes."""
    draw = random.Random(0)
    lines = []
    for _ in range(sentences):
        name, thing, place = draw.choice(NAMES), draw.choice(THINGS), draw.choice(PLACES)
        lines.append(
            draw.choice(
                (
                    f"In the morning, {name} followed the {thing}.",
                    f"{name} returned a {thing} at the {place}.",
                    f"The {thing} was near the {place}.",
                )
            )
        )
    for part, (name, code) in zip((0.2, 0.5, 0.8), CODES.items(), strict=True):
        lines.insert(int(part * sentences), f"The secret code for {name}: {code}.")
    return " ".join(lines)


def read_and_ask(policy: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compress the book, save it, load it as on another day, and ask."""
    book = tokenizer(write_book(), return_tensors="pt").input_ids
    cache = kvtool.build_cache(model, policy, budget=256)
    with torch.no_grad():
        model(book, past_key_values=cache, logits_to_keep=1)  # the book is read here, once
    report = cache.report()
    smaller = report.full_bytes / report.kv_bytes
    print(f"{policy}: {report.tokens_seen} tokens read, {max(report.kept_per_layer)} kept,")
    print(f"  {smaller:.1f}x smaller; {report.host_bytes / 2**20:.1f} MiB in host memory")
    kvtool.save_cache(cache, "book.kv.safetensors", model=model, input_ids=book)

    cache = kvtool.load_cache("book.kv.safetensors", model)
    for name, code in CODES.items():
        question = f" Question: What is the secret code for {name}? The secret code for {name}:"
        ids = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        text = torch.cat([book, ids], dim=1)  # generate feeds what the cache has not seen
        with cache.rollback():  # the question and its answer leave no trace
            out = model.generate(text, past_key_values=cache, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(out[0, text.shape[1] :], skip_special_tokens=True)
        print(f"  {name}:{answer}" + ("" if answer == f" {code}." else f" (wrong, it is {code})"))


def main() -> None:
    """Ask under two policies: one drops what is evicted, one keeps it in host memory."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(reference.path(), dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(reference.path())
    for policy in ("roco", "h2o+calidrop"):
        read_and_ask(policy, model, tokenizer)


if __name__ == "__main__":
    main()
