"""The trainer on two GPUs of one host beside one of them, in one run: results/train_two_gpus.json.

    NCCL_NVLS_ENABLE=0 python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/train_two_gpus.py \\
        [--runs A:7:4096,B:7:4096] [--out benchmarks/results] [--seconds 100]

Rates: the hand-written step at the shapes of train.py, 4,096 tokens a rank, first choice found within the step; every rank
has its own pack, gradients are summed in float32 (reduce-scatter), each rank keeps half of the moments and the new weights
are gathered. "one" is rank 0 by itself on half as many tokens, while the other GPU idles.

Equality: the same optimizer steps of two packs by one process and by two ranks, through train/core.py's `build`, as the
train stage does it: hand-written step in bfloat16, reference and MLA form (FSDP2) in float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_ours import Ours, executed_flops
from train_shapes import BF16, DEVICE

from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter
from draftsmith.recipe import TrainSection
from draftsmith.record import versions, write_json
from draftsmith.train.batch import StepBatch, join
from draftsmith.train.core import HandCore, ReferenceCore, build
from draftsmith.train.fused.arena import Arena
from draftsmith.train.objective import TargetHead, step_weights, supervision
from draftsmith.train.parallel import process_group

MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
STEPS, K = 8, 3


# equality


def small_config(form: str) -> DrafterConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 256, "target_hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 512, "vocab_size": 2000, "draft_vocab_size": 1024, "aux_layer_ids": [1, 2, 3],
    }  # fmt: skip
    if form == "mla":
        sizes |= {"form": "mla", "mla": MLA, "num_key_value_heads": 4}
    return DrafterConfig.model_validate(sizes)


def make(form: str, device: torch.device, alone: bool) -> Any:
    """A small drafter and its core; `alone`: of one process, whatever group is up."""
    config, dtype = small_config(form), BF16 if form == "hand" and device.type == "cuda" else torch.float32
    gen = torch.Generator().manual_seed(3)
    model = Drafter(config)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0) if p.dim() == 1 else p.copy_(torch.randn(p.shape, generator=gen) * p.shape[1] ** -0.5)
    model.attach_embedding(torch.randn(config.vocab_size, config.hidden_size, generator=gen))
    ids = torch.randperm(config.vocab_size, generator=gen)[: config.draft_vocab_size].sort().values
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    model.set_vocab(ids - torch.arange(len(ids)), t2d)
    G = config.target_hidden_size
    head = TargetHead(torch.ones(G), 1e-6, torch.randn(len(ids), G, generator=gen) * 0.1)
    model, head = model.to(device, dtype), head.to(device, dtype)
    section = TrainSection.model_validate({"steps": STEPS, "ttt_steps": K})
    if alone:
        return HandCore(model, head, section) if form == "hand" else ReferenceCore(model, head, section)
    return build(model, head, section, hand=form == "hand")


def packs(config: DrafterConfig, dtype: torch.dtype) -> list[StepBatch]:
    """Two packs of 512 tokens, of unlike documents."""
    gen = torch.Generator().manual_seed(4)
    found = []
    for sizes in ((300, 180), (128, 128, 200)):
        parts = []
        for n in sizes:
            index = torch.arange(n)
            parts.append(
                StepBatch(
                    token_ids=torch.randint(config.vocab_size, (n,), generator=gen),
                    aux=torch.randn(n, 3 * config.target_hidden_size, generator=gen).to(dtype),
                    final=torch.randn(n, config.target_hidden_size, generator=gen).to(dtype),
                    final_valid=torch.ones(n, dtype=torch.bool),
                    argmax=torch.randint(config.vocab_size, (n,), generator=gen),
                    answer=index >= n // 4,
                    doc=torch.zeros(n, dtype=torch.int32),
                    position=index,
                )
            )
        found.append(join(parts, pad_to=512))
    return found


def steps_of(core: Any, batches: list[StepBatch], device: torch.device, total: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every optimizer step on the same batches. total: sums over the ranks.

    The hand-written step takes several packs as one; autograd adds their gradients, so its shapes stay the ranks'."""
    if isinstance(core, HandCore) and len(batches) > 1:
        batches = [join(batches)]
    moved = [b.to(device) for b in batches]
    out = []
    for _ in range(STEPS):
        counts = total(sum(supervision(b, core.model.t2d, K).sum(1) for b in moved))
        loss = sum(core.step(b, K, step_weights(0.8, K), counts)[0] for b in moved)
        norm = core.update(1e-3, 1.0)
        out.append((float(total(torch.as_tensor(loss).reshape(1).float())), float(norm)))
    return out


def equality(ranks: Any, device: torch.device, form: str) -> dict[str, Any] | None:
    """On rank 0: how far two ranks' steps are from one process's, and whether that is rounding."""
    dtype = BF16 if form == "hand" and device.type == "cuda" else torch.float32
    both = packs(small_config(form), dtype)
    together = steps_of(make(form, device, False), both[ranks.rank :: ranks.count], device, ranks.sum)
    if not ranks.first:
        return None
    alone = steps_of(make(form, device, True), both, device, lambda x: x)
    loss, norm = (max(abs(a[i] / b[i] - 1) for a, b in zip(together, alone, strict=True)) for i in (0, 1))
    bar = 5e-3 if dtype == BF16 else 1e-4
    return {"what": f"two ranks against one process, {form}", "dtype": str(dtype).removeprefix("torch."), "steps": STEPS,
            "loss_relative": float(f"{loss:.2e}"), "norm_relative": float(f"{norm:.2e}"), "at_most": bar, "holds": loss <= bar,
            "first_loss": round(alone[0][0], 5), "last_loss": round(alone[-1][0], 5)}  # fmt: skip


