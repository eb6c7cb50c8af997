"""Which of several functions an answer repeats, as RepoQA scores it inside SCBench.

Liu et al., 2024, https://arxiv.org/abs/2406.06025; https://github.com/microsoft/MInference, folder
scbench.

Differences: the function is the first code block of the answer, as it stands; upstream looks in it
for the first function with a parser. BLEU is sacrebleu's without smoothing instead of NLTK's with
Chen and Cherry's fourth: from the threshold up the two agree, but NLTK's never reaches it for a
function of fewer than four words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from kvtool.extras import require

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU

THRESHOLD = 0.8
_CODE_BLOCK = re.compile(r"^```\w*[^\S\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def repeats_function(prediction: str, function: str, others: Sequence[str]) -> bool:
    """Return whether an answer is more like `function` than the others, and at least 0.8 BLEU.

    Args:
        others: further functions that were asked for in the same code; `function` may be among
            them.
    """
    said = first_code_block(prediction)
    similar = similarity(said, function)
    if similar < THRESHOLD:
        return False
    return all(similarity(said, other) < similar for other in others if other != function)


def first_code_block(text: str) -> str:
    """Return what stands between the first two lines of three backticks, else the whole text.

    >>> first_code_block("Here it is:\\n```python\\ndef f(): ...\\n```\\nDone.")
    'def f(): ...\\n'
    """
    found = _CODE_BLOCK.search(text.strip())
    return found[1] if found else text.strip()


def similarity(candidate: str, reference: str) -> float:
    """Return the sentence BLEU, from 0 to 1, of words between white space.

    Raises:
        UsageError: sacrebleu is not installed.
    """
    said, wanted = " ".join(candidate.split()), " ".join(reference.split())
    return _bleu().sentence_score(said, [wanted]).score / 100


@cache
def _bleu() -> BLEU:
    require("eval", needed_by="BLEU")
    from sacrebleu.metrics import BLEU

    return BLEU(tokenize="none", smooth_method="none", effective_order=True)
