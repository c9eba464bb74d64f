"""Are these the right states? Checked on a few rows before the long work, with the name of what is off.

The final state through norm and lm_head must give the engine's own most likely token, and each aux stream must agree
with the stream that transformers itself reports for that layer. Where either does not hold, the neighbours are
tried (layer k ± 1 and all others, norm left out or applied twice, one position early or late): the one that fits is
the fault. One look at the tokens finds what otherwise shows as 5 % lower acceptance after training (H02).

`collect_engine_tops` runs while the server is up, at the end of capture; it writes nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draftsmith.errors import Exit, UserError
from draftsmith.record import read_json, write_json
from draftsmith.ui import Ui

if TYPE_CHECKING:
    from torch import Tensor

FILE = "self_check.json"
MOST_TOKENS, FEWEST_ANSWERS = 512, 16
AGREES_FLOAT32, AGREES_BF16 = 1e-4, 2e-2
"""Relative L2 within which two streams agree (architecture.md, Words)."""
TIE = 0.15
"""Nats between an engine's first and second choice that bf16 may turn round: its step is 0.125 at logits of 16 to 32."""


class _Row(Protocol):
    @property
    def row_id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def boundary(self) -> int: ...


class _Client(Protocol):
    async def model(self) -> str: ...

    async def prompt_logprobs(self, token_ids: Sequence[int], top: int = 1) -> list[list[tuple[int, float]]]: ...


async def collect_engine_tops(client: _Client, rows: Iterable[_Row]) -> dict[str, Any]:
    """The engine's most likely token at every position of a few rows (vLLM's prompt_logprobs).

    Returns {"model", "rows": [{"row_id", "boundary", "token_ids": [T], "top": [T], "tied": [T]}]}; top[t] is the most
    likely token *at* t given those before it, -1 at 0; tied[t] the runner-up if it is within TIE of it, else -1.
    Capture stores it as `self_check.json` in its folder."""
    found = []
    for row in rows:
        ranked = await client.prompt_logprobs(row.token_ids, top=2)
        top = [r[0][0] if r else -1 for r in ranked]
        tied = [r[1][0] if len(r) > 1 and r[0][1] - r[1][1] <= TIE else -1 for r in ranked]
        one = {"row_id": row.row_id, "boundary": row.boundary, "token_ids": list(row.token_ids)}
        found.append({**one, "top": top, "tied": tied})
    return {"model": await client.model(), "rows": found}


def leave_references(
    folder: Path, url: str, model: str | None, api_key: str | None, rows: Iterable[_Row], count: int, ui: Ui
) -> None:
    """Ask a running server for the engine's most likely tokens on `count` of the rows and store them in `folder`.

    The first rows with at least 16 answer tokens within the first 512. A server that cannot answer so (no
    prompt_logprobs) is a warning: extraction then checks against something weaker and says so."""
    from itertools import islice

    from draftsmith.engine.client import EngineClient

    def cut(row: _Row) -> _Cut:
        return _Cut(row.row_id, list(row.token_ids[:MOST_TOKENS]), row.boundary)

    fit = (cut(r) for r in rows if min(len(r.token_ids), MOST_TOKENS) - r.boundary >= FEWEST_ANSWERS)
    chosen = list(islice(fit, count))
    if not chosen:
        return

    async def ask() -> dict[str, Any]:
        async with EngineClient(url, model, api_key=api_key, retries=1) as client:
            return await collect_engine_tops(client, chosen)

    try:
        write_json(folder / FILE, asyncio.run(ask()))
    except UserError as e:
        ui.warn(f"the server gives no prompt logprobs to verify hidden states against: {e.what}")


@dataclass(frozen=True)
class _Cut:
    row_id: str
    token_ids: list[int]
    boundary: int


@dataclass(frozen=True)
class Reference:
    """What the target says at each position of a row. top[t] = most likely token at t (-1: not known).
    source: in words, e.g. "the engine's prompt logprobs". tied[t]: another token as likely within rounding (-1: none)."""

    row_id: str
    token_ids: list[int]
    boundary: int
    top: list[int]
    source: str
    tied: list[int] = field(default_factory=list)

    def cut(self, length: int) -> Reference:
        """Its first `length` positions."""
        n = length
        return replace(self, token_ids=self.token_ids[:n], top=self.top[:n], tied=self.tied[:n])


def load_references(folder: Path) -> list[Reference]:
    """References that capture left in `folder/self_check.json`; empty where it left none."""
    path = folder / FILE
    if not path.is_file():
        return []
    return [
        Reference(
            r["row_id"], r["token_ids"], r["boundary"], r["top"], "the engine's prompt logprobs", r.get("tied", [])
        )
        for r in read_json(path)["rows"]
    ]


