"""A cause of low acceptance, as it is told: what, how likely, by which evidence, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftsmith.diagnose.subject import Setup


@dataclass
class Cause:
    """score: larger = likelier; causes found by a file's plain contradiction or by counterfactual replay are in nats gained
    per token, so that they compare (rank.py). before, after: acceptance length as it is and as it would be. setup: the
    mended drafter, where one can be written; supposed: the setup that the cause supposes, writable or not."""

    id: str
    cause: str
    score: float
    evidence: list[str]
    fix: str
    before: float | None = None
    after: float | None = None
    setup: Setup | None = field(default=None, repr=False)
    supposed: Setup | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "cause": self.cause,
            "score": round(self.score, 4),
            "evidence": self.evidence,
            "fix": self.fix,
            "acceptance_length_before": self.before,
            "acceptance_length_after": self.after,
            "can_apply": self.setup is not None,
        }