# rates


def rate(shape: str, steps: int, length: int, ranks: int, rank: int, timed: int = 8) -> dict[str, Any]:
    """Median step of this rank, in a group of `ranks` (1: by itself)."""
    group = dist.group.WORLD if ranks > 1 else None
    ours = Ours(shape, "full", False, None, None, group)
    batch, plan = ours.data(steps, length, 1, 1.0)
    weights = torch.tensor([0.8**s for s in range(steps)], device=DEVICE)
    counts = plan.counts * ranks
    ours.step.arena = Arena(DEVICE)
    losses, events = [], [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
    for n in range(4 + timed):
        if n == 4:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            events[0].record()
        loss, _ = ours.step.loss_and_grads(batch, plan, weights, counts)
        ours.optimizer.step(1e-4)
        if n >= 4:
            events[n - 3].record()
        losses.append(loss.detach().clone())
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    peak = torch.cuda.max_memory_allocated() / 2**30
    flops = executed_flops(ours.config, plan, ours.config.vocab_size)
    found = {"ranks": ranks, "rank": rank, "shape": shape, "K": steps, "tokens_per_rank": length, "ms": round(ms, 2),
             "tok_s": round(ranks * length / ms * 1e3), "peak_gib": round(peak, 3),
             "executed_tflops_per_rank": round(flops / ms / 1e9, 1),
             "losses": [round(float(x) * ranks, 4) for x in (losses[0], losses[-1])]}  # fmt: skip
    del ours, batch, plan, loss
    torch.cuda.empty_cache()
    return found


def record(rows: list[dict[str, Any]], out: Path) -> None:
    rates = [r for r in rows if "ms" in r]
    first = next((r for r in rates if r["ranks"] == 2), None)
    if first is None:
        return
    one = next(r for r in rates if r["ranks"] == 1 and r["shape"] == first["shape"])
    for r in rates:
        if r["ranks"] == 2:
            base = next(o for o in rates if o["ranks"] == 1 and o["shape"] == r["shape"])
            r["scaling"] = round(r["tok_s"] / base["tok_s"], 3)
    name = torch.cuda.get_device_name()
    write_json(
        out / "train_two_gpus.json",
        {
            "claim": f"tokens/s of two GPUs over one at shape {first['shape']}, K {first['K']}, {first['tokens_per_rank']} tokens a "
            "rank; two ranks' steps are one process's within rounding; peak memory per rank",
            "command": "python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/train_two_gpus.py",
            "machine": f"two {name} of one host, NVLink multicast off",
            "versions": versions() | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))},  # type: ignore[no-untyped-call]
            "date": time.strftime("%Y-%m-%d"),
            "commit": os.environ.get("COMMIT"),
            "ours": first["tok_s"],
            "theirs": one["tok_s"],
            "unit": "target tokens/s",
            "ratio": round(first["tok_s"] / one["tok_s"], 3),
            "rows": rows,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="A:7:4096,B:7:4096", help="shape:K:tokens a rank, comma-separated")
    parser.add_argument("--forms", default="hand,reference,mla", help="forms whose equality is shown")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--seconds", type=float, default=100, help="nothing new is begun after this")
    given = parser.parse_args()
    began = time.monotonic()
    gpu = torch.cuda.is_available()
    device = DEVICE if gpu else torch.device("cpu")
    rows: list[dict[str, Any]] = []
    with process_group() as ranks:
        quiet = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=180)
        )  # NCCL's barrier keeps the other GPU busy

        def say(row: dict[str, Any] | None) -> None:
            if ranks.first and row is not None:
                print(json.dumps(row), flush=True)
                rows.append(row)
                if gpu:
                    record(rows, given.out)

        def time_left() -> bool:
            """Rank 0's clock decides for all."""
            late = torch.tensor([int(time.monotonic() - began < given.seconds)])
            dist.broadcast(late, 0, group=quiet)
            return bool(late)

        forms = given.forms.split(",")
        say(equality(ranks, device, forms[0]))
        for run in given.runs.split(",") if gpu else []:
            shape, steps, length = run.split(":")
            if not time_left():
                break
            dist.barrier(group=quiet)
            if ranks.first:
                say(rate(shape, int(steps), int(length), 1, 0))
            dist.barrier(group=quiet)
            mine = rate(shape, int(steps), int(length), ranks.count, ranks.rank)
            peaks: list[Any] = [None] * ranks.count
            dist.all_gather_object(peaks, mine["peak_gib"], group=quiet)
            say(mine | {"peak_gib_by_rank": peaks})
        for form in forms[1:]:
            if time_left():
                dist.barrier(group=quiet)
                say(equality(ranks, device, form))


if __name__ == "__main__":
    main()
