"""The extract stage: captured rows in, hidden states out (or, with keep: never, a promise to compute them).

Order of work: aux layers are settled, the bytes are forecast and compared with the disk, a few rows are computed and
checked (self_check.py), and only then the long work starts. A killed run goes on at the batch it was in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.extract.rows import Item, batches, cut_rows
from draftsmith.record import content_hash, free_bytes, read_json, write_json
from draftsmith.stage import Run, Stage
from draftsmith.taken_over import aux_layers, layers_start

if TYPE_CHECKING:
    from draftsmith.extract.codecs import Codec
    from draftsmith.extract.source import Backend

LIVE = "live.json"
MAX_NAN = 0.01
"""Share of rows with NaN or infinite states above which extraction stops (H03)."""
DISK_MARGIN = 256 << 20


def with_layers(run: Run, contract: Contract) -> Contract:
    """The contract with its aux layers (the recipe's, else those of train.from's drafter, else 2, n//2, n-3) and the final
    state decided."""
    from draftsmith.target.config import check_aux_layers, default_aux_layers

    n, layers = contract.target.num_layers, run.recipe.extract.aux_layers
    if (start := layers_start(run.recipe)) is not None:
        layers = aux_layers(start, n)
    ids = default_aux_layers(n) if layers is None else check_aux_layers(layers, n)
    return contract.with_(aux_layer_ids=ids, final_state="pre_norm")


def settle_contract(run: Run) -> Contract:
    """The capture's (or, for fp8-topk, the vocab's) contract with aux layers and final state decided."""
    section = run.recipe.extract
    contract = Contract.load(run.stage_dir("vocab" if section.codec == "fp8-topk" else "capture"))
    return with_layers(run, contract)


def settle_codec(run: Run) -> tuple[Codec, Any]:
    """The recipe's codec, and the draft vocab's target ids (int64 [D] tensor) where the codec needs them."""
    import torch

    from draftsmith.extract.codecs import make_codec

    section = run.recipe.extract
    if section.codec != "fp8-topk":
        return make_codec(section.codec), None
    from draftsmith.vocab.map import VocabMap

    ids = torch.as_tensor(VocabMap.load(run.stage_dir("vocab")).draft_to_target())
    return make_codec("fp8-topk", {"k": section.topk, "draft_vocab_size": len(ids)}), ids


def items(run: Run, counts: Counter[str]) -> Any:
    from draftsmith.capture.rows import iter_rows

    return cut_rows(iter_rows(run.stage_dir("capture")), run.recipe.extract.max_length, counts)


def forecast(run: Run, codec: Codec, contract: Contract) -> dict[str, Any]:
    """Rows, tokens and bytes that extraction will give; rows left out by reason."""
    counts: Counter[str] = Counter()
    rows = tokens = supervised = size = 0
    for item in items(run, counts):
        rows, tokens, supervised = rows + 1, tokens + item.tokens, supervised + item.supervised
        size += codec.row_bytes(
            item.tokens, item.supervised, len(contract.aux_layer_ids or ()), contract.target.hidden_size
        )
    return {"rows": rows, "tokens": tokens, "supervised": supervised, "bytes": size, "left_out": dict(counts)}


def require_room(folder: Path, expected: dict[str, Any]) -> None:
    """UserError if the disk will not hold the forecast bytes (what is stored already counts as there)."""
    there = sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    needed, free = max(expected["bytes"] - there, 0) + DISK_MARGIN, free_bytes(folder)
    if needed > free:
        raise UserError(
            f"the states will take {expected['bytes'] / 1e9:.2f} GB ({expected['tokens']:,} tokens), "
            f"the disk under {folder} has {free / 1e9:.2f} GB free",
            "extraction would stop when the disk is full",
            "make room, set extract.codec: fp8 (half) or fp8-topk (39 %), or extract.keep: never (no disk at all)",
        )


def _store(
    run: Run, folder: Path, contract: Contract, codec: Codec, backend: Backend | None, total: int
) -> dict[str, Any]:
    from draftsmith.extract.packing import packed
    from draftsmith.extract.store import StateWriter

    started, made = time.time(), 0
    with (
        StateWriter(folder, contract, codec) as writer,
        run.ui.task("hidden states", total, "tok") as task,
    ):

        def unfinished() -> Iterator[list[Item]]:
            for batch in batches(items(run, Counter()), run.recipe.extract.batch_tokens):
                if all(i.row_id in writer.done for i in batch):
                    task.advance(sum(i.tokens for i in batch))
                else:
                    yield batch

        for batch, rows in packed(backend.stream(unfinished()), writer) if backend is not None else ():
            for item, row in rows:
                if row is None:
                    writer.skip(item.row_id, "NaN or infinite states")
                else:
                    writer.put(row)
            tokens = sum(i.tokens for i in batch)
            made += tokens
            task.advance(tokens)
            _require_few_nan(len(writer.skipped), len(writer.done))
        _require_few_nan(len(writer.skipped), len(writer.done), last=True)
        skipped = Counter(writer.skipped.values())
    seconds = time.time() - started
    return {"skipped": dict(skipped), "tokens_per_second": round(made / seconds, 1) if made else None}


def _missing(run: Run, folder: Path) -> bool:
    """Whether any row still has to be computed."""
    from draftsmith.extract.shard import read_index
    from draftsmith.extract.store import read_skipped

    there = {e.row_id for p in folder.glob("shard-*.json") for e in read_index(p)[1]}
    there |= set(read_skipped(folder / "skipped.jsonl"))
    return any(i.row_id not in there for i in items(run, Counter()))


def _require_few_nan(skipped: int, seen: int, last: bool = False) -> None:
    """Early enough to save the time, late enough that one bad row among the first is no verdict."""
    if skipped > MAX_NAN * seen and (last or seen >= 100):
        raise UserError(
            f"{skipped} of {seen} rows have NaN or infinite hidden states (limit {MAX_NAN:.0%})",
            "the target itself does not compute soundly in this type; a drafter cannot learn from it",
            "try engine.dtype or another backend (extract.backend), and test the target's own answers",
        )


def inputs(run: Run) -> dict[str, str]:
    found = {"capture": run.output_hash("capture"), "contract": content_hash(settle_contract(run).model_dump())}
    if run.recipe.extract.codec == "fp8-topk":
        found["vocab"] = run.output_hash("vocab")
    return found


def work(run: Run, folder: Path) -> dict[str, Any]:
    from draftsmith.extract.checks import run_self_check
    from draftsmith.extract.one_pass import adopt
    from draftsmith.extract.source import open_backend

    section = run.recipe.extract
    contract = settle_contract(run)
    codec, draft_ids = settle_codec(run)
    expected = forecast(run, codec, contract)
    if not expected["rows"]:
        raise UserError(
            f"no row is left to extract: {expected['left_out']}",
            "there is nothing to train from",
            "raise extract.max_length, or capture more",
        )
    for reason, count in expected["left_out"].items():
        run.ui.note(f"{count} rows {'were ' if reason == 'cut' else 'left out: '}{reason}")
    live = section.keep == "never"
    if not live:
        run.ui.note(
            f"{expected['tokens']:,} tokens, {expected['rows']:,} rows: {expected['bytes'] / 1e9:.2f} GB of states ({codec.name})"
        )
        require_room(folder, expected)
    adopted = not live and section.passes == 1 and adopt(run, folder, contract, codec)
    if adopted:
        contract.save(folder)
    with open_backend(run, contract, draft_ids) if _missing(run, folder) else nullcontext() as backend:
        report = run_self_check(run, backend, contract, folder if adopted else None)
        result: dict[str, Any] = {**expected, "codec": codec.name, "self_check": report.as_dict()}
        if live:
            contract.save(folder)
            write_json(folder / LIVE, {"max_length": section.max_length, "batch_tokens": section.batch_tokens})
            return result | {"bytes": 0, "stored": False, "output_hash": content_hash(contract.model_dump())}
        result |= _store(run, folder, contract, codec, backend, expected["tokens"])
    shards = sorted(folder.glob("shard-*.json"))
    result["bytes"] = sum(read_json(p)["bytes"] for p in shards)
    return result | {"stored": True, "output_hash": content_hash([read_json(p)["sha256"] for p in shards])}


STAGE = Stage("extract", ("target", "extract"), inputs, work)

__all__ = ["STAGE", "Item", "forecast", "settle_codec", "settle_contract"]