@dataclass
class Report:
    """What the self-check found; `result` part of the stage's record."""

    source: str = "none"
    positions: int = 0
    agreement: float | None = None
    aux: dict[int, float] = field(default_factory=dict)
    """id → relative L2 against the hooked forward."""
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "reference": self.source,
            "positions": self.positions,
            "final_agreement": self.agreement,
            "aux_relative_l2": {str(k): v for k, v in self.aux.items()},
            "problems": self.problems,
        }


NormHead = Callable[["Tensor", int], "Tensor"]
"""(final [M, G] before the norm, times the norm is applied) → most likely token [M]."""


def agreement(predicted: Tensor, start: int, reference: Reference) -> tuple[int, int]:
    """(equal, compared): predicted[i] is the token after position start + i, start ≥ -1 … of the row. A position at
    which we take the other one of two that are equally likely within rounding says nothing, and is not compared."""
    equal = compared = 0
    for i, token in enumerate(predicted.tolist()):
        t = start + i + 1
        if 0 < t < len(reference.top) and reference.top[t] >= 0:
            if t < len(reference.tied) and token == reference.tied[t]:
                continue
            compared += 1
            equal += token == reference.top[t]
    return equal, compared


def check_final(
    finals: Sequence[tuple[Tensor, int]],
    references: Sequence[Reference],
    head: NormHead,
    minimum: float,
    identify: Callable[[], str | None] = lambda: None,
) -> tuple[float, int, str | None]:
    """Agreement with the references, positions compared, and what is off (None if at least `minimum` agree).

    finals: (final [M, G], final_start) per reference. identify(): which stream of the target the finals really are, where
    that can be told."""

    def rate(times: int, shift: int) -> tuple[float, int]:
        equal = compared = 0
        for (final, start), reference in zip(finals, references, strict=True):
            e, c = agreement(head(final, times), start + shift, reference)
            equal, compared = equal + e, compared + c
        return (equal / compared if compared else 0.0), compared

    here, compared = rate(1, 0)
    if here >= minimum:
        return here, compared, None
    trials = [(rate(0, 0)[0], "norm: the final norm is applied already (one application too many)")]
    for shift in (-2, -1, 1, 2):
        side = "late" if shift < 0 else "early"
        text = f"alignment: the states are {abs(shift)} position(s) too {side}"
        trials.append((rate(1, shift)[0], text))
    if stream := identify():
        return here, compared, f"layer: it is {stream}"
    best, text = max(trials, key=lambda t: t[0], default=(0.0, ""))
    if best >= minimum and best > here:
        return here, compared, f"{text} ({best:.1%} agree that way)"
    return here, compared, f"neither layer, norm nor alignment explains it (best other reading: {best:.1%}, {text})"


def relative_l2(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in float32."""
    x, y = a.float(), b.float()
    return float((x - y).norm() / y.norm().clamp(min=1e-12))


def check_aux(
    aux: Tensor, ids: Sequence[int], streams: Tensor, tolerance: float
) -> tuple[dict[int, float], dict[int, str]]:
    """aux [T, A, G] against streams [n + 1, T, G] (index = id). Returns id → relative L2, and id → problem in words."""
    errors: dict[int, float] = {}
    problems: dict[int, str] = {}
    for a, k in enumerate(ids):
        got = aux[:, a]
        errors[k] = relative_l2(got, streams[k])
        if errors[k] <= tolerance:
            continue
        tries = [
            (relative_l2(got, streams[j]), f"layer: it is the stream entering layer {j}") for j in range(len(streams))
        ]
        for shift in (-1, 1):
            cut, want = (got[1:], streams[k][:-1]) if shift < 0 else (got[:-1], streams[k][1:])
            if len(cut):
                side = "late" if shift < 0 else "early"
                tries.append((relative_l2(cut, want), f"alignment: it is one position too {side}"))
        best, text = min(tries)
        if best > tolerance:
            text = f"neither a neighbouring layer nor a shift explains it (nearest: {text}, {best:.2g})"
        problems[k] = f"aux id {k} differs from the hooked forward by {errors[k]:.2g} (limit {tolerance:g}): {text}"
    return errors, problems


def require(report: Report, minimum: float) -> None:
    """UserError (exit 1) if the report has problems."""
    if report.problems:
        raise UserError(
            "the self-check of the hidden states failed: " + "; ".join(report.problems),
            "a drafter trained on them would be accepted rarely, and nothing later would say why",
            "mend what is named; nothing was stored",
            Exit.NO,
        )
