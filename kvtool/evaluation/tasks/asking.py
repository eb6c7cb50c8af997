"""Tasks that ask questions and compare answers with references."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BaseModel, Field

from kvtool.evaluation.samples.sample import Json, Sample
from kvtool.evaluation.tasks.task import Task

if TYPE_CHECKING:
    from kvtool.documents.settings import Protocol
    from kvtool.evaluation.bench.ask import AskOptions
    from kvtool.evaluation.bench.bench import Bench


class AskedTurn(BaseModel):
    """A question that was asked: the answer and the right ones."""

    prediction: str
    references: Annotated[list[str], Field(min_length=1)]


class Facts(BaseModel):
    """What a score needs beside the answers; the keys that tasks use."""

    protocol: str | None = None
    all_classes: list[str] | None = None
    kinds: list[str] | None = None
    functions: list[str] | None = None
    prefix: str | None = None
    abstain: bool | None = None


class AskedRecord(BaseModel):
    """What a task that asks has recorded of a sample."""

    turns: Annotated[list[AskedTurn], Field(min_length=1)]
    facts: Facts


class Asking(Task):
    """A task that asks and compares answers with references; subclasses score one answer."""

    record: ClassVar[type[BaseModel] | None] = AskedRecord

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return ()

    @property
    def min_new_tokens(self) -> int:
        """Tokens that an answer has at least."""
        return 0

    @property
    def same_context(self) -> bool:
        """Whether every question is asked of the same compressed context."""
        return False

    @property
    def after_references(self) -> bool:
        """Whether a turn follows the reference answer to the one before, not the model's own."""
        return False

    @property
    def enable_thinking(self) -> bool | None:
        """Whether the model thinks first, for chat templates that can be told; None: theirs."""
        return None

    @property
    def conversation(self) -> bool:
        """Whether a context is the JSON list of messages, of user and assistant in turn."""
        return False

    def knows_query(self, protocol: Protocol) -> bool:
        """Tell whether the question is in the prompt that is compressed."""
        return not self.same_context and super().knows_query(protocol)

    def ask_options(self, protocol: Protocol) -> AskOptions:
        """Return how the questions are asked."""
        from kvtool.evaluation.bench.ask import AskOptions

        return AskOptions(
            query_aware=self.knows_query(protocol),
            question_kept=self.keeps_question(protocol),
            same_context=self.same_context,
            golden=self.after_references,
            chat=self.chat,
            stop=self.stop,
            min_new_tokens=self.min_new_tokens,
            thinking=self.enable_thinking,
            conversation=self.conversation,
        )

    @abstractmethod
    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Score one answer, from 0 to `best`."""

    def run(self, bench: Bench, sample: Sample) -> Json:
        """Ask every turn."""
        from kvtool.evaluation.bench.ask import ask

        turns = ask(bench, sample, self.ask_options(bench.protocol))
        return {"turns": turns, "facts": sample.facts}

    def score(self, record: Json) -> dict[str, float]:
        """Return the mean over turns."""
        turns = [
            self.score_answer(turn["prediction"], turn["references"], record["facts"])
            for turn in record["turns"]
        ]
        return {self.metric: sum(turns) / len(turns)}
