"""A plain eager training step beside ours on the CPU, at the demo's shape: results/train_cpu.json.

    python benchmarks/reference_step.py [--rounds 3] [--out benchmarks/results]

The reference is the textbook: modules and autograd, attention with its mask written out over the keys of all steps,
teacher logits over the whole vocabulary, draft logits at every position, bf16 autocast, torch's AdamW. Same weights,
same data (8 documents of 256 tokens, the last 60 % of each is the answer), same loss; the two take turns. Beside it stand
the reference in float32 (a CPU without bf16 arithmetic is faster that way), the same with no logit that is not needed
(draft logits where they count, the teacher's on the draft vocab, its first choice stored): what a careful eager step
reaches on this machine; and ours with train.optimizer: muon. Where the CPU has instructions for bfloat16, ours is run as
`train` runs it there (products in bfloat16, train/precision.py), and "ours, float32" is the same without.

The last row counts what our step executes (matrix products alone) and what this machine's product of two 2048 x 2048
float32 matrices reaches in the same run: their quotient is the tokens/s that no float32 step of this loss can exceed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.rope import Rope, rotate
from draftsmith.train.batch import StepBatch, join
from draftsmith.train.fused.adamw import FusedAdamW
from draftsmith.train.fused.layout import FlatParams
from draftsmith.train.fused.muon import FusedMuon
from draftsmith.train.fused.step import FusedStep
from draftsmith.train.objective import TargetHead
from draftsmith.train.precision import bf16_products, has_bf16_products

V, D, H, HEADS, KEY_HEADS, WIDTH, MLP = 49152, 8192, 576, 9, 3, 64, 1536  # SmolLM2-135M and the demo's draft vocab
K, DOCS, LENGTH, ANSWER = 3, 8, 256, 0.6


class Textbook(nn.Module):
    """An EAGLE-3 drafter as one would first write it; parameter names are the native ones with "." as "_"."""

    def __init__(
        self, weights: dict[str, Tensor], embedding: Tensor, lm_head: Tensor, t2d: Tensor, covered: Tensor | None
    ) -> None:
        """covered: whether the target's first choice lies in the draft vocab, bool [B, L], where it is stored; no logits
        are then computed that the loss does not need."""
        super().__init__()
        self.covered, self.draft_head = covered, lm_head[t2d]
        self.w = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v.clone()) for k, v in weights.items()})
        self.embedding, self.lm_head, self.t2d = embedding, lm_head, t2d
        self.rope = Rope({"rope_theta": 10000.0, "rope_type": "default"}, WIDTH)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[name.replace(".", "_") + "_weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (H,), self.w[name.replace(".", "_") + "_weight"], 1e-5)

    def forward(self, tokens: Tensor, aux: Tensor, final: Tensor, answer: Tensor) -> Tensor:
        """tokens [B, L], aux [B, L, 3H], final [B, L, H], answer bool [B, L] → loss."""
        B, L = tokens.shape
        normed = F.rms_norm(final, (H,), eps=1e-5)
        if self.covered is None:
            target = F.linear(normed, self.lm_head).float()  # [B, L, V]
            covered = self.t2d[target.argmax(-1)]
            p = target[..., self.t2d].softmax(-1)
        else:
            covered = self.covered
        state = self.linear(aux, "fc")
        keys, values, loss = [], [], torch.zeros(())
        causal = torch.ones(L, L, dtype=torch.bool).tril()
        for s in range(K):
            shifted = F.pad(tokens, (0, s + 1))[:, s + 1 :]
            x = torch.cat([self.norm(F.embedding(shifted, self.embedding), "layers.0.input_layernorm"),
                           self.norm(state, "layers.0.hidden_norm")], -1)  # fmt: skip
            attn = "layers.0.self_attn."
            q, k, v = (self.linear(x, f"{attn}{n}_proj").view(B, L, -1, WIDTH) for n in "qkv")
            cos, sin = self.rope.angles(torch.arange(L) + s, torch.float32)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            keys.append(k.repeat_interleave(HEADS // KEY_HEADS, 2).transpose(1, 2))
            values.append(v.repeat_interleave(HEADS // KEY_HEADS, 2).transpose(1, 2))
            mask = torch.cat([causal, *[torch.eye(L, dtype=torch.bool)] * s], -1)
            scores = q.transpose(1, 2) @ torch.cat(keys, 2).transpose(2, 3) * WIDTH**-0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            mixed = (weights.to(v.dtype) @ torch.cat(values, 2)).transpose(1, 2).flatten(2)
            stream = state + self.linear(mixed, f"{attn}o_proj")
            y = self.norm(stream, "layers.0.post_attention_layernorm")
            mlp = "layers.0.mlp."
            y = self.linear(
                F.silu(self.linear(y, f"{mlp}gate_proj")) * self.linear(y, f"{mlp}up_proj"), f"{mlp}down_proj"
            )
            state = stream + y
            n = L - s - 2
            counts = answer[:, s + 2 :] & covered[:, s + 1 : s + 1 + n]
            if self.covered is not None:
                q = F.linear(normed[:, s + 1 : s + 1 + n][counts], self.draft_head).float().softmax(-1)
                log_q = self.linear(self.norm(state[:, :n][counts], "norm"), "lm_head").float().log_softmax(-1)
                loss = loss - 0.8**s * (q * log_q).sum() / counts.sum()
                continue
            log_q = self.linear(self.norm(state, "norm"), "lm_head").float().log_softmax(-1)  # [B, L, D]
            ce = -(p[:, s + 1 : s + 1 + n] * log_q[:, :n]).sum(-1)
            loss = loss + 0.8**s * (ce * counts).sum() / counts.sum()
        return loss


def made() -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weights, embedding, the target's head, t2d, tokens, aux and final states, answers: random, the same for both."""
    torch.manual_seed(0)
    q, kv = HEADS * WIDTH, KEY_HEADS * WIDTH
    shapes = {
        "fc": (H, 3 * H), "layers.0.self_attn.q_proj": (q, 2 * H), "layers.0.self_attn.k_proj": (kv, 2 * H),
        "layers.0.self_attn.v_proj": (kv, 2 * H), "layers.0.self_attn.o_proj": (H, q),
        "layers.0.mlp.gate_proj": (MLP, H), "layers.0.mlp.up_proj": (MLP, H), "layers.0.mlp.down_proj": (H, MLP),
        "lm_head": (D, H),
    }  # fmt: skip
    weights = {f"{k}.weight": torch.randn(s) * 0.02 for k, s in shapes.items()}
    for name in ("norm", *(f"layers.0.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))):
        weights[f"{name}.weight"] = torch.ones(H)
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[torch.randperm(V)[:D]] = True
    lm_head = torch.randn(V, H) * 0.05
    lm_head[t2d] *= 3.0
    tokens = torch.randint(V, (DOCS, LENGTH))
    answer = torch.arange(LENGTH) >= round(LENGTH * (1 - ANSWER))
    states = torch.randn(DOCS, LENGTH, 3 * H), torch.randn(DOCS, LENGTH, H)
    return weights, torch.randn(V, H) * 0.02, lm_head, t2d, tokens, *states, answer.repeat(DOCS, 1)


def first_choices(final: Tensor, lm_head: Tensor) -> Tensor:
    """int64 [B, L], as the extract stage stores them."""
    return torch.stack([(F.rms_norm(f, (H,), eps=1e-5) @ lm_head.t()).argmax(-1) for f in final])


def reference(autocast: bool, careful: bool = False) -> Callable[[], float]:
    weights, embedding, lm_head, t2d, tokens, aux, final, answer = made()
    model = Textbook(weights, embedding, lm_head, t2d, t2d[first_choices(final, lm_head)] if careful else None)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        adam.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, aux, final, answer)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        return float(loss.detach())

    return step


def executed_flops(rows: int, pairs: int, teachers: int) -> float:
    """Floating-point operations of our step's matrix products, forward and backward: fc and the embedding's half of
    q/k/v once (no gradient of their inputs), keys and values of step 0 for all tokens, everything else for the rows
    that count, lm_head for the (step, row) pairs that count, the teacher once per token that needs one."""
    T, q, kv = DOCS * LENGTH, HEADS * WIDTH, 2 * KEY_HEADS * WIDTH
    once = 4 * T * (3 * H * H + H * (q + kv))
    layer = 6 * K * rows * (2 * H * q + 3 * H * MLP) + 6 * (T + (K - 1) * rows) * H * kv
    return once + layer + 6 * pairs * H * D + 2 * teachers * H * D


def matmul_rate(n: int = 2048, times: int = 12) -> float:
    """FLOP/s of the best of some n x n float32 products."""
    a, b, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    took = []
    for _ in range(times):
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        took.append(time.perf_counter() - began)
    return 2 * n**3 / min(took)


WORK: dict[str, float] = {}
"""What a step of ours executes; filled by its first one."""


def ours(muon: bool = False, rounded: bool = False) -> Callable[[], float]:
    """States and the target's first choices come with the data, as the extract stage stores them. rounded: products in
    bfloat16."""
    weights, embedding, lm_head, t2d, tokens, aux, final, answer = made()
    config = DrafterConfig(
        hidden_size=H, target_hidden_size=H, vocab_size=V, draft_vocab_size=D, num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS, head_dim=WIDTH, intermediate_size=MLP,
    )  # fmt: skip
    argmax = first_choices(final, lm_head)
    first = int(answer[0].int().argmax())
    index = torch.arange(LENGTH)
    batch = join([
        StepBatch(
            token_ids=tokens[i], aux=aux[i], final=final[i], final_valid=index >= first - 1, argmax=argmax[i],
            answer=answer[i], doc=torch.zeros(LENGTH, dtype=torch.int32), position=index,
        )
        for i in range(DOCS)
    ])  # fmt: skip
    flat = FlatParams(config, "cpu", torch.float32, split=muon)
    flat.load(weights)
    step = FusedStep(flat, TargetHead(torch.ones(H), 1e-5, lm_head[t2d]), embedding, t2d)
    optimizer = (FusedMuon if muon else FusedAdamW)(flat, betas=(0.9, 0.999))

    def run() -> float:
        plan = step.plan(batch, K)
        WORK["flops"] = executed_flops(plan.R, len(plan.slot), len(plan.teachers))
        with bf16_products(rounded):
            loss, _ = step.loss_and_grads(batch, plan, [0.8**s for s in range(K)])
            optimizer.step(1e-4)
        return float(loss.detach())

    return run


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    a = p.parse_args()
    rounded = has_bf16_products()
    sides = {
        "ours": ours(rounded=rounded),
        **({"ours, float32": ours()} if rounded else {}),
        "reference": reference(autocast=True),
        "reference, float32": reference(autocast=False),
        "reference, float32, no logit that is not needed": reference(autocast=False, careful=True),
        "ours, muon": ours(muon=True, rounded=rounded),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    products = []
    for turn in range(a.rounds + 1):
        products.append(matmul_rate())
        for name, step in sides.items():
            began = time.perf_counter()
            losses[name].append(round(step(), 5))
            if turn:  # the first grows the working memory
                times[name].append(time.perf_counter() - began)
        print({n: (losses[n][-1], t[-1:]) for n, t in times.items()}, flush=True)
    rate = {name: DOCS * LENGTH / statistics.median(t) for name, t in times.items()}
    each, peak = WORK["flops"] / (DOCS * LENGTH), max(products)
    work = {
        "mflop_per_token": round(each / 1e6, 1),
        "matmul_gflops": round(peak / 1e9, 1),
        "ceiling_tok_s": round(peak / each),
        "share_of_matmul_rate": round(rate["ours, float32" if rounded else "ours"] * each / peak, 3),
        "best_tok_s": round(DOCS * LENGTH / min(times["ours"])),
        "bf16_products": rounded,
    }
    head = ["git", "-C", str(a.out), "rev-parse", "--short", "HEAD"]
    record = {
        "claim": "CPU training step of the demo, tokens/s against a plain eager reference (bf16 autocast): at least 2x",
        "command": "python benchmarks/reference_step.py",
        "machine": f"{cpu_name()}, {torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.1f} at the end",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": date.today().isoformat(),
        "commit": subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip(),
        "ours": round(rate["ours"]),
        "theirs": round(rate["reference"]),
        "unit": "tokens/s",
        "ratio": round(rate["ours"] / rate["reference"], 2),
        "rows": [
            {"side": n, "tok_s": round(rate[n]), "seconds": [round(x, 2) for x in t], "losses": losses[n]}
            for n, t in times.items()
        ]
        + [work],
    }
    (a.out / "train_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: record[k] for k in ("ours", "theirs", "ratio", "machine")} | work))


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
