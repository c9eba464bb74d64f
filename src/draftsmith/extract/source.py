"""Where states come from: a backend that computes them, a store that keeps them, or `LiveStates` that makes them anew
each time they are asked for (extract.keep: never). The trainer sees only `StateSource`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from draftsmith.contract import Contract
from draftsmith.extract.rows import Item
from draftsmith.extract.shard import Entry
from draftsmith.extract.states import States

if TYPE_CHECKING:
    from draftsmith.extract.store import StateStore
    from draftsmith.stage import Run


class Backend(Protocol):
    """Computes states of rows. `name`: "transformers" or "vllm"."""

    name: str

    def compute(self, batch: Sequence[Item]) -> list[States]:
        """States of one batch, in its order."""

    def compute_full(self, batch: Sequence[Item]) -> list[States]:
        """As `compute`, with the final state whatever the codec keeps."""

    def stream(self, batches: Iterable[list[Item]]) -> Iterator[tuple[list[Item], list[States]]]:
        """Batches with their states, in order; an engine may work ahead."""


class StateSource(Protocol):
    """What the trainer reads from. `index`: rows with tokens, boundary, final_start (bytes 0 where nothing is stored)."""

    contract: Contract
    index: list[Entry]

    def read(self, row_id: str) -> States: ...

    def read_many(self, row_ids: Iterable[str]) -> Iterator[tuple[str, States]]: ...


def finite(states: States) -> bool:
    """False if any aux stream, final state or logit is NaN or infinite."""
    parts: list[Tensor] = [states.aux]
    if states.final is not None:
        parts.append(states.final)
    if states.topk is not None:
        parts.append(states.topk.logits)
    return all(_finite(p) for p in parts)


def _finite(x: Tensor) -> bool:
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or not x.numel():
        return bool(torch.isfinite(x).all())
    # NaN and infinity have all exponent bits set: the largest patterns of either sign. Two maxima over integers, at the
    # speed of memory, instead of torch's element by element (0.1 GB/s a core).
    bits = x.view(torch.int16).numpy()
    return bool(bits.max() < 0x7F80) and bool(bits.view("uint16").max() < 0xFF80)


class TransformersBackend:
    name = "transformers"

    def __init__(self, run: Run, contract: Contract, draft_ids: Tensor | None) -> None:
        from draftsmith.extract.transformers_backend import TransformersStates
        from draftsmith.target.resolve import resolve_target

        target, section = run.recipe.target, run.recipe.extract
        self.model = TransformersStates(
            resolve_target(target),
            contract.aux_layer_ids or [],
            trust_remote_code=target.trust_remote_code,
            draft_ids=draft_ids,
            topk=section.topk,
        )

    def compute(self, batch: Sequence[Item]) -> list[States]:
        return self.model.states([i.token_ids.tolist() for i in batch], [i.boundary for i in batch])

    def compute_full(self, batch: Sequence[Item]) -> list[States]:
        """As `compute`, with the final state whatever the codec keeps."""
        return self.model.states([i.token_ids.tolist() for i in batch], [i.boundary for i in batch], final_too=True)

    def stream(self, batches: Iterable[list[Item]]) -> Iterator[tuple[list[Item], list[States]]]:
        for batch in batches:
            yield batch, self.compute(batch)


@contextmanager
def open_backend(run: Run, contract: Contract, draft_ids: Tensor | None, name: str = "engine") -> Iterator[Backend]:
    """The recipe's backend, closed at the end. name: of the engine's log."""
    if run.recipe.extract.backend == "transformers":
        yield TransformersBackend(run, contract, draft_ids)
        return
    from draftsmith.extract import vllm_backend

    with ExitStack() as stack:
        yield vllm_backend.start(run, contract, draft_ids, stack, name)


class LiveStates:
    """States computed when they are read; nothing is stored. Same index and reads as a store.

    Rows are held as int32 token ids (4 bytes a token). `read_many` looks ahead and computes rows of like length
    together; states of a row do not depend on when they are read, but in the last bits on the rows beside it."""

    LOOKAHEAD = 4
    """Batches of rows gathered before they are sorted by length."""

    def __init__(self, rows: Iterable[Item], backend: Backend, contract: Contract, batch_tokens: int) -> None:
        self.contract, self.backend, self.batch_tokens = contract, backend, batch_tokens
        self._rows = {i.row_id: i for i in rows}
        self.index = [
            Entry(i.row_id, "", n, i.tokens, i.boundary, max(i.boundary - 1, 0), True, 0)
            for n, i in enumerate(self._rows.values())
        ]

    def __len__(self) -> int:
        return len(self.index)

    @property
    def tokens(self) -> int:
        return sum(e.tokens for e in self.index)

    def read(self, row_id: str) -> States:
        return self.backend.compute([self._rows[row_id]])[0]

    def read_many(self, row_ids: Iterable[str]) -> Iterator[tuple[str, States]]:
        from draftsmith.extract.rows import batches

        waiting: list[Item] = []
        for row_id in [*row_ids, None]:
            if row_id is not None:
                waiting.append(self._rows[row_id])
            if waiting and (row_id is None or sum(i.tokens for i in waiting) >= self.LOOKAHEAD * self.batch_tokens):
                made: dict[str, States] = {}
                for batch in batches({i.row_id: i for i in waiting}.values(), self.batch_tokens):
                    made |= zip((i.row_id for i in batch), self.backend.compute(batch), strict=True)
                for item in waiting:
                    yield item.row_id, made[item.row_id]
                waiting = []


def open_states(run: Run) -> StateStore | LiveStates:
    """The run's states: the store, or live ones where the recipe stores none. UserError before extract has run."""
    from draftsmith.extract import stage
    from draftsmith.extract.store import StateStore

    folder = run.stage_dir("extract")
    run.output_hash("extract")
    if not (folder / stage.LIVE).is_file():
        return StateStore.open(folder)
    contract = Contract.load(folder)
    _, draft_ids = stage.settle_codec(run)
    backend = TransformersBackend(run, contract, draft_ids)
    return LiveStates(stage.items(run, Counter()), backend, contract, run.recipe.extract.batch_tokens)
