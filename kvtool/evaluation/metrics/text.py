"""Scores of answers that are text: words, characters, labels, summaries and recitation.

Overlap of words is LongBench's (https://github.com/THUDM/LongBench), and SQuAD's before it.
InfiniteBench scores its English questions in the same way. Another score is whether an answer says
that the question cannot be answered.

The F1 of single characters is for answers in Chinese, as InfiniteBench
(https://github.com/OpenBMB/InfiniteBench) and SCBench score them. Their list of punctuation is
replaced by Unicode's categories, which also have the few marks and symbols that the list leaves
out, such as the dot in a foreign name.

Containment: `string_match_all` and `string_match_part` are RULER's
(https://arxiv.org/abs/2404.06654). Another harness averages over references in the second, where
RULER takes the best. For the needle in a haystack there is no common score; `contains` is what is
mostly called exact match there, and `word_share` what the heat maps of KVCache-Factory show.

Labels and numbers are scored as in LongBench. Every number or label that an answer names takes an
equal part: "3 or 4" is half right.

LongBench scores summaries by the ROUGE-L of the package `rouge` 1.0.1, which has its own ways.
Texts are split at every full stop, letter case counts, and words are counted once however often
they occur. The hits are the different words in any longest common subsequence of a sentence of the
reference and one of the answer. Which subsequence is taken where several are longest is part of the
definition. The package fails on a piece of about a thousand words without a full stop, which
LongBench counts as 0; such a piece gets its true score here.

The usual ROUGE is that of rouge-score, and BLEU that of sacrebleu (the extra `eval`), from 0 to
100. METEOR is left out: it needs WordNet, which is a download.

Recitation is scored as by OpenAI's MRCR (https://huggingface.co/datasets/openai/mrcr): how much of
a text does an answer recite? The ratio is that of difflib, which in texts of 200 characters and
more takes those that make up over 1 % of the second text for junk.

`said` gives what a reasoning model says, without what it thinks between `<think>` and `</think>`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import TYPE_CHECKING, Any

from kvtool.errors import KvtoolError
from kvtool.extras import require

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU


_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """Return the words of an answer, in lower case, without ASCII punctuation and articles.

    >>> answer_words("The U.S. Army's an-swer")
    ['us', 'armys', 'answer']
    """
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def qa_f1(prediction: str, reference: str) -> float:
    """Return the F1 of the words, each counted as often as it occurs, from 0 to 1.

    >>> round(qa_f1("Paris, in France", "Paris"), 3)
    0.5
    """
    said, wanted = answer_words(prediction), answer_words(reference)
    same = (Counter(said) & Counter(wanted)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(said), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def first_line(prediction: str) -> str:
    """Return an answer up to its first line end, leading ones aside.

    >>> first_line("\\n\\nParis\\nQuestion: ..")
    'Paris'
    """
    return prediction.lstrip("\n").split("\n")[0]


def best(metric: Callable[[str, str], float], prediction: str, references: Sequence[str]) -> float:
    """Return the score against the reference that suits the answer best."""
    return max(metric(prediction, reference) for reference in references)


_ABSTAINS = re.compile(
    r"\b(?:i\s+(?:do\s+not|don't)\s+(?:know|have|recall|see|find)"
    r"|(?:did\s+not|didn't|does\s+not|doesn't|do\s+not|don't|never|not|no)\s+"
    r"(?:\w+\s+){0,3}?(?:mention(?:ed)?|say|said|told|specif(?:y|ied)|provided?|discuss(?:ed)?"
    r"|information|enough|record|stated?|known|available)"
    r"|(?:cannot|can't|unable\s+to|impossible\s+to)\s+(?:be\s+)?"
    r"(?:answer(?:ed)?|determined?|tell|told|say|said|know|find|found)"
    r"|unknown|unanswerable)\b",
    re.IGNORECASE,
)


def abstains(prediction: str) -> bool:
    """Return whether an answer says, in one of the usual phrases, that it is not known.

    >>> abstains("You did not mention a cat."), abstains("I don't know."), abstains("It is Tom.")
    (True, True, False)
    """
    return _ABSTAINS.search(prediction.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")) is not None


_DROPPED = frozenset("PSZC")  # punctuation, symbols, white space, control characters


def character_f1(prediction: str, reference: str) -> float:
    """Return the F1 of the characters of an answer, punctuation and white space aside.

    >>> character_f1("他叫宝玉。", "宝玉")
    0.6666666666666666
    """
    said, wanted = _characters(prediction), _characters(reference)
    common = (said & wanted).total()
    if common == 0:
        return 0.0
    return 2 * common / (said.total() + wanted.total())


def _characters(text: str) -> Counter[str]:
    return Counter(char for char in text.lower() if unicodedata.category(char)[0] not in _DROPPED)


_CONTROL = re.compile(r"[\x00-\x1f]")


def readable(prediction: str) -> str:
    """Strip an answer and turn control characters into line ends, as RULER does."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Return the fraction of references that are part of the answer, letter case aside.

    >>> string_match_all("It is Paris.", ["paris", "rome"])
    0.5
    """
    text = readable(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if any reference is part of the answer, letter case aside, else 0.

    >>> string_match_part("It is Paris.", ["paris", "rome"])
    1.0
    """
    text = readable(prediction).lower()
    return float(any(reference.lower() in text for reference in references))


