"""Trains a good drafter on, wrongly: for the faults of diagnose_faults.py that lie in the training itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.dialects import foreign
from draftsmith.dialects.vllm import file_name
from draftsmith.drafter.model import Drafter
from draftsmith.recipe import TrainSection
from draftsmith.target.weights import read_embedding
from draftsmith.train.batch import join
from draftsmith.train.core import HandCore
from draftsmith.train.data import split_rows, to_document
from draftsmith.train.init import target_head
from draftsmith.train.objective import supervision

BATCH = 1024


def fit(
    drafter: Path,
    store: Any,
    every: list[Any],
    target: Path,
    *,
    K: int,
    rows: int | None,
    steps: int,
    lr: float,
    seed: int,
) -> tuple[dict[str, Tensor], set[str]]:
    """The drafter's tensors (file names, bf16) after `steps` optimizer steps of K draft steps on the store's training
    rows (rows: only so many of them), and the ids of the rows that were trained on."""
    checkpoint = foreign.read(drafter, target_layers=30)
    rng = random.Random(seed)
    prompt_of = {r.row_id: r.prompt_id for r in every}
    entries = split_rows(store.index, 0.04, lambda i: prompt_of[i]).train
    entries = [e for e in entries if e.tokens > e.boundary + 16]
    if rows is not None:
        entries = rng.sample(entries, k=rows)
    chosen = entries
    sample = [store.read(e.row_id).aux.float().flatten(1) for e in entries[:40]]
    rms = torch.cat(sample).square().mean(0).sqrt().clamp(min=1e-6)
    model = Drafter(checkpoint.config)
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in checkpoint.tensors.items()}
    model.load_state_dict(tensors | {"fc.weight": tensors["fc.weight"] * rms})
    model.attach_embedding(read_embedding(target).float())
    ids = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).tolist()
    core = HandCore(model, target_head(target, ids), TrainSection(lr=lr))
    order: list[Any] = []
    for step in range(steps):
        documents, size = [], 0
        while size < BATCH:
            if not order:
                order = rng.sample(entries, k=len(entries))
            entry = order.pop()
            documents.append(to_document(entry.row_id, store.read(entry.row_id), 1 / rms, torch.float32, 512))
            size += documents[-1].tokens
        batch = join(documents)
        counts = supervision(batch, model.t2d, K).sum(1).clamp(min=1)
        core.step(batch, K, [0.8**s for s in range(K)], counts)
        core.update(lr * min(1.0, (step + 1) / 8), 1.0)
    out = {n: p.detach().clone() for n, p in model.state_dict().items()}
    out["fc.weight"] = out["fc.weight"] / rms
    files = {file_name(n): t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in out.items()}
    return files, {e.row_id for e in chosen}
