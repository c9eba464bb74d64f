"""What a fault of _diagnose_table.py spoils, and the register of all faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.capture.rows import Row
from draftsmith.extract.states import States


@dataclass
class Case:
    """A good case, to be spoilt. config, tensors: the drafter's files; rows: None = the capture as it is; states: a few
    rows of the store; bench: None = not measured; ids: the ids it was trained on; final_state: as the store's contract calls
    it."""

    rng: random.Random
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    states: dict[str, States]
    ids: list[int]
    layers: int
    table: Tensor
    good_length: float
    good_first: float
    rows: list[Row] | None = None
    bench: dict[str, Any] | None = None
    final_state: str = "pre_norm"
    served: dict[str, Any] = field(default_factory=dict)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.rng.randrange(1 << 30))

    def map_ids(self) -> Tensor:
        return torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]

    def set_map(self, ids: Tensor) -> None:
        self.tensors["d2t"] = ids - torch.arange(len(ids))
        self.tensors["t2d"] = torch.zeros(self.config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)


@dataclass(frozen=True)
class Fault:
    """put: spoils the case and returns the words that the true cause must hold; needs: what the suite must lend it
    ("target": a spoilt copy of the target makes the states; "fit": the drafter is trained on, wrongly)."""

    name: str
    expect: tuple[str, ...]
    put: Callable[[Case], list[str]]
    needs: str = ""


FAULTS: dict[str, Fault] = {}


def fault(*expect: str, needs: str = "") -> Callable[[Callable[[Case], list[str]]], Callable[[Case], list[str]]]:
    def register(put: Callable[[Case], list[str]]) -> Callable[[Case], list[str]]:
        name = put.__name__
        FAULTS[name] = Fault(name, expect, put, needs)
        return put

    return register
