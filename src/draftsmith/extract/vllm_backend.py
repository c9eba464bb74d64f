"""Hidden states through vLLM, in a second pass over rows that exist: prefill only, many rows in flight.

The engine is started with our plugin, which hands over the streams (wire.py). Rows are asked for ahead of the one that
is being stored, so that the engine never waits; how far ahead is bounded in bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from draftsmith.contract import Contract
from draftsmith.errors import Exit, UserError
from draftsmith.extract.head import WeightsHead
from draftsmith.extract.post import Poster
from draftsmith.extract.rows import Item
from draftsmith.extract.states import States
from draftsmith.extract.wire import Wire

if TYPE_CHECKING:
    from draftsmith.engine.server import Server
    from draftsmith.stage import Run

AHEAD_BYTES = 2 << 30
"""States that may wait between engine and store."""
REQUESTS = 64


class VllmBackend:
    """A running engine with the plugin. server: started with `wire`'s environment and arguments."""

    name = "vllm"

    def __init__(
        self, server: Server, wire: Wire, target: Path, hidden: int, draft_ids: Tensor | None, topk: int
    ) -> None:
        self.server, self.wire, self.target, self.topk = server, wire, target, topk
        self.head = WeightsHead(target, draft_ids) if draft_ids is not None else None
        self._row_bytes = 2 * hidden * len(wire.layers)
        self._http = Poster(server.url)
        self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="ask")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def _ask(self, item: Item) -> States:
        name, fields = self.wire.ask(item.boundary)
        body = {
            "model": self.server.name,
            # A row that fills the engine's length leaves no room for the one token that must be asked for: its last
            # token stays out, whose state nothing is learnt from (wire.py lets the one before stand in).
            "prompt": item.token_ids[: self.server.max_model_len - 1].tolist(),
            "max_tokens": 1,
            "temperature": 0,
            **fields,
        }
        try:
            status, answer = self._http.post("/v1/completions", body)
        except (OSError, HTTPException) as e:
            self.server.require_alive()
            raise UserError(f"{self.server.url}: {type(e).__name__} {e}", "", "see the engine's log", Exit.NO) from None
        if status != 200:
            text = answer[:300].decode(errors="replace")
            raise UserError(f"the engine refused a row: {text}", "", "see the engine's log", Exit.NO)
        return self.wire.take(name, item.token_ids.tolist(), item.boundary, self.server.require_alive)

    def _collect(self, made: Sequence[Future[States]], full: bool) -> list[States]:
        out = []
        for future in made:
            s = future.result()
            if self.head is not None and s.final is not None:
                s = replace(s, topk=self.head.topk(s.final, self.topk), final=s.final if full else None)
            out.append(s)
        return out

    def stream(self, batches: Iterable[list[Item]]) -> Iterator[tuple[list[Item], list[States]]]:
        """Batches with their states, in order."""
        waiting: deque[tuple[list[Item], list[Future[States]]]] = deque()
        ahead = 0
        for batch in batches:
            waiting.append((batch, [self._pool.submit(self._ask, i) for i in batch]))
            ahead += sum(i.tokens for i in batch) * self._row_bytes
            while ahead > AHEAD_BYTES and len(waiting) > 1:
                first, made = waiting.popleft()
                ahead -= sum(i.tokens for i in first) * self._row_bytes
                yield first, self._collect(made, full=False)
        while waiting:
            first, made = waiting.popleft()
            yield first, self._collect(made, full=False)

    def compute(self, batch: Sequence[Item]) -> list[States]:
        return self._collect([self._pool.submit(self._ask, i) for i in batch], full=False)

    def compute_full(self, batch: Sequence[Item]) -> list[States]:
        """As `compute`, with the final state whatever the codec keeps."""
        return self._collect([self._pool.submit(self._ask, i) for i in batch], full=True)


def start(run: Run, contract: Contract, draft_ids: Tensor | None, stack: Any, name: str = "engine") -> VllmBackend:
    """Start the recipe's engine with the plugin; wire, server and backend are closed with `stack` (an ExitStack).
    name: of its log in the extract stage's folder."""
    from draftsmith.engine.find import find_engine
    from draftsmith.engine.server import Server, serve_section
    from draftsmith.target.config import load_config, text_config
    from draftsmith.target.resolve import resolve_target

    section, folder = run.recipe.extract, run.stage_dir("extract")
    target = resolve_target(run.recipe.target)
    wire = stack.enter_context(Wire(contract, folder))
    given = serve_section(run.recipe.engine)
    given["max_model_len"] = max(given["max_model_len"], section.max_length + 1)
    if isinstance(most := text_config(load_config(target)).get("max_position_embeddings"), int):
        given["max_model_len"] = min(given["max_model_len"], most)  # the engine refuses to start beyond it
    given["args"] = [*given["args"], *wire.arguments()]
    given["env"] = wire.environment(given["env"])
    server = stack.enter_context(
        Server(find_engine(run.recipe.engine.path), target, log=folder / f"{name}.log", ui=run.ui, **given)
    )
    backend = VllmBackend(server, wire, target, contract.target.hidden_size, draft_ids, section.topk)
    stack.callback(backend.close)
    return backend
