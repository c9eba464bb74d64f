"""Captured rows carried as one small file, and the states made again where the training is (a GPU host, say).

    python benchmarks/quality_states.py pack RUN BUNDLE [--rows N]      a run with vocab and extract → BUNDLE (under 1 MB)
    python benchmarks/quality_states.py make BUNDLE RUN --target FOLDER  BUNDLE → a run with recipe, vocab, extract (bf16)

BUNDLE: recipe.json, contract.json, vocab/, rows.npz (token ids end to end; per row its id, length and boundary). `make`
extracts through transformers in float32, as the CPU's own extraction does, and stores bf16.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import torch

from draftsmith.contract import FILE as CONTRACT
from draftsmith.contract import Contract
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.store import StateStore, StateWriter
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.record import read_json, write_json

BATCH_TOKENS = 16384


def pack(run: Path, bundle: Path, rows: int | None) -> None:
    store = StateStore.open(run / "extract")
    entries = store.index[:rows]
    tokens = [store.read_entry(e).token_ids.numpy().astype(np.int32) for e in entries]
    bundle.mkdir(parents=True)
    shutil.copytree(run / "vocab", bundle / "vocab")
    shutil.copy(run / "extract" / CONTRACT, bundle / CONTRACT)
    shutil.copy(run / "recipe.json", bundle / "recipe.json")
    np.savez_compressed(
        bundle / "rows.npz",
        ids=np.array([e.row_id for e in entries]),
        boundary=np.array([e.boundary for e in entries], dtype=np.int32),
        length=np.array([len(t) for t in tokens], dtype=np.int32),
        tokens=np.concatenate(tokens),
    )
    size = sum(p.stat().st_size for p in bundle.rglob("*") if p.is_file())
    print(f"{len(entries)} rows, {sum(map(len, tokens)):,} tokens, {size:,} bytes")


def make(bundle: Path, run: Path, target: Path) -> None:
    recipe = read_json(bundle / "recipe.json")
    recipe["target"]["model"] = str(target.resolve())
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / "recipe.json", recipe)
    shutil.copytree(bundle / "vocab", run / "vocab", dirs_exist_ok=True)
    contract = Contract.load(bundle)
    assert contract.aux_layer_ids is not None
    with np.load(bundle / "rows.npz") as found:
        ids, boundary, length, tokens = (found[k] for k in ("ids", "boundary", "length", "tokens"))
    texts = np.split(tokens, np.cumsum(length)[:-1])
    model = TransformersStates(target, contract.aux_layer_ids, dtype=torch.float32)
    began = time.monotonic()
    order = sorted(range(len(ids)), key=lambda i: len(texts[i]))  # like with like: little padding
    with StateWriter(run / "extract", contract, make_codec("bf16")) as writer:
        at = 0
        while at < len(order):
            stop = at + 1
            while stop < len(order) and len(texts[order[stop]]) * (stop + 1 - at) <= BATCH_TOKENS:
                stop += 1
            some = order[at:stop]
            made = model.states([texts[i].tolist() for i in some], [int(boundary[i]) for i in some])
            for i, states in zip(some, made, strict=True):
                writer.add(str(ids[i]), states)
            at = stop
    seconds = time.monotonic() - began
    print(
        f"{len(ids)} rows, {len(tokens):,} tokens in {seconds:.1f} s on {model.device}: {len(tokens) / seconds:,.0f} tok/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "make"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path, help="the target's folder (make)")
    parser.add_argument("--rows", type=int, help="only the first rows (pack)")
    given = parser.parse_args()
    if given.what == "pack":
        pack(given.source, given.out, given.rows)
    elif given.target is None:
        parser.error("make needs --target")
    else:
        make(given.source, given.out, given.target)


if __name__ == "__main__":
    main()
