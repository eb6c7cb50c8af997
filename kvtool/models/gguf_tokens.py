"""Split text before its tokens are looked up, as the file of a GGUF model says.

A GGUF file holds a vocabulary and the *name* of the rule that splits text first. transformers knows
some names and takes GPT-2's rule for all others, which gives other tokens without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.models.gguf import CHECKPOINT_HINT
from kvtool.models.gguf_header import GgufHeader
from kvtool.transformers_versions import gguf_splits


def _gpt2() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False)


def _digits_alone() -> Any:
    """Each digit is a piece of its own; what lies between is split by GPT-2's rule."""
    from tokenizers.pre_tokenizers import Digits, Sequence

    return Sequence([Digits(individual_digits=True), _gpt2()])


RULES: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "smollm": _digits_alone,
    "starcoder": _digits_alone,
    "refact": _digits_alone,
    "codeshell": _digits_alone,
}
"""Rules that transformers lacks, by llama.cpp's names, and what each is as a pre-tokenizer."""


def check_splits(name: str, header: GgufHeader) -> None:
    """Refuse a file whose rule is not known; vocabularies with scores are split by none.

    Args:
        name: of the model.

    Raises:
        KvtoolError: the rule is unknown, or transformers is too old for GGUF files.
    """
    splits = gguf_splits()
    if header.text("tokenizer.ggml.model") != "gpt2":
        return
    rule = header.text("tokenizer.ggml.pre")
    if rule is None:
        raise KvtoolError(
            f"`{name}` does not say how text is split into tokens (tokenizer.ggml.pre)",
            hint=CHECKPOINT_HINT,
        )
    if rule not in RULES and rule not in splits:
        raise KvtoolError(
            f"`{name}` splits text by the rule `{rule}`, which kvtool does not know",
            hint=CHECKPOINT_HINT,
        )


def repair_splits(tokenizer: Any, header: GgufHeader) -> None:
    """Give a tokenizer the rule of its file where transformers lacks it."""
    rule = header.text("tokenizer.ggml.pre")
    if header.text("tokenizer.ggml.model") == "gpt2" and rule in RULES:
        tokenizer.backend_tokenizer.pre_tokenizer = RULES[rule]()
