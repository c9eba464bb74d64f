"""The same weights and inputs through SpecForge's step and through ours: loss per step and gradients.

    python benchmarks/train_same.py [out=results.jsonl]

Both in bf16 on the GPU, and ours in float32 on the CPU (where tests hold it to autograd in float64) as the truth that
the distances are taken from. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from train_peers import SpecForge
from train_shapes import BF16, DEVICE, SHAPES, normal

from draftsmith.drafter.config import DrafterConfig
from draftsmith.train.batch import StepBatch
from draftsmith.train.fused.head import FullTeacher
from draftsmith.train.fused.layout import FlatParams
from draftsmith.train.fused.step import FusedStep


def native(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def ours(peer: SpecForge, K: int, device: torch.device, dtype: torch.dtype) -> tuple[list[float], dict[str, Any]]:
    """Per-step losses (as SpecForge normalises them: over all rows) and gradients by native name."""
    H, n, m, d, F, V, D = SHAPES["same"]
    config = DrafterConfig(
        hidden_size=H, target_hidden_size=H, vocab_size=V, draft_vocab_size=D, num_attention_heads=n,
        num_key_value_heads=m, head_dim=d, intermediate_size=F, rms_norm_eps=1e-6,
    )  # fmt: skip
    flat = FlatParams(config, device, dtype)
    flat.load({native(k): p for k, p in peer.draft.named_parameters()})
    t = peer.batch.tensors
    T = t["input_ids"].shape[1]
    index = torch.arange(T)
    batch = StepBatch(
        token_ids=t["input_ids"][0].cpu(),
        aux=t["hidden_state"][0].to(device, dtype),
        final=t["target"][0].to(device, dtype),
        final_valid=torch.ones(T, dtype=torch.bool),
        argmax=torch.zeros(T, dtype=torch.int64),
        answer=torch.ones(T, dtype=torch.bool),
        doc=torch.zeros(T, dtype=torch.int32),
        position=index,
    )
    draft_ids = peer.ids.to(device)
    inverse = torch.full((V,), -1, dtype=torch.int32, device=device)
    inverse[draft_ids] = torch.arange(D, dtype=torch.int32, device=device)
    full = FullTeacher(peer.head.fc.weight.data.to(device, dtype), draft_ids, inverse)
    embedding = peer.draft.embed_tokens.weight.data.to(device, dtype)
    step = FusedStep(flat, None, embedding, peer.t2d.cpu(), full=full)
    mask = torch.stack([index + s + 1 < T for s in range(K)])
    plan = step.plan(batch, K, mask=mask)
    counts = torch.full((K,), float(T), device=device)
    _, stats = step.loss_and_grads(batch.to(device), plan, [0.8**s for s in range(K)], counts)
    return (stats.ce / T).tolist(), {k: g.float().cpu() for k, g in flat.grads.items()}


def main() -> None:
    K = 7
    peer = SpecForge("same", wrap=False)
    peer.prepare(K, 1024, 1, 1.0)
    peer.batch.tensors["hidden_state"] = normal(peer.gen, 1024, 3 * peer.H)[None]
    out = peer.strategy.forward_loss(peer.batch)
    out.loss.backward()
    theirs = [float(p) for p in out.metrics["plosses"]]
    their_grads = {native(k): p.grad.float().cpu() for k, p in peer.draft.named_parameters() if p.grad is not None}
    our_loss, our_grads = ours(peer, K, DEVICE, BF16)
    true_loss, true_grads = ours(peer, K, torch.device("cpu"), torch.float32)

    def total(losses: list[float]) -> float:
        return sum(x * 0.8**s for s, x in enumerate(losses))

    def distance(a: dict[str, Any]) -> dict[str, float]:
        return {k: round(float((a[k] - g).norm() / g.norm()), 5) for k, g in true_grads.items()}

    record = {
        "side": "same", "shape": SHAPES["same"], "K": K, "tokens": 1024,
        "loss": {"specforge": total(theirs), "ours": total(our_loss), "ours_float32": total(true_loss)},
        "loss_per_step": {"specforge": theirs, "ours": our_loss, "ours_float32": true_loss},
        "gradient_distance_to_float32": {"specforge": distance(their_grads), "ours": distance(our_grads)},
    }  # fmt: skip
    print("SAME", json.dumps(record), flush=True)
    for out in (a.removeprefix("out=") for a in sys.argv[1:] if a.startswith("out=")):
        with Path(out).open("a") as f:
            f.write(json.dumps(record) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the peer's background threads keep the interpreter alive otherwise


if __name__ == "__main__":
    main()
