"""States that are never stored: the trainer reads them from running engines, through a bounded buffer.

To the trainer a `StreamedStates` is a source like a store. It differs in one thing: packs must be read in an order that
was announced (`expect`), because engines work ahead of the reader. Held-out rows, which are read at every validation,
are made once and kept in a small store in the stage's folder, bounded by the loop's own limit.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.extract.feed import FeedFigures, Pack
from draftsmith.extract.rows import Item, batches
from draftsmith.extract.shard import Entry
from draftsmith.extract.states import States

if TYPE_CHECKING:
    from draftsmith.extract.codecs import Codec
    from draftsmith.extract.store import StateStore
    from draftsmith.stage import Run


class PackFeed(Protocol):
    """feed.Feed, or ray_feed.RayFeed."""

    def __iter__(self) -> Iterator[tuple[Pack, list[States]]]: ...

    def close(self) -> None: ...


class StreamedStates:
    """rows: what can be asked for. open_feed: packs → a feed. kept: folder of the held-out store. codec: as stored.

    Use as a context manager; engines stop at its end."""

    def __init__(
        self,
        rows: Iterable[Item],
        contract: Contract,
        codec: Codec,
        open_feed: Callable[[Iterable[Pack]], PackFeed],
        kept: Path,
        batch_tokens: int,
        close: Callable[[], None] = lambda: None,
        figures: FeedFigures | None = None,
    ) -> None:
        self.contract, self.codec, self.open_feed, self.batch_tokens = contract, codec, open_feed, batch_tokens
        self.figures = figures or FeedFigures()
        self._kept_folder, self._close = kept, close
        self._rows = {i.row_id: i for i in rows}
        self.index = [
            Entry(i.row_id, "", n, i.tokens, i.boundary, max(i.boundary - 1, 0), True, 0)
            for n, i in enumerate(self._rows.values())
        ]
        self._kept: StateStore | None = None
        self._kept_ids: set[str] = set()
        self._feed: PackFeed | None = None
        self._coming: Iterator[tuple[Pack, list[States]]] = iter(())

    def __enter__(self) -> StreamedStates:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_feed()
        self._close()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def tokens(self) -> int:
        return sum(e.tokens for e in self.index)

    @property
    def kept_ids(self) -> set[str]:
        """Rows that `keep` has made."""
        return self._kept_ids

    def _end_feed(self) -> None:
        if self._feed is not None:
            self._feed.close()
        self._feed, self._coming = None, iter(())

    def expect(self, packs: Iterable[Sequence[str]]) -> None:
        """From now on `read_many` will be called with these lists of row ids, in this order."""
        self._end_feed()
        self._feed = self.open_feed([self._rows[i] for i in pack] for pack in packs)
        self._coming = iter(self._feed)

    def _small_packs(self, row_ids: Iterable[str]) -> Iterator[list[str]]:
        pack: list[str] = []
        size = 0
        for row_id in row_ids:
            tokens = self._rows[row_id].tokens
            if pack and size + tokens > self.batch_tokens:
                yield pack
                pack, size = [], 0
            pack.append(row_id)
            size += tokens
        if pack:
            yield pack

    def keep(self, row_ids: Sequence[str]) -> None:
        """Make the states of these rows now and keep them in the small store; those that are there stay as they are. Of
        several ranks the first makes them, in the folder that all see."""
        from draftsmith.extract.store import StateStore
        from draftsmith.train.parallel import Ranks

        ranks = Ranks.current()
        if ranks.first:  # ranks must judge a checkpoint by the same numbers
            self._make_kept(row_ids)
        ranks.wait()
        self._kept = StateStore.open(self._kept_folder)
        self._kept_ids = {e.row_id for e in self._kept.index}
        if not self._kept_ids:
            raise UserError(
                "no held-out row has finite states",
                "the best checkpoint is chosen on them; the target does not compute soundly in this type",
                "try engine.dtype or another backend (extract.backend)",
            )

    def _make_kept(self, row_ids: Sequence[str]) -> None:
        from draftsmith.extract.source import finite
        from draftsmith.extract.store import StateWriter

        with StateWriter(self._kept_folder, self.contract, self.codec) as writer:
            missing = [i for i in row_ids if i not in writer.done]
            if missing:
                self.expect(self._small_packs(missing))
            for pack, states in self._coming:
                for item, s in zip(pack, states, strict=True):
                    if finite(s):
                        writer.add(item.row_id, s)
                    else:
                        writer.skip(item.row_id, "NaN or infinite states")
        self._end_feed()

    def read(self, row_id: str) -> States:
        return next(self.read_many([row_id]))[1]

    def read_many(self, row_ids: Iterable[str]) -> Iterator[tuple[str, States]]:
        """The rows, in the order given: kept ones from their store; else the next expected pack; else, where nothing is
        expected, made now. ValueError where another pack is expected."""
        wanted = list(row_ids)
        if self._kept is not None and all(i in self._kept_ids for i in wanted):
            yield from self._kept.read_many(wanted)
            return
        if self._feed is None:
            self.expect(self._small_packs(wanted))
            for pack, states in self._coming:
                yield from ((i.row_id, s) for i, s in zip(pack, states, strict=True))
            self._end_feed()
            return
        found = next(self._coming, None)
        if found is None or [i.row_id for i in found[0]] != wanted:
            got = "none" if found is None else ", ".join(i.row_id for i in found[0][:3])
            raise ValueError(f"rows {', '.join(wanted[:3])}… were asked for, the next pack is {got}…")
        yield from ((i.row_id, s) for i, s in zip(*found, strict=True))


def open_stream(run: Run, folder: Path) -> StreamedStates:
    """The recipe's rows as a stream. folder: the train stage's; the ring and the held-out store lie in it. One rank's
    engines are its own."""
    from draftsmith.extract.buffer import FileRing, MemoryBuffer, pack_bytes
    from draftsmith.extract.engines import engines_of
    from draftsmith.extract.feed import Feed
    from draftsmith.extract.stage import items, settle_codec
    from draftsmith.train.parallel import Ranks

    section = run.recipe.train
    contract, (codec, _) = Contract.load(run.stage_dir("extract")), settle_codec(run)
    layers, hidden, rank = len(contract.aux_layer_ids or ()), contract.target.hidden_size, Ranks.current().rank
    limit, figures = int(section.stream_buffer_gb * 1e9), FeedFigures()
    # In the order in which extract would have stored them: the trainer draws its packs from a source's own order.
    rows = [i for batch in batches(items(run, Counter()), run.recipe.extract.batch_tokens) for i in batch]
    largest = pack_bytes(codec, [max(rows, key=lambda i: i.tokens)], layers, hidden) if rows else 0
    if largest > limit:
        raise UserError(
            f"train.stream_buffer_gb is {section.stream_buffer_gb}, the longest row alone takes {largest / 1e9:.2f} GB",
            "a row must fit whole",
            "raise it, or lower extract.max_length",
        )
    kept = folder / "held-out"
    if section.stream == "ray":
        from draftsmith.extract.ray_feed import RayFeed

        def by_ray(packs: Iterable[Pack]) -> PackFeed:
            return RayFeed(run, packs, codec, section.stream_engines, limit, figures)

        return StreamedStates(rows, contract, codec, by_ray, kept, section.batch_tokens, figures=figures)
    engines = engines_of(run, section.stream_engines)
    numbers = itertools.count()

    def here(packs: Iterable[Pack]) -> PackFeed:
        if section.stream == "disk":
            ring = FileRing(folder / f"ring-{rank}-{next(numbers)}", codec, layers, hidden, limit)
            return Feed(engines, packs, ring, limit, figures)
        return Feed(engines, packs, MemoryBuffer(codec, layers, hidden), limit, figures)

    def close() -> None:
        for engine in engines:
            engine.close()
        for ring in folder.glob(f"ring-{rank}-*"):
            shutil.rmtree(ring, ignore_errors=True)

    for ring in folder.glob(f"ring-{rank}-*"):
        shutil.rmtree(ring, ignore_errors=True)
    return StreamedStates(rows, contract, codec, here, kept, section.batch_tokens, close, figures)
