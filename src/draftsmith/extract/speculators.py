"""The data folder of `speculators` (0.9.0), read into a store and written from one, without that package.

    hidden_states/hs_{i}.safetensors   hidden_states [T, A + 1, G] (aux layers ascending, then the state before the final
                                       norm), token_ids int64 [T]
    data-00000-of-00001.arrow, state.json, dataset_info.json   rows i: input_ids, loss_mask, seq_len

(speculators/train/data.py, data_generation/offline.py.) Nothing there says which layers these are or which target; that
is the caller's contract. Reading keeps the final state at all positions and the mask as it is, so that writing gives
every tensor back bit for bit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.states import States
from draftsmith.extract.store import StateStore, StateWriter
from draftsmith.record import content_hash, write_json
from draftsmith.tensor_file import write_tensors
from draftsmith.untrusted import inside

STATES = "hidden_states"
ROW_ID = "speculators-{:08d}"


def _tables(folder: Path) -> Iterator[tuple[list[int], list[int]]]:
    """(input_ids, loss_mask) of the dataset's rows, in order."""
    import pyarrow as pa

    try:
        files = [f["filename"] for f in json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError) as e:
        raise UserError(
            f"{folder} is no data folder of speculators: state.json: {e}",
            "it names the arrow files that hold token ids and loss masks",
            "give the folder that speculators' data preparation wrote (it holds hidden_states/)",
        ) from None
    try:
        paths = [inside(folder, str(name)) for name in files]
    except ValueError as e:
        raise UserError(
            f"{folder / 'state.json'}: {e}", "files elsewhere are not part of it", "copy the folder"
        ) from None
    for path in paths:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            for batch in reader:
                ids, masks = batch.column("input_ids"), batch.column("loss_mask")
                for i in range(batch.num_rows):
                    yield ids[i].as_py(), masks[i].as_py()


def _states(path: Path, ids: list[int], mask: list[int], aux_layers: int, hidden: int) -> States:
    from safetensors import safe_open

    with safe_open(str(path), framework="pt", device="cpu") as f:
        block, tokens = f.get_tensor("hidden_states"), f.get_tensor("token_ids")
    want = (len(ids), aux_layers + 1, hidden)
    if tuple(block.shape) != want:
        raise UserError(
            f"{path} has states of shape {list(block.shape)}, want {list(want)} (tokens, aux layers and the final one, hidden)",
            "other layers, or another target, than the contract's",
            "give the aux layers that the states were made with (--aux-layers)",
        )
    if block.dtype != torch.bfloat16:
        raise UserError(
            f"{path} holds {str(block.dtype).removeprefix('torch.')}",
            "the store keeps bf16, and rounding would not be lossless",
            "make the states with a bf16 engine",
        )
    if tokens.tolist() != ids:
        raise UserError(
            f"{path}: its token ids are not those of the dataset's row", "", "remove the file and make it anew"
        )
    answer = torch.tensor(mask, dtype=torch.bool)
    first = int(answer.nonzero()[0]) if bool(answer.any()) else len(ids)
    plain = bool(answer[first:].all())
    return States(
        token_ids=tokens.long(),
        boundary=first,
        aux=block[:, :-1],
        final_start=0,
        final=block[:, -1],
        answer=None if plain else answer,
    )


def inside_or_refused(folder: Path, path: Path) -> None:
    """UserError where a link leads out of the data folder."""
    try:
        inside(folder, str(path.relative_to(folder)))
    except ValueError as e:
        raise UserError(f"{folder}: {e}", "states elsewhere are not part of it", "copy the file itself") from None


def read_speculators(source: Path, target: Path, contract: Contract) -> dict[str, Any]:
    """Make a bf16 store of a speculators data folder. contract: with the target's facts and aux layers.

    Returns {"rows", "tokens", "left_out": by reason}. UserError where files and contract disagree. Resumable."""
    contract = contract.with_(final_state="pre_norm")
    left: Counter[str] = Counter()
    rows = tokens = 0
    with StateWriter(target, contract, make_codec("bf16")) as writer:
        for i, (ids, mask) in enumerate(_tables(source)):
            path, row_id = source / STATES / f"hs_{i}.safetensors", ROW_ID.format(i)
            if path.is_symlink():
                inside_or_refused(source, path)
            if not path.is_file():
                left["no states were made for the row"] += 1
                continue
            rows, tokens = rows + 1, tokens + len(ids)
            if row_id not in writer.done:
                size = len(contract.aux_layer_ids or ())
                writer.add(row_id, _states(path, ids, mask, size, contract.target.hidden_size))
    if not rows:
        raise UserError(f"{source / STATES} holds no hs_*.safetensors", "there is nothing to read", "check the folder")
    return {"rows": rows, "tokens": tokens, "left_out": dict(left)}


def loss_mask(states: States) -> Tensor:
    """int64 [T]: 1 at answer tokens."""
    if states.answer is not None:
        return states.answer.long()
    mask = torch.zeros(states.tokens, dtype=torch.int64)
    mask[states.boundary :] = 1
    return mask


def write_speculators(store: StateStore, target: Path) -> dict[str, Any]:
    """Write a store as a speculators data folder. Where the store keeps no final state (prompt tokens before
    final_start, which carry no loss), zeros stand in. UserError if the codec keeps no final state at all."""
    import pyarrow as pa

    if store.codec.needs_topk:
        raise UserError(
            f"{store.folder} keeps top-k logits instead of final states ({store.codec.name})",
            "speculators' format has a place for the final state only",
            "extract with codec bf16 or fp8",
        )
    (target / STATES).mkdir(parents=True, exist_ok=True)
    schema = pa.schema(
        [("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
    )
    arrow = "data-00000-of-00001.arrow"
    with pa.OSFile(str(target / arrow), "wb") as sink, pa.ipc.new_stream(sink, schema) as out:
        for i, entry in enumerate(store.index):
            s = store.read_entry(entry)
            assert s.final is not None
            missing = s.final.new_zeros(s.final_start, s.final.shape[1])
            block = torch.cat([s.aux, torch.cat([missing, s.final]).unsqueeze(1)], dim=1)
            write_tensors(target / STATES / f"hs_{i}.safetensors", {"hidden_states": block, "token_ids": s.token_ids})
            columns = [[s.token_ids.tolist()], [loss_mask(s).tolist()], [s.tokens]]
            out.write_batch(
                pa.record_batch([pa.array(c, type=f.type) for c, f in zip(columns, schema, strict=True)], schema)
            )
    write_json(target / "dataset_info.json", {"citation": "", "description": "", "features": _FEATURES, "homepage": ""})
    state = {
        "_data_files": [{"filename": arrow}],
        "_fingerprint": content_hash([e.row_id for e in store.index])[:16],
        "_format_columns": ["input_ids", "loss_mask", "seq_len"],
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    write_json(target / "state.json", state)
    store.contract.save(target)
    return {"rows": len(store), "tokens": store.tokens}


def _list_of(kind: str) -> dict[str, Any]:
    return {"feature": {"dtype": kind, "_type": "Value"}, "_type": "List"}


_FEATURES = {
    "input_ids": _list_of("int64"),
    "loss_mask": _list_of("int64"),
    "seq_len": {"dtype": "int64", "_type": "Value"},
}
