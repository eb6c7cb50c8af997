"""Names of metrics on axes and in headers, and a sentence on what each measures."""

from __future__ import annotations

from kvtool.documents.results import TaskResult
from kvtool.report import formats

METRICS = {  # what axes and headers call them, with the unit, and a sentence
    "em": (
        "exact match",
        "share of answers that hold what was asked for, whatever stands around it",
    ),
    "word_set": ("words found", "share of the reference's words that are words of the answer"),
    "steps": ("steps right", "share of the steps of a chain whose result is right"),
    "string_match_all": ("references found", "share of the references that stand in the answer"),
    "string_match_part": (
        "any reference found",
        "share of answers in which one of the references stands",
    ),
    "accuracy": ("accuracy", "share of answers that are right"),
    "pass@1": ("pass@1", "share of answers that are right, mean of the answers to each problem"),
    "answered": ("answered", "share of answers that come to a final answer"),
    "leading_share": (
        "right before the first error",
        "share of the values that come before the first wrong one",
    ),
    "match_ratio": (
        "text recited",
        "likeness of answer and text (difflib), 0 without the prefix asked for",
    ),
    "score": ("score", "the metric of the benchmark for this task, against the best reference"),
    "qa_f1": (
        "F1 of words",
        "harmonic mean of precision and recall of the answer's words (LongBench)",
    ),
    "rouge_l": ("ROUGE-L", "F1 of the longest common subsequences of words (LongBench's rouge)"),
    "classification": (
        "classes named",
        "share of the class, of all class names in the answer (LongBench)",
    ),
    "count": ("counts right", "share of the answer's numbers that are the right count"),
    "retrieval": (
        "paragraphs right",
        "share of the answer's numbers that are the right paragraph's",
    ),
    "code_sim": (
        "similarity of code",
        "characters that the first line of code shares with the right one",
    ),
    "repoqa": ("functions repeated", "share of answers that repeat the function asked for"),
    "kv": ("values found", "share of answers that hold the value of the key"),
    "summary": ("summaries", "ROUGE-Lsum of the summaries with the references"),
    "passkey": ("pass keys found", "share of answers whose first number is the pass key"),
    "agreement": (
        "agreement with full",
        "share of steps whose likeliest token is the full cache's, both reading the same answer",
    ),
    "kl": (
        "KL divergence (nats)",
        "divergence of the policy's next-token probabilities from the full cache's, mean of steps",
    ),
    "exact_match": ("same answer", "share of answers that are the reference, word for word"),
    "bleu": (
        "BLEU (0 to 100)",
        "runs of up to four words shared with the reference, over all answers",
    ),
    "rouge1": ("ROUGE-1 (0 to 100)", "F1 of words shared with the reference"),
    "rouge2": ("ROUGE-2 (0 to 100)", "F1 of pairs of words shared with the reference"),
    "rougeL": ("ROUGE-L (0 to 100)", "F1 of the longest common subsequence with the reference"),
    "first_divergence": (
        "first difference (token)",
        "where the first token stands that is not the full cache's, over answers that differ",
    ),
    "ppl": ("perplexity", "exp of the mean negative log-likelihood of the text's tokens"),
    "nll": (
        "NLL (nats per token)",
        "mean negative log-likelihood of the text's tokens under the policy",
    ),
    "tokens": ("scored tokens", "tokens whose likelihood was taken, over all texts"),
    "chunk": ("tokens fed at a time", "tokens of a text that a forward reads at once"),
    "nmse": (
        "normalised squared error",
        "squared error of the attention layers' outputs over their squared size, mean of layers",
    ),
    "decode_tokens_per_s": (
        "decode speed (tokens/s)",
        "new tokens of all rows per second after the prompt",
    ),
    "prefill_tokens_per_s": ("prefill speed (tokens/s)", "prompt tokens of all rows per second"),
    "ttft_s": ("time to first token (s)", "seconds from the prompt to its first new token"),
    "batch": ("batch (rows)", "rows that ran together"),
}


def title(name: str) -> str:
    """Return what axes and headers call a metric; of another harness, its own name."""
    return METRICS[name][0] if name in METRICS else name.replace("_", " ")


def headline(result: TaskResult) -> str:
    """Return the headline of a task for axes and headers: in words, its unit, where it is better.

    Scores out of 100 say so.
    """
    percent = " (%)" if result.best == 100 and "(" not in title(result.metric) else ""
    return f"{title(result.metric)}{percent} {formats.direction(result)}"


def meaning(name: str) -> str:
    """Return the sentence on a metric; of another harness, whose it is."""
    return METRICS.get(name, ("", "as the harness that the task is from computes it"))[1]
