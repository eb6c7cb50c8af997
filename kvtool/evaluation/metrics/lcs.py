"""ROUGE-L as LongBench scores summaries: that of the package `rouge` 1.0.1, which has its own ways.

Texts are split at every full stop, letter case counts, and words are counted once however often
they occur: the hits are the different words in any longest common subsequence of a sentence of the
reference and one of the answer. Which subsequence is taken where several are longest is part of the
definition. `kvtool.evaluation.metrics.overlap` has the usual ROUGE.

The package fails on a piece of about a thousand words without a full stop, which LongBench counts
as 0; such a piece gets its true score here.
"""

from __future__ import annotations

from collections.abc import Sequence

_TINY = 1e-8


def rouge_l(prediction: str, reference: str) -> float:
    """Return the F score over different words, from 0 to 1.

    >>> round(rouge_l("the cat sat. it slept", "the cat slept."), 4)
    0.75
    """
    said, wanted = _sentences(prediction), _sentences(reference)
    if not said or not wanted:
        return 0.0
    hits = {word for theirs in wanted for ours in said for word in common_words(theirs, ours)}
    recall = len(hits) / len({word for sentence in wanted for word in sentence})
    precision = len(hits) / len({word for sentence in said for word in sentence})
    return 2 * precision * recall / (precision + recall + _TINY)


def common_words(reference: Sequence[str], prediction: Sequence[str]) -> set[str]:
    """Return the words of the longest common subsequence that is found from the end.

    At equal words both sides step back; else the reference does if that keeps more, and the
    prediction if not.
    """
    lengths = _prefix_lengths(reference, prediction)
    words: set[str] = set()
    i, j = len(reference), len(prediction)
    while i and j:
        if reference[i - 1] == prediction[j - 1]:
            words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def _prefix_lengths(first: Sequence[str], second: Sequence[str]) -> list[list[int]]:
    """Return the length of the longest common subsequence of every pair of beginnings."""
    lengths = [[0] * (len(second) + 1)]
    for word in first:
        above, row = lengths[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    return lengths


def _sentences(text: str) -> list[list[str]]:
    """Split at full stops; a piece of mere white space is a sentence of one empty word."""
    return [piece.split() or [""] for piece in text.split(".") if piece]
