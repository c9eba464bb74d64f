"""draftsmith's optimizer step, timed on one GPU at the shapes of train.py: one JSON line per configuration.

    python benchmarks/train_ours.py A "7:2048:1,3:2048:1" teacher=full out=results.jsonl

A configuration is K:tokens:documents, with :0.4 behind it to supervise only the last 40 % of every document. Options:
teacher=full (first choice over the whole vocabulary found within the step, as the anchor does) or stored (it comes
with the data); lean=1 (8-bit moments); graph=1 (the step as one CUDA graph); kernel=cudnn|flash; prof=1 (kernel times
of one step into prof.txt). bf16, random states and weights, forward + backward + clip + AdamW with float32 masters.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from train_gate import Gate
from train_shapes import BF16, DEVICE, SHAPES, normal

from draftsmith.drafter.config import DrafterConfig
from draftsmith.train.batch import StepBatch
from draftsmith.train.core import MULTIPLE
from draftsmith.train.fused.adamw import FusedAdamW
from draftsmith.train.fused.arena import Arena
from draftsmith.train.fused.head import FullTeacher
from draftsmith.train.fused.layout import BLOCK, FlatParams
from draftsmith.train.fused.plan import Plan, draft_index
from draftsmith.train.fused.step import FusedStep
from draftsmith.train.objective import TargetHead


def shape_config(name: str) -> DrafterConfig:
    H, n, m, d, F, V, D = SHAPES[name]
    return DrafterConfig(
        hidden_size=H, target_hidden_size=H, vocab_size=V, draft_vocab_size=D, num_attention_heads=n,
        num_key_value_heads=m, head_dim=d, intermediate_size=F, rms_norm_eps=1e-6,
    )  # fmt: skip


class Ours:
    """One drafter of random weights with its optimizer; draft tokens' rows of the target head are x3, so that the
    target's first choice lies in the draft vocab (as in the peers' runs)."""

    def __init__(
        self, shape: str, teacher: str, lean: bool, kernel: str | None, chunk: int | None, group: object = None
    ) -> None:
        """group: process group whose ranks train together (train_two_gpus.py), as train/core.py does."""
        self.config = c = shape_config(shape)
        gen = self.gen = torch.Generator(device=DEVICE).manual_seed(0)
        self.flat = FlatParams(c, DEVICE, BF16, multiple=BLOCK if group is None else MULTIPLE)
        for p in self.flat.named.values():
            p.fill_(1.0) if p.dim() == 1 else p.copy_(normal(gen, *p.shape, std=0.02))
        ids = torch.randperm(c.vocab_size, generator=gen, device=DEVICE)[: c.draft_vocab_size].sort().values
        t2d = torch.zeros(c.vocab_size, dtype=torch.bool, device=DEVICE)
        t2d[ids] = True
        self.ids, self.t2d = ids, t2d.cpu()
        embedding = normal(gen, c.vocab_size, c.hidden_size, std=0.02)
        if teacher == "full":
            lm_head = normal(gen, c.vocab_size, c.hidden_size, std=0.02)
            lm_head[ids] *= 3.0
            full, head = FullTeacher(lm_head, ids, draft_index(t2d).int()), None
        else:
            rows = normal(gen, c.draft_vocab_size, c.hidden_size, std=0.06)
            full, head = None, TargetHead(torch.ones(c.hidden_size, device=DEVICE, dtype=BF16), 1e-6, rows)
        self.step = FusedStep(self.flat, head, embedding, self.t2d, full=full, kernel=kernel, chunk_bytes=chunk)
        self.optimizer = FusedAdamW(
            self.flat, weight_decay=0.0, betas=(0.9, 0.999), lean=lean, group=group, shard=group is not None
        )

    def data(self, K: int, length: int, docs: int, share: float) -> tuple[StepBatch, Plan]:
        """Random states and tokens; every document's last `share` of tokens is supervised."""
        c, T = self.config, length * docs
        index = torch.arange(length).repeat(docs)
        first = round(length * (1 - share))
        mask = torch.stack([(index + s + 1 < length) & (index + s >= first) for s in range(K)])
        batch = StepBatch(
            token_ids=torch.randint(c.vocab_size, (T,), generator=self.gen, device=DEVICE).cpu(),
            aux=torch.empty(0),
            final=None,
            final_valid=torch.ones(T, dtype=torch.bool),
            argmax=self.ids[torch.randint(len(self.ids), (T,), generator=self.gen, device=DEVICE)].cpu(),
            answer=index >= first,
            doc=torch.arange(docs, dtype=torch.int32).repeat_interleave(length),
            position=index,
        )
        plan = self.step.plan(batch, K, mask=mask)
        batch = batch.to(DEVICE)
        object.__setattr__(batch, "aux", normal(self.gen, T, 3 * c.target_hidden_size))
        object.__setattr__(batch, "final", normal(self.gen, T, c.target_hidden_size))
        return batch, plan


