"""List the tokens of a GGUF file that end an answer, as llama.cpp does: by setting and by text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TOKENS = "tokenizer.ggml.tokens"
_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
)
_FILLS = {  # of models that fill in the middle of code; a setting overrides the texts
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
WORDS = frozenset(text.encode() for texts in (_TEXTS, *_FILLS.values()) for text in texts)
LONGEST_WORD = max(map(len, WORDS))


def list_ends(settings: Mapping[str, Any], words: Mapping[str, int]) -> list[int]:
    """Return the ids of the tokens that end an answer, first the one that ends a text.

    Args:
        settings: of the file.
        words: the ids of those of its tokens that are in `WORDS`, by text.
    """

    def first(kind: str, texts: Iterable[str] = ()) -> list[int]:
        own = settings.get(f"tokenizer.ggml.{kind}_token_id")
        if type(own) is int and 0 <= own < settings.get(TOKENS, 0):
            return [own]
        return [words[text] for text in texts if text in words][:1]

    ends = [*first("eos"), *first("eot"), *first("eom")]
    ends += [words[text] for text in _TEXTS if text in words]
    for kind, texts in _FILLS.items():
        ends += first(kind, texts)
    others = set()
    if {"<|call|>", "<|calls|>"} & {*words} and {"<|return|>", "<|flush|>"} & {*words}:
        others.add(words.get("<|end|>"))  # which ends a part of an answer there
    if "<|tool_response>" in words:
        others.add(words.get("</s>"))
    return [each for each in dict.fromkeys(ends) if each not in others]
