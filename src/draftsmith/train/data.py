"""From a store of states to packed batches: which rows are held out, which order, which pack comes next.

The order is a function of the rows' lengths, the seed and the epoch alone; a position in it is one number (packs
consumed), whatever the number of ranks. So a resumed run reads what an uninterrupted one would have read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.record import sha256_bytes
from draftsmith.train.batch import StepBatch, join


class RowEntry(Protocol):
    """What the order needs to know of a row (extract.store.Entry)."""

    @property
    def row_id(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def boundary(self) -> int: ...


class RowSource(Protocol):
    """extract.store.StateStore, or states computed as they are asked for."""

    contract: Contract

    @property
    def index(self) -> Sequence[Any]: ...

    def read_many(self, row_ids: Iterable[str]) -> Iterator[tuple[str, Any]]: ...


@dataclass(frozen=True)
class Split:
    """train, held_out: entries in the store's order."""

    train: list[Any]
    held_out: list[Any]


def split_rows(index: Sequence[Any], share: float, group: Callable[[str], str] | None = None) -> Split:
    """Hold out the rows whose group hashes lowest, until `share` of all rows is reached (at least one group each side).

    group: row id → what must stay together (the prompt, so that two answers to it are not on both sides). A row's side
    depends on its own hash and on how many rows there are, not on their order. UserError with fewer than 2 groups."""
    group = group or (lambda row_id: row_id)
    sizes: dict[str, int] = {}
    for e in index:
        sizes[group(e.row_id)] = sizes.get(group(e.row_id), 0) + 1
    if len(sizes) < 2:
        raise UserError(
            f"{len(index)} row(s) of {len(sizes)} prompt(s) to train from",
            "some must be held out: the best checkpoint is chosen on rows that were not trained on",
            "capture more prompts",
        )
    chosen: set[str] = set()
    count = 0
    for key in sorted(sizes, key=lambda k: sha256_bytes(f"held-out:{k}".encode())):
        if chosen and (count >= share * len(index) or len(chosen) == len(sizes) - 1):
            break
        chosen.add(key)
        count += sizes[key]
    held = [e for e in index if group(e.row_id) in chosen]
    return Split([e for e in index if group(e.row_id) not in chosen], held)


def first_tokens(rows: Sequence[Any], most: int) -> list[Any]:
    """The rows up to and with the one that brings their tokens to `most`."""
    out, total = [], 0
    for e in rows:
        if total >= most:
            break
        out.append(e)
        total += e.tokens
    return out


def require_answers(rows: Sequence[Any]) -> None:
    """UserError where the answer mask would be all zeros or all ones: a drafter trained so is worthless."""
    answers = sum(max(e.tokens - max(e.boundary, 0), 0) for e in rows)
    prompts = sum(min(max(e.boundary, 0), e.tokens) for e in rows)
    if not answers or not prompts:
        raise UserError(
            f"{len(rows)} rows hold {prompts:,} prompt tokens and {answers:,} answer tokens",
            "the loss would count "
            + ("no token at all" if not answers else "prompts as if the target had written them"),
            "the boundary of the rows is wrong: capture again",
        )


def pack_order(rows: Sequence[Any], batch_tokens: int, seed: int, epoch: int) -> list[list[str]]:
    """The packs of one epoch: row ids in a seeded order, each pack of at most batch_tokens (a longer row fills one
    alone and is cut by `read_pack`). A row that does not fit waits for the next pack of a few that are open."""
    gen = torch.Generator().manual_seed(int(sha256_bytes(f"order:{seed}:{epoch}".encode())[:15], 16))
    packs: list[list[str]] = []
    open_packs: list[tuple[int, list[str]]] = []
    for i in torch.randperm(len(rows), generator=gen).tolist():
        size = min(rows[i].tokens, batch_tokens)
        fitting = [p for p in open_packs if p[0] + size <= batch_tokens]
        if fitting:
            best = max(fitting, key=lambda p: p[0])
            open_packs.remove(best)
        else:
            best = (0, [])
        best = (best[0] + size, [*best[1], rows[i].row_id])
        open_packs.append(best)
        if len(open_packs) > 4:
            fullest = max(open_packs, key=lambda p: p[0])
            open_packs.remove(fullest)
            packs.append(fullest[1])
    return packs + [p[1] for p in open_packs]


