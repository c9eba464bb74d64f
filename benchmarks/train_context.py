"""One long sequence on several GPUs (train.context_parallel), beside one GPU: results/train_context.json.

    torchrun --nproc-per-node 2 benchmarks/train_context.py --out benchmarks/results

Shape A, K = 7, one document, bf16, float32 masters, forward + backward + clip + AdamW:
  * the loss and every gradient of two ranks beside those of one rank on the same sequence (8k tokens; also a pack of
    uneven documents, which other kernels serve);
  * tokens/s and peak memory per rank at 32k, two ranks and one; at 64k, two ranks, and whether one can hold it.
Rows are written as they are measured; a part that fails is a row too. --seconds bounds the whole: what no longer fits
is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_ours import shape_config

from draftsmith.train.batch import StepBatch
from draftsmith.train.context import GroupExchange, slice_pack
from draftsmith.train.core import MULTIPLE
from draftsmith.train.fused.adamw import REDUCE, FusedAdamW
from draftsmith.train.fused.arena import Arena
from draftsmith.train.fused.layout import FlatParams
from draftsmith.train.fused.step import FusedStep
from draftsmith.train.objective import TargetHead, step_weights, supervision
from train import versions

GIB = 2**30
UNEVEN = (0.37, 0.25, 0.38)
"""Shares of the documents in the second comparison."""


class Bench:
    """One drafter of random weights, the same on every rank."""

    def __init__(self, shape: str, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.config = c = shape_config(shape)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        gen = torch.Generator(device=device).manual_seed(0)
        self.flat = FlatParams(c, device, self.dtype, multiple=MULTIPLE)
        for p in self.flat.named.values():
            p.fill_(1.0) if p.dim() == 1 else self.fill(p, gen, 0.02)
        ids = torch.randperm(c.vocab_size, generator=gen, device=device)[: c.draft_vocab_size].sort().values.cpu()
        self.ids, t2d = ids, torch.zeros(c.vocab_size, dtype=torch.bool)
        t2d[ids] = True
        self.t2d = t2d.to(device)
        embedding = self.fill(torch.empty(c.vocab_size, c.hidden_size, device=device, dtype=self.dtype), gen, 0.02)
        rows = self.fill(torch.empty(c.draft_vocab_size, c.hidden_size, device=device, dtype=self.dtype), gen, 0.06)
        head = TargetHead(torch.ones(c.hidden_size, device=device, dtype=self.dtype), 1e-6, rows)
        self.step = FusedStep(self.flat, head, embedding, self.t2d)
        self.optimizer: FusedAdamW | None = None

    @staticmethod
    def fill(x: torch.Tensor, gen: torch.Generator, std: float) -> torch.Tensor:
        """Normal numbers, in slices of rows."""
        for i in range(0, x.shape[0], 4096):
            part = x[i : i + 4096]
            part.copy_(torch.randn(part.shape, generator=gen, device=x.device).mul_(std))
        return x

    def pack(self, lengths: list[int], ranks: int) -> StepBatch:
        """Random states of documents of these lengths; this rank's part of them if several share it."""
        c, T = self.config, sum(lengths)
        gen = torch.Generator().manual_seed(T)
        on_device = torch.Generator(device=self.device).manual_seed(T)
        index = torch.cat([torch.arange(n) for n in lengths])
        states = torch.empty(T, 4 * c.target_hidden_size, device=self.device, dtype=self.dtype)
        self.fill(states, on_device, 1.0)
        batch = StepBatch(
            token_ids=torch.randint(c.vocab_size, (T,), generator=gen).to(self.device),
            aux=states[:, : 3 * c.target_hidden_size],
            final=states[:, 3 * c.target_hidden_size :],
            final_valid=torch.ones(T, dtype=torch.bool, device=self.device),
            argmax=self.ids[torch.randint(len(self.ids), (T,), generator=gen)].to(self.device),
            answer=torch.ones(T, dtype=torch.bool, device=self.device),
            doc=torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths)).to(self.device),
            position=index.to(self.device),
        )
        if ranks == 1:
            object.__setattr__(batch, "aux", batch.aux.contiguous())
            object.__setattr__(batch, "final", None if batch.final is None else batch.final.contiguous())
            return batch
        group = GroupExchange(dist.group.WORLD, self.rank, self.count)
        return slice_pack(batch, group, 8, 128 if self.device.type == "cuda" else 1)

    def fresh(self) -> None:
        """An earlier part's memory is not this one's."""
        self.step.arena = Arena(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def loss(self, lengths: list[int], K: int, ranks: int) -> tuple[float, list[float]]:
        """Loss and per-step cross-entropy; gradients are in flat.grad (summed over the ranks)."""
        self.fresh()
        batch = self.pack(lengths, ranks)
        counts = supervision(batch, self.t2d, K).sum(1)
        if ranks > 1:
            dist.all_reduce(counts)
        loss, stats = self.step.loss_and_grads(batch, self.step.plan(batch, K), step_weights(0.8, K), counts)
        values = torch.cat([loss.reshape(1), stats.ce]).float()
        if ranks > 1:
            dist.all_reduce(values)
            for part in self.flat.grad.split(REDUCE):
                total = part.float()
                dist.all_reduce(total)
                part.copy_(total)
        return float(values[0]), (values[1:] / counts).tolist()

    def same(self, lengths: list[int], K: int) -> dict[str, Any]:
        """Two ranks beside one: loss, cross-entropy per step, gradients."""
        one, one_ce = self.loss(lengths, K, 1)
        grad = self.flat.grad.clone()
        two, two_ce = self.loss(lengths, K, self.count)
        worst = ("", 0.0)
        for name, g in self.flat.grads.items():
            at = g.storage_offset()
            other = grad[at : at + g.numel()].view(g.shape)
            if g.numel():
                apart = float((g.float() - other.float()).norm() / other.float().norm().clamp_min(1e-20))
                worst = max(worst, (name, apart), key=lambda x: x[1])
        return {
            "part": "same", "documents": lengths, "K": K, "loss": [one, two], "loss_apart": abs(one - two) / abs(one),
            "ce": [one_ce, two_ce], "gradient_apart": worst[1], "at": worst[0],
        }  # fmt: skip

    def rate(self, tokens: int, K: int, ranks: int, timed: int) -> dict[str, Any]:
        """Time of an optimizer step, and peak memory per rank. With ranks = 1 every GPU does the same on its own."""
        self.fresh()
        shard = ranks > 1
        if self.optimizer is None or self.optimizer.shard != shard:
            self.optimizer = None
            group = dist.group.WORLD if shard else None
            self.optimizer = FusedAdamW(self.flat, weight_decay=0.0, betas=(0.9, 0.999), group=group, shard=shard)
        batch = self.pack([tokens], ranks)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        counts = torch.tensor([float(tokens - 2 - s) for s in range(K)], device=self.device)
        weights = step_weights(0.8, K)
        times, losses = [], []
        for i in range(2 + timed):
            if i == 2:
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                dist.barrier()
            self.sync()
            began = time.perf_counter()
            loss, _ = self.step.loss_and_grads(batch, self.step.plan(batch, K), weights, counts)
            self.optimizer.step(1e-4)
            self.sync()
            if i > 1:
                times.append((time.perf_counter() - began) * 1e3)
            losses.append(float(loss))
        peak = torch.cuda.max_memory_allocated() / GIB if self.device.type == "cuda" else 0.0
        mine = torch.tensor([sorted(times)[len(times) // 2], peak, losses[-1]], device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(found, mine)
        ms = max(float(x[0]) for x in found)
        return {
            "part": "rate", "ranks": ranks, "tokens": tokens, "K": K, "ms": round(ms, 2),
            "tok_s": round(tokens / ms * 1e3), "peak_gib": [round(float(x[1]), 2) for x in found],
            "loss": round(sum(float(x[2]) for x in found) / (1 if shard else self.count), 5),
        }  # fmt: skip


def record(rows: list[dict[str, Any]], machine: str, commit: str | None, command: str) -> dict[str, Any]:
    def rate(ranks: int, tokens: int) -> dict[str, Any] | None:
        return next((r for r in rows if (r.get("ranks"), r.get("tokens")) == (ranks, tokens) and "tok_s" in r), None)

    pairs = [(r, rate(1, r["tokens"])) for r in rows if r.get("ranks", 1) > 1 and "tok_s" in r]
    both = next(((two, one) for two, one in pairs if one is not None), (None, None))
    two, one = both
    return {
        "claim": "one sequence shared by two GPUs (context parallel) against one GPU, at the same length; longer ones "
        "than one GPU holds in the rows, and equality of loss and gradients",
        "command": command,
        "machine": machine,
        "versions": {k: v for k, v in versions().items() if k in ("python", "torch", "triton")},
        "date": date.today().isoformat(),
        "commit": commit,
        "ours": two["tok_s"] if two else None,
        "theirs": one["tok_s"] if one else None,
        "unit": "target tokens/s",
        "ratio": round(two["tok_s"] / one["tok_s"], 3) if two and one else None,
        "rows": rows,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    p.add_argument("--seconds", type=float, default=300.0, help="start no further part after so long")
    p.add_argument("--shape", default="A")
    p.add_argument("--steps", type=int, default=7, help="K")
    p.add_argument("--equal", type=int, default=8192, help="tokens at which one and two ranks are compared")
    p.add_argument("--both", type=int, default=32768, help="tokens that one rank can hold")
    p.add_argument("--long", type=int, default=65536, help="tokens that one rank cannot")
    p.add_argument("--timed", type=int, default=2)
    p.add_argument("--commit", help="commit to name")
    a = p.parse_args()
    began = time.monotonic()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=120))
    count, first = dist.get_world_size(), dist.get_rank() == 0
    machine = f"{count} {torch.cuda.get_device_name()}" if gpu else f"{count} CPU processes"
    rows: list[dict[str, Any]] = []

    def say(text: str) -> None:
        if first:
            print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    def write() -> None:
        if first:
            a.out.mkdir(parents=True, exist_ok=True)
            command = f"torchrun --nproc-per-node {count} benchmarks/train_context.py --out benchmarks/results"
            text = json.dumps(record(rows, machine, a.commit, command), indent=1)
            (a.out / "train_context.json").write_text(text + "\n")

    bench = Bench(a.shape, device)
    bench.sync()
    say("drafter made")
    K, half = a.steps, min(3, a.steps)
    uneven = [round(a.equal * s) for s in UNEVEN[:-1]]
    uneven.append(a.equal - sum(uneven))
    # label, row's facts if it fails, seconds that it may take on H200s, work
    parts: list[tuple[str, dict[str, Any], float, Callable[[], dict[str, Any]]]] = [
        ("same, one document", {"part": "same"}, 8, lambda: bench.same([a.equal], K)),
        (f"{count} ranks, {a.long}", {"ranks": count, "tokens": a.long, "K": K}, 20,
         lambda: bench.rate(a.long, K, count, a.timed)),
        (f"{count} ranks, {a.both}", {"ranks": count, "tokens": a.both, "K": K}, 8,
         lambda: bench.rate(a.both, K, count, a.timed)),
        (f"1 rank, {a.both}", {"ranks": 1, "tokens": a.both, "K": K}, 14, lambda: bench.rate(a.both, K, 1, a.timed)),
        ("same, uneven documents", {"part": "same"}, 4, lambda: bench.same(uneven, half)),
        (f"1 rank, {a.long}", {"ranks": 1, "tokens": a.long, "K": K}, 8, lambda: bench.rate(a.long, K, 1, a.timed)),
    ]  # fmt: skip
    for label, facts, needs, work in parts:
        late = torch.tensor(float(time.monotonic() - began + (needs if gpu else 0) > a.seconds), device=device)
        dist.broadcast(late, 0)
        if bool(late):
            rows.append(facts | {"left_out": "no time"})
            say(f"{label}: left out, no time")
        else:
            try:
                rows.append(work())
            except Exception as e:
                bench.optimizer = None
                rows.append(facts | {"failed": f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"})
            say(f"{label}: {json.dumps(rows[-1])}")
        write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
