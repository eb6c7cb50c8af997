"""What `generate` has generated, as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvtool.calls.request import Request, spell_budget
from kvtool.models.load import Loaded

if TYPE_CHECKING:
    from kvtool.cache.report import CacheReport
    from kvtool.documents.generation import (
        CompileSection,
        GenerationDocument,
        GenerationTiming,
        PlanSection,
        TurnSection,
    )
    from kvtool.documents.turns import UserTurn
    from kvtool.generation import Compressed, Generation


def document_of(
    request: Request, loaded: Loaded, result: Generation, plan: PlanSection | None = None
) -> GenerationDocument:
    """Put an answer into a document.

    Args:
        plan: what was taken from one.
    """
    from kvtool.documents.generation import CacheSection, Fidelity, GenerationDocument

    return GenerationDocument(
        model=loaded.name,
        policy=str(request.policy),
        budget=spell_budget(request.budget),
        prompt_tokens=result.prompt_tokens,
        new_tokens=result.new_tokens,
        text=result.text[0],
        token_ids=result.token_ids[0],
        cache=CacheSection.of(result.report),
        plan=plan,
        timing=_timing([result]),
        fidelity=None if result.fidelity is None else Fidelity.of(result.fidelity),
        compiled=_compiled([result]),
    )


def document_of_turns(
    request: Request,
    loaded: Loaded,
    turns: Sequence[tuple[UserTurn, Generation]],
    read: Sequence[Compressed],
    held: CacheReport,
    plan: PlanSection | None = None,
) -> GenerationDocument:
    """Put a conversation into a document.

    Args:
        turns: what was answered, and the answers.
        read: what was read beside them: the prompt, and turns whose answers were given.
        held: what the cache holds at the end.
        plan: what was taken from one for the last turn.
    """
    from kvtool.documents.generation import CacheSection, Fidelity, GenerationDocument
    from kvtool.generation.fidelity import join_fidelities

    answers = [answer for _, answer in turns]
    fidelity = join_fidelities([(each.fidelity, each.new_tokens) for each in answers])
    return GenerationDocument(
        model=loaded.name,
        policy=str(request.policy),
        budget=spell_budget(request.budget),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers)
        + sum(each.prompt_tokens for each in read),
        new_tokens=sum(each.new_tokens for each in answers),
        text="\n".join(each.text[0] for each in answers),
        token_ids=[token for each in answers for token in each.token_ids[0]],
        cache=CacheSection.of(held),
        plan=plan,
        timing=_timing(answers, sum(each.prefill_s for each in read)),
        fidelity=None if fidelity is None else Fidelity.of(fidelity),
        compiled=_compiled(answers),
        turns=[_turn(*pair) for pair in turns],
    )


def _compiled(answers: Sequence[Generation]) -> CompileSection | None:
    from kvtool.documents.generation import CompileSection
    from kvtool.generation.compiled import CompileReport

    reports = [answer.compiled for answer in answers if answer.compiled is not None]
    return CompileSection(**asdict(CompileReport.join(reports))) if reports else None


def _turn(turn: UserTurn, answer: Generation) -> TurnSection:
    from kvtool.documents.generation import CacheSection, Fidelity, TurnSection

    return TurnSection(
        user=turn.text,
        prompt_tokens=answer.prompt_tokens,
        new_tokens=answer.new_tokens,
        text=answer.text[0],
        token_ids=answer.token_ids[0],
        cache=CacheSection.of(answer.report),
        timing=_timing([answer]),
        fidelity=None if answer.fidelity is None else Fidelity.of(answer.fidelity),
    )


def _timing(answers: Sequence[Generation], before: float = 0.0) -> GenerationTiming:
    from kvtool.documents.generation import GenerationTiming

    # the first new token of an answer comes from its prompt's own forward
    steps = sum(answer.new_tokens - 1 for answer in answers)
    decode_s = sum(answer.decode_s for answer in answers)
    return GenerationTiming(
        prefill_s=before + sum(answer.prefill_s for answer in answers),
        decode_s=decode_s,
        decode_tokens_per_s=steps / decode_s if steps > 0 and decode_s > 0 else None,
    )
