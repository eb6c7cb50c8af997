"""Drive a model over a compressed cache: prompts, decoding, comparison with the full cache."""

from __future__ import annotations

from kvtool.generation.continuation import Compressed, Generation, compress, generate
from kvtool.generation.conversation import Conversation
from kvtool.generation.feeding import decode_step, prefill
from kvtool.generation.fidelity import Fidelity, compare_logits
from kvtool.generation.scoring import follow, token_logprobs, token_scores

__all__ = [
    "Compressed",
    "Conversation",
    "Fidelity",
    "Generation",
    "compare_logits",
    "compress",
    "decode_step",
    "follow",
    "generate",
    "prefill",
    "token_logprobs",
    "token_scores",
]
