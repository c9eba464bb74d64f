"""What a check sees (`Look`), what it answers (`Finding`), and how it is registered (`finding`).

    @finding("form.heads")
    def heads(look: Look) -> Finding:
        return ok("16 heads, 4 of keys and values")

A check is not called where something that it needs (catalog.py) is missing; its row is then `skip` with the reason.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from draftsmith.check.catalog import CATALOG
from draftsmith.check.drafter import Drafter
from draftsmith.check.headers import Weights, read_bytes, read_weights
from draftsmith.check.target import EMBEDDINGS, Target
from draftsmith.check.types import CheckRow, Context, Evidence, Status, TensorHeader, check

if TYPE_CHECKING:
    from draftsmith.check.release import Release
    from draftsmith.contract import Contract

MAX_MAP = 64_000_000
"""Bytes of d2t or t2d that are read: 8 million draft ids."""
_CODES = {"I64": "q", "I32": "i", "I16": "h", "U32": "I", "U64": "Q", "F32": "f", "F64": "d"}
"""dtype → array code of the types in which a map may have been saved."""


def _numbers(t: TensorHeader) -> list[Any]:
    values = array(_CODES[t.dtype], read_bytes(t))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


@dataclass(frozen=True)
class Finding:
    status: Status
    found: str
    fix: str = ""
    evidence: Sequence[Evidence] = ()


def ok(found: str, evidence: Sequence[Evidence] = ()) -> Finding:
    return Finding("pass", found, "", evidence)


def warn(found: str, fix: str, evidence: Sequence[Evidence] = ()) -> Finding:
    return Finding("warn", found, fix, evidence)


def fail(found: str, fix: str, evidence: Sequence[Evidence] = ()) -> Finding:
    return Finding("fail", found, fix, evidence)


def skip(found: str, fix: str = "") -> Finding:
    return Finding("skip", found, fix)


class Look:
    """Drafter, target and engine of a Context, ready to be asked; each part is read once."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.options = ctx, ctx.options

    @cached_property
    def drafter(self) -> Drafter:
        folder, raw = self.ctx.drafter_folder, self.ctx.drafter_config
        assert folder is not None and raw is not None, "missing() was asked first"
        return Drafter(folder, str(self.ctx.__dict__.get("typed_drafter", folder)), raw, read_weights(folder))

    @cached_property
    def target(self) -> Target:
        raw = self.ctx.target_config
        assert raw is not None, "missing() was asked first"
        folder = self.ctx.target_folder
        return Target(folder, raw, read_weights(folder, EMBEDDINGS) if folder else Weights())

    @cached_property
    def release(self) -> Release:
        from draftsmith.check.release import Release

        assert self.ctx.engine is not None, "missing() was asked first"
        return Release.of(self.ctx.engine)

    @property
    def engine_known(self) -> bool:
        return self.ctx.engine is not None

    @cached_property
    def contract(self) -> Contract | None:
        return self.ctx.contract

    # The map is read without numpy, whose import takes a tenth of the whole answer.

    @cached_property
    def d2t(self) -> list[int] | None:
        """d2t as whole numbers [D]; None where it is absent, of another type, too long or not one-dimensional."""
        t = self.drafter.tensors.get("d2t")
        if t is None or len(t.shape) != 1 or t.dtype not in _CODES or t.end - t.start > MAX_MAP:
            return None
        values = _numbers(t)
        if t.dtype.startswith("F"):
            if not all(math.isfinite(x) and x == math.floor(x) for x in values):
                return None
            return [int(x) for x in values]
        return values

    @cached_property
    def t2d(self) -> list[int] | None:
        """Target ids that t2d marks, ascending; None where it is no mask [V]."""
        t = self.drafter.tensors.get("t2d")
        if t is None or len(t.shape) != 1 or t.dtype not in ("BOOL", "U8", "I8") or t.end - t.start > MAX_MAP:
            return None
        return [i for i, byte in enumerate(read_bytes(t)) if byte]

    @cached_property
    def drafted(self) -> list[int] | None:
        """Target ids that the drafter proposes [D], i + d2t[i]; None without a map of whole numbers."""
        return None if self.d2t is None else [i + offset for i, offset in enumerate(self.d2t)]

    def missing(self, needs: Sequence[str]) -> str | None:
        """Why a check cannot be made, or None."""
        if self.ctx.drafter_config is None or self.ctx.drafter_folder is None:
            return "no drafter given"
        for need in needs:
            if reason := getattr(self, f"_no_{need}")():
                return str(reason)
        return None

    def _no_target(self) -> str | None:
        return "no target given" if self.ctx.target_config is None else None

    def _no_headers(self) -> str | None:
        if self.drafter.readable:
            return None
        if self.drafter.weights.problems:
            return "the weights cannot be listed (form.files)"
        return "no safetensors file to list"

    def _no_map(self) -> str | None:
        return self._no_headers()

    def _no_deep(self) -> str | None:
        return None if self.options.deep else "needs --deep"

    def _no_contract(self) -> str | None:
        return "no contract.json beside the drafter" if self.contract is None else None

    def _no_rows(self) -> str | None:
        return None if self.ctx.__dict__.get("rows_folder") else "needs --rows"

    def _no_engine(self) -> str | None:
        return "no engine given and none found" if self.ctx.engine is None else None


def look_of(ctx: Context) -> Look:
    """The one Look of a Context."""
    found = ctx.__dict__.get("look")
    if found is None:
        found = ctx.__dict__["look"] = Look(ctx)
    return found


def finding(row_id: str) -> Callable[[Callable[[Look], Finding]], Callable[[Look], Finding]]:
    """Register a check under its catalog id."""
    spec = CATALOG[row_id]

    def decorate(function: Callable[[Look], Finding]) -> Callable[[Look], Finding]:
        def run(ctx: Context) -> Iterator[CheckRow]:
            look = look_of(ctx)
            reason = look.missing(spec.needs)
            f = skip(reason) if reason else function(look)
            yield CheckRow(row_id, spec.group, f.status, f.found, list(f.evidence), f.fix)

        run.__module__, run.__name__ = function.__module__, function.__name__
        check(spec.group, (row_id,))(run)
        return function

    return decorate
