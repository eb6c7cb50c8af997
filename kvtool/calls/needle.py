"""The built-in prompt, which hides a code: whether it was found, and what others find of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool.calls.request import Request
from kvtool.errors import UsageError
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full
from kvtool.policies.scores.streaming import Streaming
from kvtool.sizes import bytes_in_words
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.documents.generation import GenerationDocument

NEEDLE = "built-in needle"
"""What the prompt is called where a prompt's source is."""

_TOKENS, _SEED = 1024, 25  # the code lies a quarter deep, where no window of half the text reaches
_PATIENCE = 5.0  # seconds that an answer may take for others to be made beside it
_SHOWN = 60  # letters of an answer on stderr


def write_needle() -> tuple[str, str]:
    """Write the built-in prompt, and the code that answers it."""
    from kvtool.models.reference.tasks import needle_prompt

    prompt, answer = needle_prompt(tokens=_TOKENS, seed=_SEED)
    return prompt, answer.strip()


def answer_prefix(prompt: str) -> str:
    """Return the beginning of the answer, with which the built-in prompt ends.

    >>> answer_prefix("What is the secret code for owl? Answer: The secret code for owl:")
    ' The secret code for owl:'
    """
    return prompt.rpartition("Answer:")[2]


def note_needle(code: str, watcher: Watcher) -> None:
    """Say what the prompt is."""
    watcher.note(
        f"prompt: a built-in text of about {_TOKENS} tokens that hides a code, "
        f"and a question about it; the answer is {code}"
    )


def judge(text: str, code: str) -> str:
    """Say whether an answer has the code.

    >>> judge(" 72829.", "72829"), judge(" 728", "72829"), judge(" 172829", "72829")
    ('correct', 'cut off, the code is 72829', 'wrong, the code is 72829')
    """
    if re.search(rf"(?<!\d){code}(?!\d)", text):
        return "correct"
    begun = code.startswith(text.strip())
    return f"{'cut off' if begun else 'wrong'}, the code is {code}"


def compare_needle(
    request: Request,
    document: GenerationDocument,
    answer: Callable[[Request], GenerationDocument],
    watcher: Watcher,
    *,
    shown: bool,
) -> None:
    """Say whether the code was found, and what the full cache and `streaming` make of the prompt.

    Where the answer took long already, nothing is run beside it: a command that does is named.

    Args:
        document: what the request has come to.
        answer: makes others of the same prompt, with the same model.
        shown: whether the user has seen the kept text already.
    """
    code = write_needle()[1]
    watcher.note(f"{judge(document.text, code)}; {_held(document)}")
    if not request.policy.takes_budget:
        return
    took = document.timing.prefill_s + document.timing.decode_s
    if took >= _PATIENCE:
        command = f"kvtool generate -m {shlex.quote(document.model)} -p full"
        watcher.note(f"full cache: not run, as this answer took {took:.0f} s; run {command}")
    for name, policy in _neighbours(request.policy) if took < _PATIENCE else ():
        budget = request.budget if policy.takes_budget else None
        try:
            other = answer(replace(request, policy=policy, budget=budget, plan=None))
        except UsageError as error:  # a budget that it cannot do with
            watcher.note(f"{name}: {error.message}")
            continue
        said = " ".join(other.text.split())[:_SHOWN]
        verdict = judge(other.text, code).partition(",")[0]
        watcher.note(f'{name}: "{said}" is {verdict}; {_held(other)}')
    if not shown:
        watcher.note("see which tokens were kept: add --show kept.html")


def _neighbours(policy: Policy) -> list[tuple[str, Policy]]:
    """Return what a policy is compared with, but for itself."""
    named = [("full cache", Policy(Full())), ("streaming, same budget", Policy(Streaming()))]
    return [(name, other) for name, other in named if other != policy]


def _held(document: GenerationDocument) -> str:
    held = document.cache.allocated_bytes + document.cache.state_bytes
    return f"{bytes_in_words(held)} held"
