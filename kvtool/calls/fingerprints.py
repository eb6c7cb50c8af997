"""Fingerprints of the answers to many prompts: what each depends on, so that none is outlived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvtool.calls.base_settings import ModelSettings
from kvtool.calls.request import Request
from kvtool.calls.settings import GenerationSettings
from kvtool.documents.prompts import AnswerLine
from kvtool.documents.settings import settings_of
from kvtool.errors import UsageError
from kvtool.evaluation.run.fingerprint import (
    WAYS_OUT,
    Fingerprint,
    code_digests,
    difference,
    digest,
    model_digest,
)
from kvtool.models.load import Loaded

if TYPE_CHECKING:
    from torch import Tensor

_IN_TOKENS = frozenset({"prompts", "system", "max_new_tokens"})
_OF_MODEL = frozenset({each.name for each in fields(ModelSettings)}) - {"seed"}
_IN_REQUEST = frozenset({"policy", "budget", "allocator", "prefill"})
_LAID_OUT = frozenset({"recipe", "set", "unset"})  # in the others
_REFUSED = frozenset({"prompt", "prompt_file", "turns", "cache", "save", "show", "compare_full"})
_NO_MATTER = frozenset({"memory", "compile", "skip_bad"})
_MARKED = frozenset(each.name for each in settings_of(GenerationSettings) if not each.flag.counts)
ELSEWHERE = (
    _IN_TOKENS
    | _OF_MODEL
    | _IN_REQUEST
    | _LAID_OUT
    | _REFUSED
    | _NO_MATTER
    | _MARKED
    | {"tensor_parallel"}
)
"""Settings that the fingerprint has from elsewhere, or that no answer depends on."""
_ONE_PROMPT = frozenset({"prompt", "source"})  # of a request


def shared_fingerprint(
    settings: GenerationSettings, request: Request, loaded: Loaded
) -> Fingerprint:
    """Return the fingerprint of all answers, but for their prompts."""
    settled = {"settings": settings_digest(settings, request), "model": model_digest(loaded)}
    return settled | code_digests(request.policy)


def settings_digest(settings: GenerationSettings, request: Request) -> str:
    """Hash every setting that is not in `ELSEWHERE`, one that is added later included."""
    own = {each.name for each in fields(settings)} - ELSEWHERE
    asked = {each.name for each in fields(request)} - _ONE_PROMPT - {"plan"}
    values: dict[str, Any] = {name: getattr(settings, name) for name in own}
    values |= {f"request.{name}": str(getattr(request, name)) for name in asked}
    plan = request.plan
    return digest(values | {"plan": None if plan is None else plan.to_data()})


def answer_fingerprint(
    shared: Mapping[str, str], settings: GenerationSettings, index: int, ids: Tensor, new: int
) -> Fingerprint:
    """Return the fingerprint of one answer.

    Args:
        shared: that of all answers.
        index: of the prompt, which its draws depend on.
        ids: (1, n) int64.
        new: tokens of the answer at most.
    """
    drawn = index if settings.temperature else None
    return {"prompt": digest([ids.tolist(), new, drawn]), **shared}


def check_fingerprint(there: AnswerLine, now: Mapping[str, str]) -> None:
    """Refuse an answer that depends on something else than it would now.

    Raises:
        UsageError: it does.
    """
    differs = difference(there.fingerprint, now)
    if differs is not None:
        message = f"the answer to prompt {there.index} that is there {differs}"
        raise UsageError(message, hint=WAYS_OUT)
