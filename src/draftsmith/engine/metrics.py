"""A server's own counters, read off its Prometheus page; differences between two readings; restarts noticed.

vLLM (v1/spec_decode/metrics.py): num_drafts, num_draft_tokens, num_accepted_tokens, num_accepted_tokens_per_pos.
SGLang: spec_verify_calls_total beside generation_tokens_total; its accept length and rate are gauges of the moment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from draftsmith.errors import Exit, UserError

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

VLLM = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
VLLM_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SGLANG = {
    "drafts": "sglang:spec_verify_calls_total",
    "tokens": "sglang:generation_tokens_total",
    "prompt_tokens": "sglang:prompt_tokens_total",
    "requests": "sglang:num_requests_total",
}
SGLANG_GAUGES = ("sglang:spec_accept_length", "sglang:spec_accept_rate")
BIRTHS = ("vllm:generation_tokens_created", "vllm:spec_decode_num_drafts_created", "process_start_time_seconds")
"""Time stamps that change when the process is another one, even if its counters have overtaken the old ones'."""


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """The samples of a Prometheus text page; comments and lines that are none are left out."""
    found = []
    for line in text.splitlines():
        match = _LINE.match(line.strip())
        if not match or line.startswith("#"):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        found.append(Sample(match[1], dict(_LABEL.findall(match[2] or "")), value))
    return found


@dataclass(frozen=True)
class Counters:
    """Counts of one server at one moment, or (after `since`) of a window. accepted_per_position[i]: drafts whose
    position i was accepted. kind: "vllm" or "sglang"; speculative: whether it drafts at all."""

    kind: str
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    preemptions: int = 0
    speculative: bool = False
    births: dict[str, float] = field(default_factory=dict, compare=False)
    gauges: dict[str, float] = field(default_factory=dict, compare=False)

    def since(self, before: Counters) -> Counters:
        """The counts of the window from `before` to now. Raises CounterResetError if the server was restarted between:
        a difference over a restart is no count of anything."""
        changed = [k for k in self.births if k in before.births and self.births[k] != before.births[k]]
        counts: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in _COUNTS}
        width = max(len(self.accepted_per_position), len(before.accepted_per_position))
        per = [_at(self.accepted_per_position, i) - _at(before.accepted_per_position, i) for i in range(width)]
        fallen = [name for name, value in counts.items() if value < 0] + [
            f"position {i}" for i, v in enumerate(per) if v < 0
        ]
        if changed or fallen:
            raise CounterResetError(", ".join(fallen or changed))
        return Counters(
            self.kind, accepted_per_position=per, speculative=self.speculative, gauges=self.gauges, **counts
        )

    def plus(self, other: Counters) -> Counters:
        """The sum of two windows."""
        width = max(len(self.accepted_per_position), len(other.accepted_per_position))
        per = [_at(self.accepted_per_position, i) + _at(other.accepted_per_position, i) for i in range(width)]
        counts: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return Counters(
            self.kind, accepted_per_position=per, speculative=self.speculative or other.speculative, **counts
        )

    @property
    def rates(self) -> list[float]:
        """accepted_per_position / drafts; [] where nothing was drafted."""
        return [n / self.drafts for n in self.accepted_per_position] if self.drafts else []

    @property
    def length(self) -> float:
        """Acceptance length: 1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS}
        return found | {"accepted_per_position": self.accepted_per_position, "kind": self.kind}

    @staticmethod
    def from_dict(found: dict[str, Any]) -> Counters:
        counts: dict[str, Any] = {name: int(found[name]) for name in _COUNTS}
        per = list(found["accepted_per_position"])
        return Counters(found["kind"], accepted_per_position=per, speculative=found["drafts"] > 0, **counts)


_COUNTS = ("drafts", "drafted", "accepted", "tokens", "prompt_tokens", "requests", "preemptions")


class CounterResetError(UserError):
    """The server was restarted (or its counters reset) inside a window."""

    def __init__(self, which: str) -> None:
        super().__init__(
            f"the server's counters were reset inside the measurement ({which})",
            "it was restarted in between: a difference over a restart counts nothing, and is never averaged over",
            "measure again on a server that stays up",
            Exit.NO,
        )


def _at(values: list[int], i: int) -> int:
    return values[i] if i < len(values) else 0


def read_counters(text: str) -> Counters:
    """The counters of a metrics page, summed over engines and models. UserError if it is neither vLLM's nor SGLang's."""
    samples = parse(text)
    names = {s.name for s in samples}
    births = {}
    for birth in BIRTHS:
        values = [s.value for s in samples if s.name == birth]
        if values:
            births[birth] = max(values)

    def total(name: str) -> int:
        return round(sum(s.value for s in samples if s.name == name))

    if any(n.startswith("vllm:") for n in names):
        per: dict[int, float] = {}
        for s in samples:
            if s.name == VLLM_PER_POSITION and s.labels.get("position", "").isdigit():
                position = int(s.labels["position"])
                per[position] = per.get(position, 0.0) + s.value
        found: dict[str, Any] = {key: total(name) for key, name in VLLM.items()}
        return Counters(
            "vllm",
            accepted_per_position=[round(per.get(i, 0.0)) for i in range(max(per, default=-1) + 1)],
            speculative=VLLM["drafts"] in names,
            births=births,
            **found,
        )
    if any(n.startswith("sglang:") for n in names):
        counts: dict[str, Any] = {key: total(name) for key, name in SGLANG.items()}
        gauges = {s.name.removeprefix("sglang:"): s.value for s in samples if s.name in SGLANG_GAUGES}
        # A verifying step yields 1 + accepted tokens; a request's first token comes from its prefill.
        accepted = max(counts["tokens"] - counts["requests"] - counts["drafts"], 0) if counts["drafts"] else 0
        return Counters(
            "sglang", accepted=accepted, speculative=SGLANG["drafts"] in names, births=births, gauges=gauges, **counts
        )
    raise UserError(
        "the metrics page holds neither vLLM's nor SGLang's counters",
        "acceptance is read off the server's own counters",
        "start SGLang with --enable-metrics; a proxy in front must pass /metrics through",
    )