def executed_flops(c: DrafterConfig, plan: Plan, vocabulary: int) -> float:
    """Matrix products that the step executes (attention not counted), for M teacher rows over `vocabulary` tokens."""
    H, F, D = c.hidden_size, c.intermediate_size, c.draft_vocab_size
    q, kv = c.num_attention_heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim
    KR, N, M = plan.K * plan.R, len(plan.slot), len(plan.teachers)
    fused = 4 * plan.T * c.num_aux_layers * c.target_hidden_size * H
    embedding = 4 * (plan.T + plan.K - 1) * H * (q + kv)
    layer = 6 * KR * (2 * H * q + 3 * H * F) + 6 * plan.kv_rows * H * kv
    return fused + embedding + layer + 6 * N * H * D + 2 * M * c.target_hidden_size * vocabulary


def measure(ours: Ours, K: int, length: int, docs: int, opts: dict[str, str], shape: str) -> dict[str, object]:
    batch, plan = ours.data(K, length, docs, float(opts.get("mask", 1.0)))
    weights = torch.tensor([0.8**s for s in range(K)], device=DEVICE)
    if opts.get("graph") == "1":
        from draftsmith.train.fused.capture import CapturedStep

        captured = CapturedStep(ours.step, ours.optimizer, weights.tolist())

        def run() -> torch.Tensor:
            return captured(batch, plan, 1e-4)[0]
    else:

        def run() -> torch.Tensor:
            loss, _ = ours.step.loss_and_grads(batch, plan, weights)
            ours.optimizer.step(1e-4)
            return loss

    ours.step.arena = Arena(DEVICE)  # an earlier configuration's memory is not this one's
    losses = []
    began = time.time()
    for _ in range(int(opts.get("warm", 4))):
        losses.append(float(run()))
    torch.cuda.synchronize()
    warm = time.time() - began
    torch.cuda.reset_peak_memory_stats()
    static = torch.cuda.memory_allocated()
    timed = int(opts.get("timed", 8))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
    events[0].record()
    for i in range(timed):
        loss = run()
        events[i + 1].record()
    torch.cuda.synchronize()
    losses.append(float(loss))
    began = time.perf_counter()
    run()
    issue = (time.perf_counter() - began) * 1e3
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    ms = statistics.median(times)
    vocabulary = ours.config.vocab_size if ours.step.full is not None else ours.config.draft_vocab_size
    flops = executed_flops(ours.config, plan, vocabulary)
    result = {
        "side": "ours", "shape": shape, "K": K, "length": length, "documents": docs, "options": opts,
        "ms": round(ms, 3), "ms_all": [round(t, 2) for t in times], "tok_s": round(length * docs / ms * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3), "static_gib": round(static / 2**30, 3),
        "arena_gib": round(ours.step.arena.block.numel() / 2**30, 3), "executed_tflop": round(flops / 1e12, 3),
        "executed_tflops": round(flops / ms / 1e9, 1), "losses": [round(x, 4) for x in losses],
        "active_rows": plan.R, "pairs": len(plan.slot), "warm_s": round(warm, 1),
        "host_ms": round(issue, 1),
    }  # fmt: skip
    if opts.get("prof") == "1":
        profile(run, f"{shape} K={K} {docs}x{length} {opts}")
    return result


def profile(run: object, title: str) -> None:
    """Kernel times of one step, appended to prof.txt."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        run()  # type: ignore[operator]
        torch.cuda.synchronize()
    kernels = [e for e in p.key_averages() if str(e.device_type).endswith("CUDA") and e.self_device_time_total > 0]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels) / 1e3
    lines = [f"=== {title}: {total:.2f} ms of kernels"]
    lines += [f"{e.self_device_time_total / 1e3:8.3f} ms {e.count:4d}x {e.key[:110]}" for e in kernels[:45]]
    with Path("prof.txt").open("a") as f:
        f.write("\n".join(lines) + "\n")
    print("\n".join(lines[:26]), flush=True)


def main() -> None:
    shape, runs = sys.argv[1:3]
    opts = dict(a.split("=", 1) for a in sys.argv[3:])
    out = opts.pop("out", None)
    chunk = int(opts["chunk_mib"]) << 20 if "chunk_mib" in opts else None
    gate = Gate()
    gate.shared()
    ours = Ours(shape, opts.get("teacher", "full"), opts.get("lean") == "1", opts.get("kernel"), chunk)
    gate.exclusive()
    for run in runs.split(","):
        K, length, docs, *share = run.split(":")
        chosen = opts | {"mask": share[0]} if share else opts
        result = measure(ours, int(K), int(length), int(docs), chosen, shape)
        print("RESULT", json.dumps(result), flush=True)
        if out:
            with Path(out).open("a") as f:
                f.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
