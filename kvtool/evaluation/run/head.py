"""What the results say about a run as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.documents.claim import Claim
from kvtool.documents.results import Environment, ModelUsed, ResultsDocument


@dataclass(frozen=True)
class Head:
    """What the results say about the run as a whole.

    Attributes:
        started: when the run first began, in UTC.
        claim: what the recipe says that the run shows.
    """

    name: str
    argv: list[str]
    started: str
    environment: Environment
    model: ModelUsed
    seed: int
    git_commit: str | None
    claim: Claim | None = None

    @classmethod
    def of(cls, results: ResultsDocument) -> Head:
        """Read it back from results."""
        return cls(
            name=results.name,
            argv=results.argv,
            started=results.started,
            environment=results.environment,
            model=results.model,
            seed=results.seed,
            git_commit=results.git_commit,
            claim=results.claim,
        )
