"""BLEU by sacrebleu and ROUGE by rouge-score, the extra `eval`, from 0 to 100.

METEOR is left out: it needs WordNet, which is a download.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from kvtool.extras import require

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

_ROUGES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def corpus_bleu(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the BLEU of all answers together, one reference each.

    Raises:
        UsageError: sacrebleu is not installed.
    """
    return _bleu(sentence=False).corpus_score(list(predictions), [list(references)]).score


def sentence_bleu(prediction: str, reference: str) -> float:
    """Return the BLEU of one answer, up to the longest n-grams that it has.

    Raises:
        UsageError: sacrebleu is not installed.
    """
    return _bleu(sentence=True).sentence_score(prediction, [reference]).score


def bleu_signature(*, sentence: bool) -> str:
    """Return how BLEU was computed, in sacrebleu's own words, to be stored with the score."""
    bleu = _bleu(sentence=sentence)
    bleu.corpus_score(["a"], [["a"]])  # the number of references is known only after a score
    return str(bleu.get_signature())


def rouge(prediction: str, reference: str, *, stemmer: bool = True) -> dict[str, float]:
    """Return the F scores of ROUGE-1, -2, -L, and -Lsum, which takes lines for sentences.

    Args:
        stemmer: whether words are cut to their stems. The library `evaluate`, which InfiniteBench
            and SCBench use, does not.

    Raises:
        UsageError: rouge-score is not installed.
    """
    scores = _rouge(stemmer).score(reference, prediction)
    return {name: 100 * scores[name].fmeasure for name in _ROUGES}


@cache
def _bleu(*, sentence: bool) -> BLEU:
    require("eval", needed_by="BLEU")
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=sentence)


@cache
def _rouge(stemmer: bool) -> RougeScorer:
    require("eval", needed_by="ROUGE")
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(_ROUGES), use_stemmer=stemmer)