@dataclass
class Order:
    """All packs of a run, made epoch by epoch. total: packs in the run. Several threads may ask: a stream looks ahead of the
    trainer's reader."""

    rows: Sequence[Any]
    batch_tokens: int
    seed: int
    total: int

    def __post_init__(self) -> None:
        self._epochs: list[list[list[str]]] = []
        self._lock = threading.Lock()

    def epoch(self, number: int) -> list[list[str]]:
        with self._lock:  # two that found an epoch missing would append it twice, as the next one
            while len(self._epochs) <= number:
                self._epochs.append(pack_order(self.rows, self.batch_tokens, self.seed, len(self._epochs)))
            return self._epochs[number]

    def pack(self, number: int) -> list[str]:
        """Row ids of pack `number` of the run."""
        epoch = 0
        while number >= len(self.epoch(epoch)):
            number -= len(self.epoch(epoch))
            epoch += 1
        return self.epoch(epoch)[number]

    @staticmethod
    def of_run(
        rows: Sequence[Any], batch_tokens: int, seed: int, steps: int | None, epochs: float, ranks: int = 1
    ) -> Order:
        """steps: optimizer steps, each of `ranks` packs; None = so many epochs (a fraction of the last one)."""
        order = Order(rows, batch_tokens, seed, 0)
        if steps is not None:
            order.total = steps * ranks
        else:
            whole = int(epochs)
            order.total = sum(len(order.epoch(e)) for e in range(whole))
            if epochs > whole:
                order.total += max(1, round((epochs - whole) * len(order.epoch(whole))))
        return order


def require_finite(row_id: str, **tensors: Tensor | None) -> None:
    """UserError naming the row and the tensor that holds a NaN or an infinity."""
    for name, value in tensors.items():
        # the sum of finite numbers is finite in float32 unless they are absurd: one pass, no mask
        if value is not None and not bool(torch.isfinite(value.sum(dtype=torch.float32))):
            raise UserError(
                f"row {row_id}: {name} states are not finite",
                "one such row turns every weight into NaN",
                "make the states again (draftsmith extract --force); if it comes back, the target overflows in this type",
            )


def to_document(row_id: str, states: Any, inverse_rms: Tensor | None, dtype: torch.dtype, cut: int) -> StepBatch:
    """One row as an unpadded document of `dtype`. inverse_rms float32 [A*G] scales the aux channels (init.py)."""
    T = min(states.tokens, cut)
    start = min(states.final_start, T)
    aux = states.aux[:T].flatten(1)
    final = None if states.final is None else states.final[: T - start]
    require_finite(row_id, aux=aux, final=final)
    if states.argmax is None:
        raise UserError(
            f"row {row_id} holds no argmax of the target",
            "without it nothing says which rows the engine could ever accept",
            "make the states again (draftsmith extract --force)",
        )
    aux = aux.to(dtype) if inverse_rms is None else (aux.float() * inverse_rms).to(dtype)
    index = torch.arange(T)

    def from_start(value: Tensor, fill: float) -> Tensor:
        out = value.new_full((T, *value.shape[1:]), fill)
        out[start:] = value[: T - start]
        return out

    topk = None
    if states.topk is not None:
        parts = (states.topk.ids, states.topk.logits, states.topk.rest)
        topk = tuple(from_start(x, 0) for x in parts)
    return StepBatch(
        token_ids=states.token_ids[:T].to(torch.int64),
        aux=aux,
        final=None if final is None else from_start(final.to(dtype), 0),
        final_valid=index >= start,
        argmax=from_start(states.argmax.to(torch.int64), -1),
        answer=index >= states.boundary,
        doc=torch.zeros(T, dtype=torch.int32),
        position=index,
        topk=topk,  # type: ignore[arg-type]
        spans=((0, T),),
    )


def read_pack(
    source: RowSource,
    row_ids: Sequence[str],
    batch_tokens: int,
    inverse_rms: Tensor | None,
    dtype: torch.dtype,
    pad: bool,
) -> StepBatch:
    """A pack as one sequence; `pad` fills it up to batch_tokens (fixed shapes for compiled and captured steps)."""
    documents = [to_document(i, s, inverse_rms, dtype, batch_tokens) for i, s in source.read_many(row_ids)]
    return join(documents, pad_to=batch_tokens if pad else None)


def read_ahead(load: Callable[[int], StepBatch], numbers: Iterable[int]) -> Iterator[tuple[int, StepBatch]]:
    """`load` of each number in order, the next one read in a thread while the caller works on this one."""
    with ThreadPoolExecutor(1) as pool:
        waiting = None
        for number in numbers:
            coming = (number, pool.submit(load, number))
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = coming
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def channel_rms(source: RowSource, rows: Sequence[Any], max_tokens: int = 200_000) -> Tensor:
    """float32 [A*G]: root mean square of every aux channel over the training rows (the first max_tokens of them).

    The blocks differ by an order of magnitude (1.8, 4.1 and 15.1 on SmolLM2): unscaled, the last layer's states
    drown the others."""
    total, count, chosen = None, 0, []
    for e in rows:
        if count >= max_tokens:
            break
        chosen.append(e.row_id)
        count += e.tokens
    seen = 0
    for row_id, states in source.read_many(chosen):
        aux = states.aux.flatten(1)
        require_finite(row_id, aux=aux)
        squares = aux.float().square().sum(0).double()
        total = squares if total is None else total + squares
        seen += aux.shape[0]
    if total is None:
        raise ValueError("no rows")
    # a dead channel stays as it is: dividing by almost nothing would blow its noise up
    rms = (total / seen).sqrt()
    return torch.where(rms > 1e-6 * rms.max(), rms, torch.ones_like(rms)).float()
