"""The states store: a folder of safetensors shards that any row can be read from, appended to, resumed and verified.

    store.json            format, codec and its parameters, aux layers, hidden size
    contract.json         which target, which layers, which final state
    shard-00000.safetensors, .json   rows and their index with sha256 (shard.py)
    skipped.jsonl         rows that were left out, with the reason

    with StateWriter(folder, contract, make_codec("bf16")) as w:
        w.add("row-1", States(...))
    store = StateStore.open(folder)
    store.read("row-1").aux            # bf16 [T, A, G], mapped, not copied

Rows given in the same order give the same bytes, whether the writer was killed in between or not.
"""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from draftsmith.contract import Contract, require_agreement
from draftsmith.errors import UserError
from draftsmith.extract.codecs import Codec, make_codec
from draftsmith.extract.shard import Entry, Packed, ShardWriter, pack, read_index
from draftsmith.extract.states import States
from draftsmith.formats import Step, upgrade
from draftsmith.record import read_json, sha256_file, write_json

FILE = "store.json"
SKIPPED = "skipped.jsonl"
FORMAT = 1
STEPS: dict[int, Step] = {0: lambda facts: {"params": {}, **facts}}
"""Format → how to make the next one of it. 0 had no number, and no codec with parameters."""
SHARD_BYTES = 1_000_000_000
FINISHING = 4
"""Full shards that are synced and summed at a time, beside the one being filled: a core sums 1.4 GB a second, which is what
one engine gives."""
_OPEN_SHARDS = 64


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}"


