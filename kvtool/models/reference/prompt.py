"""The built-in prompt: one needle in a page of filler, and the question about it."""

import numpy as np

from kvtool.models.reference.filler import Filler
from kvtool.models.reference.tasks import draw_example
from kvtool.models.reference.vocabulary import decode

_FILLER_SENTENCES = 500
_FILLER_SEED = 2


def needle_prompt(tokens: int = 1024, seed: int = 0) -> tuple[str, str]:
    """Write a prompt whose answer the reference model finds with a full cache.

    Args:
        tokens: length of the prompt, `<bos>` included; it comes out at most 16 tokens shorter.
        seed: another seed hides another needle elsewhere.

    Returns:
        The prompt, which ends where the answer begins, and the answer with its leading space.

    Raises:
        KvtoolError: `tokens` is too few for the needle and its question.
    """
    rng = np.random.default_rng([seed, tokens])
    example = draw_example(rng, "single", tokens, Filler(_FILLER_SEED, _FILLER_SENTENCES))
    return decode(example.context + example.question), decode(example.answer[:-1])