def words_match_all(prediction: str, references: Sequence[str]) -> float:
    """Return the fraction of references that are a word of the answer, in the same letter case.

    >>> words_match_all(" BA CE. Because", ["BA", "CE", "DI", "Be"])
    0.5
    """
    words = set(re.findall(r"\w+", prediction))
    return sum(reference in words for reference in references) / len(references)


def normalise(text: str) -> str:
    """Lower the case, drop punctuation (`1,234` is 1234) and join words by single spaces."""
    kept = (char for char in text.lower() if not unicodedata.category(char).startswith("P"))
    return " ".join("".join(kept).split())


def contains(prediction: str, reference: str) -> float:
    """Return 1 if the normalised reference is part of the normalised answer, else 0.

    >>> contains("The code is 74,291", "74291"), contains("7429", "74291")
    (1.0, 0.0)
    """
    return float(normalise(reference) in normalise(prediction))


def word_share(prediction: str, reference: str) -> float:
    """Return the fraction of the reference's different words that the answer has.

    >>> word_share("eat a sandwich", "Eat a sandwich outside!")
    0.75
    """
    wanted = set(normalise(reference).split())
    return len(wanted & set(normalise(prediction).split())) / len(wanted)


_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """Return the reference's part of the classes named in an answer, 0 if it is not named.

    A class that is only part of the reference's name does not count. LongBench removes such classes
    from the list while it goes through it, and so does not look at the one after each; this is kept
    so that scores compare.

    >>> classification("Type: human group", "human group", ["human group", "group", "date"])
    1.0
    """
    named = [name for name in classes if name in prediction]
    i = 0
    while i < len(named):
        if named[i] in reference and named[i] != reference:
            named.remove(named[i])  # the next one takes its place and is passed over
        i += 1
    return 1 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str) -> float:
    """Return which fraction of the numbers in an answer is the right one.

    >>> count("3 or 4", "3"), count("three", "3")
    (0.5, 0.0)
    """
    numbers = _NUMBER.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Return which fraction of the numbers in an answer is that of the right paragraph.

    Args:
        prediction: names paragraphs by any number in it.
        reference: `Paragraph 7`.

    Raises:
        KvtoolError: the reference names no paragraph.
    """
    found = _PARAGRAPH.search(reference)
    if found is None:
        raise KvtoolError(f"`{reference}` names no paragraph")
    return count(prediction, found[1])


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


_ROUGES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def corpus_bleu(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the BLEU of all answers together, one reference each."""
    return bleu_of(effective_order=False).corpus_score(list(predictions), [list(references)]).score


def sentence_bleu(prediction: str, reference: str) -> float:
    """Return the BLEU of one answer, up to the longest n-grams that it has."""
    return bleu_of(effective_order=True).sentence_score(prediction, [reference]).score


def bleu_signature(*, sentence: bool) -> str:
    """Return how BLEU was computed, in sacrebleu's own words, to be stored with the score."""
    bleu = bleu_of(effective_order=sentence)
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


def rouge_lsum(prediction: str, reference: str) -> float:
    """Return the ROUGE-Lsum of a summary without stems, from 0 to 1."""
    return rouge(prediction, reference, stemmer=False)["rougeLsum"] / 100


@cache
def bleu_of(**options: Any) -> BLEU:
    """Return sacrebleu's BLEU with some options.

    Raises:
        UsageError: sacrebleu is not installed.
    """
    require("eval", needed_by="BLEU")
    from sacrebleu.metrics import BLEU

    return BLEU(**options)


@cache
def _rouge(stemmer: bool) -> RougeScorer:
    require("eval", needed_by="ROUGE")
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(_ROUGES), use_stemmer=stemmer)


def recited(prediction: str, reference: str, prefix: str) -> float:
    """Return how alike an answer and a text are, from 0 to 1; 0 if it lacks the prefix asked for.

    White space before the answer is passed over, which an interface for chats would have stripped.

    >>> recited(" Xy7abcd", "Xy7abcf", "Xy7"), recited("abcd", "Xy7abcd", "Xy7")
    (0.75, 0.0)
    """
    said = prediction.lstrip()
    if not said.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, said.removeprefix(prefix), reference.removeprefix(prefix)).ratio()


OPEN, CLOSE = "<think>", "</think>"


def split_thought(prediction: str) -> tuple[str, str | None]:
    """Split an answer into the thought and what is said after it.

    A tag that a chat template has opened before the answer need not be in it.

    Returns:
        The thought, empty if there is none, and the rest, None if the thought never ends.

    >>> split_thought("<think>2 + 2</think> 4"), split_thought("4"), split_thought("<think>2 +")
    (('<think>2 + 2', ' 4'), ('', '4'), ('<think>2 +', None))
    """
    thought, closed, said = prediction.rpartition(CLOSE)
    if closed:
        return thought, said
    return (prediction, None) if OPEN in prediction else ("", prediction)


def said(prediction: str) -> str:
    """Return what is said after thinking, nothing if the thought never ends."""
    return split_thought(prediction)[1] or ""