def _probe(folder: Path) -> None:
    """Create the folder and write to it now: better than after an hour of computing (H05)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"1")
        probe.unlink()
    except OSError as e:
        raise UserError(
            f"states cannot be written to {folder}: {e}",
            "every row would be computed and then lost",
            "give a folder that can be written",
        ) from None


@dataclass(frozen=True)
class Prepared:
    """A row that only has to be written."""

    row_id: str
    states: States
    packed: Packed


class StateWriter:
    """Writes or goes on writing a store. contract: must have `aux_layer_ids` and `final_state`.

    A store that exists must be of the same contract and codec (UserError otherwise)."""

    def __init__(self, folder: Path, contract: Contract, codec: Codec, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.codec, self.shard_bytes = folder, codec, shard_bytes
        if not contract.aux_layer_ids:
            raise ValueError("the contract names no aux layers")
        self.aux_layers, self.hidden = len(contract.aux_layer_ids), contract.target.hidden_size
        _probe(folder)
        facts = {
            "format": FORMAT,
            "codec": codec.name,
            "params": codec.params(),
            "aux_layer_ids": contract.aux_layer_ids,
            "hidden_size": self.hidden,
        }
        if (folder / FILE).is_file():
            self._require_same(contract, facts)
        else:
            contract.save(folder)
            write_json(folder / FILE, facts)
        self.skipped = read_skipped(folder / SKIPPED, mend=True)
        self._next = 0
        self.done: set[str] = set()
        """Ids of the rows that are stored or skipped."""
        self._finishing: deque[Future[Any]] = deque()
        self._pool = ThreadPoolExecutor(FINISHING, thread_name_prefix="shard")
        self._shard = self._recover()
        self.done |= {e.row_id for e in self._shard.entries} | set(self.skipped)

    def _recover(self) -> ShardWriter:
        """The shard to go on with; `done` gets the rows of those that are finished."""
        for left in self.folder.glob(".shard-*.json.*.part"):  # killed while an index was written
            left.unlink()
        while True:
            name, following = _shard_name(self._next), _shard_name(self._next + 1)
            index, journal = self.folder / f"{name}.json", self.folder / f".{following}.journal"
            if index.is_file():
                self.done |= {e.row_id for e in read_index(index)[1]}
                (self.folder / f".{name}.journal").unlink(missing_ok=True)
                self._next += 1
                continue
            shard = ShardWriter(self.folder, name)
            if not journal.is_file():
                return shard
            if not shard.entries:  # lost, though the next were begun: their rows come again in their order
                for later in self.folder.glob(".shard-*.journal"):
                    if later.stem > f".{name}":
                        later.unlink()
                return shard
            shard.close()  # killed while it was being finished beside the next

    def _require_same(self, contract: Contract, facts: dict[str, Any]) -> None:
        require_agreement(contract, Contract.load(self.folder), "this run", str(self.folder))
        found = read_json(self.folder / FILE)
        for key, value in facts.items():
            if found.get(key) != value:
                raise UserError(
                    f"{self.folder} was begun with {key} {found.get(key)!r}, this run has {value!r}",
                    "rows of two kinds in one store could not be told apart",
                    "give another folder, or remove this one",
                )

    def add(self, row_id: str, states: States) -> None:
        """Store one row. ValueError if its shapes are wrong or the id is there already."""
        self.put(self.prepare(row_id, states))

    def prepare(self, row_id: str, states: States) -> Prepared:
        """The row as it will be stored: the work of `add` that any thread may do. ValueError if its shapes are wrong."""
        states.check_shapes(self.aux_layers)
        if states.aux.shape[2] != self.hidden:
            raise ValueError(f"aux is {states.aux.shape[2]} wide, the target's hidden size is {self.hidden}")
        fields = self.codec.encode(states)
        return Prepared(row_id, states, pack(fields))

    def put(self, row: Prepared) -> None:
        """Store a prepared row. ValueError if the id is there already."""
        if row.row_id in self.done:
            raise ValueError(f"row {row.row_id!r} is stored already")
        if not self._shard.fits(len(row.packed.fields), row.packed.size, self.shard_bytes):
            self._roll()
        self._shard.add(row.row_id, row.states, row.packed)
        self.done.add(row.row_id)

    def skip(self, row_id: str, reason: str) -> None:
        """Remember that a row was left out, and why."""
        with (self.folder / SKIPPED).open("a", encoding="utf-8") as f:
            f.write(json.dumps({"row_id": row_id, "reason": reason}) + "\n")
        self.skipped[row_id] = reason
        self.done.add(row_id)

    def _roll(self) -> None:
        """Begin the next shard; full ones are synced and summed beside it, and get their names in their order: of the
        shards without an index only the first few can be unfinished after a kill."""
        while len(self._finishing) >= FINISHING or (self._finishing and self._finishing[0].done()):
            self._first_finished()
        turn = self._finishing[-1].result if self._finishing else None
        self._finishing.append(self._pool.submit(self._shard.close, turn))
        self._next += 1
        self._shard = ShardWriter(self.folder, _shard_name(self._next))

    def _settle(self) -> None:
        """Wait for the shards that are being finished; raises what that met."""
        while self._finishing:
            self._first_finished()

    def _first_finished(self) -> None:
        self._finishing[0].result()  # one that failed stays here: no later shard may get its name without it
        self._finishing.popleft()

    def close(self) -> None:
        """Finish the open shard; the store can be appended to later (a new shard begins then)."""
        try:
            self._shard.close(self._settle)
            self._settle()
        finally:
            self._pool.shutdown()

    def __enter__(self) -> StateWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._shard.release()
            self._pool.shutdown()


def read_skipped(path: Path, mend: bool = False) -> dict[str, str]:
    """row id → reason. mend: drop a line that a kill left unfinished."""
    if not path.is_file():
        return {}
    raw = path.read_text(encoding="utf-8")
    whole, _, rest = raw.rpartition("\n")
    if rest and mend:
        path.write_text(whole + "\n" if whole else "", encoding="utf-8")
    rows = [json.loads(line) for line in whole.splitlines() if line]
    return {r["row_id"]: r["reason"] for r in rows}


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = read_json(path)
        if not isinstance(facts, dict):
            raise TypeError(type(facts).__name__)
        facts = upgrade(facts, FORMAT, STEPS, path, "states")
        wanted = {"format": int, "codec": str, "params": dict, "aux_layer_ids": list, "hidden_size": int}
        wrong = [k for k, kind in wanted.items() if not isinstance(facts[k], kind)]
        if wrong:
            raise TypeError(wrong[0])
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"{path} is broken: {type(e).__name__} {e}",
            "it says how the rows are stored",
            "copy it again from where the states came, or extract again",
        ) from None
    return dict(facts)


class StateStore:
    """A store opened for reading. `index`: its rows in the order written; `read` maps, it does not load."""

    def __init__(self, folder: Path) -> None:
        if not (folder / FILE).is_file():
            raise UserError(
                f"{folder} holds no states (no {FILE})",
                "a drafter is trained from them",
                "draftsmith extract RECIPE makes them",
            )
        self.folder = folder
        self.facts = _read_facts(folder / FILE)
        if self.facts.get("dropped"):
            raise UserError(
                f"the states in {folder} were deleted after training (extract.keep: until-trained)",
                "there is nothing left to train from",
                "draftsmith extract RECIPE --force makes them again",
            )
        self.contract = Contract.load(folder)
        self.codec = make_codec(self.facts["codec"], self.facts["params"])
        self.shards = sorted(p.stem for p in folder.glob("shard-*.json"))
        self.index: list[Entry] = []
        self._sizes: dict[str, int] = {}
        for shard in self.shards:
            record, rows = read_index(folder / f"{shard}.json")
            self.index += rows
            self._sizes[shard] = record["bytes"]
        self.skipped = read_skipped(folder / SKIPPED)
        self._by_id = {e.row_id: e for e in self.index}
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._pid = os.getpid()

    @staticmethod
    def open(folder: Path | str) -> StateStore:
        """A folder, or a URL that fsspec knows (s3://…)."""
        if "://" in str(folder):
            from draftsmith.extract.elsewhere import RemoteStore

            return RemoteStore(str(folder))
        return StateStore(Path(folder))

    @property
    def tokens(self) -> int:
        return sum(e.tokens for e in self.index)

    @property
    def bytes(self) -> int:
        return sum(e.bytes for e in self.index)

    def __len__(self) -> int:
        return len(self.index)

    def _handle(self, shard: str) -> Any:
        if self._pid != os.getpid():  # a forked reader opens its own
            self._open, self._pid = OrderedDict(), os.getpid()
        if shard not in self._open:
            from safetensors import SafetensorError

            try:
                if (size := self._size(shard)) != self._sizes[shard]:
                    has = "it is missing" if size is None else f"it has {size} bytes"
                    raise OSError(f"{has}, its index says {self._sizes[shard]} bytes")
                self._open[shard] = self._open_shard(shard)
            except (OSError, SafetensorError) as e:
                raise UserError(
                    f"{shard}.safetensors cannot be opened: {e}",
                    "its rows are lost",
                    "draftsmith states verify says what is left",
                ) from None
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]

    # where the shards are; elsewhere.py has its own

    def _size(self, shard: str) -> int | None:
        path = self.folder / f"{shard}.safetensors"
        return path.stat().st_size if path.is_file() else None

    def _digest(self, shard: str) -> str:
        return sha256_file(self.folder / f"{shard}.safetensors")

    def _open_shard(self, shard: str) -> Any:
        from safetensors import safe_open

        return safe_open(str(self.folder / f"{shard}.safetensors"), framework="pt", device="cpu")

    def size(self, shard: str) -> int:
        """Bytes of a shard, as its index has them."""
        return self._sizes[shard]

    def read(self, row_id: str) -> States:
        """One row, decoded (bf16: mapped without a copy). KeyError if it is not there."""
        return self.read_entry(self._by_id[row_id])

    def read_entry(self, entry: Entry) -> States:
        handle, prefix = self._handle(entry.shard), f"{entry.number}."
        optional = [n for n in ("argmax", "answer") if getattr(entry, n)]
        try:
            fields = {n: handle.get_tensor(prefix + n) for n in (*self.codec.fields, *optional)}
        except Exception as e:  # safetensors' own kind, whose class differs between its releases
            raise UserError(
                f"{entry.shard}.safetensors: row {entry.row_id} cannot be read: {e}",
                "the shard is not the one that its index was written for",
                "draftsmith states verify says what is left",
            ) from None
        return self.codec.decode(fields, entry.boundary, entry.final_start)

    def read_many(self, row_ids: Iterable[str]) -> Iterator[tuple[str, States]]:
        """Rows one by one, in the order asked for (the same call as LiveStates has, which computes in batches)."""
        for row_id in row_ids:
            yield row_id, self.read(row_id)

    def verify(self) -> list[str]:
        """Problems found, in words; empty if every shard has its checksum and every row its tensors."""
        problems: list[str] = []
        numbers = [int(s.removeprefix("shard-")) for s in self.shards]
        if numbers != list(range(len(numbers))):
            problems.append(f"shards are not numbered without a gap: {', '.join(self.shards)}")
        for shard in self.shards:
            name, size = f"{shard}.safetensors", self._size(shard)
            record, rows = read_index(self.folder / f"{shard}.json")
            if size is None:
                problems.append(f"{name} is missing: {len(rows)} rows lost")
                continue
            if size != record["bytes"]:
                problems.append(f"{name} has {size} bytes, its index says {record['bytes']}")
                continue
            if (found := self._digest(shard)) != record["sha256"]:
                problems.append(f"{name} is damaged: sha256 {found[:12]}…, its index says {record['sha256'][:12]}…")
                continue
            problems += [f"{name}: row {e.row_id}: {p}" for e in rows for p in self._row_problems(e)]
        counts = Counter(e.row_id for e in self.index)
        problems += [f"row {row_id} is stored {n} times" for row_id, n in counts.items() if n > 1]
        return problems

    def _row_problems(self, entry: Entry) -> list[str]:
        try:
            states = self.read_entry(entry)
            states.check_shapes(len(self.facts["aux_layer_ids"]))
        except Exception as e:  # whatever is wrong with a row is the answer here
            return [str(e)]
        if states.tokens != entry.tokens:
            return [f"{states.tokens} tokens, its index says {entry.tokens}"]
        return []


def drop(folder: Path) -> int:
    """Delete the shards of a store that has served (keep: until-trained); contract and index stay. Returns bytes freed."""
    facts = read_json(folder / FILE)
    write_json(folder / FILE, facts | {"dropped": True})
    freed = 0
    for path in sorted(folder.glob("shard-*.safetensors")):
        freed += path.stat().st_size
        path.unlink()
    return freed
