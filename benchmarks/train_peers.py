"""A peer's own training step, timed on one GPU at the shapes of train_ours.py: one JSON line per configuration.

    python benchmarks/train_peers.py specforge A "7:2048:1,3:2048:1" wrap=0 out=results.jsonl

The peers' code as installed, nothing of theirs rewritten: SpecForge's TrainerCore.train_step (wrap=1 in its FSDP
back end, its default; wrap=0 its own unwrapped form), speculators' model with the statements of Trainer.train_epoch.
bf16, random states and weights, the target's states given, its head applied within the step. mask=0.4 supervises
the last 40 % of every document.

speculators 0.9.0 stops at the first step on torch 2.11 because its two Triton kernels share one list of tuner
configurations, which Dynamo refuses; they get a copy each here. It trains no lm_head (less work per token).
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from train_gate import Gate

os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ.setdefault("MASTER_PORT", "29511")
GATE = Gate()
GATE.shared()  # before the heavy imports: nobody else is being timed meanwhile

import torch  # noqa: E402
from train_shapes import BF16, DEVICE, SHAPES, normal  # noqa: E402


def layer_config(shape: str, **extra: Any) -> Any:
    from transformers import LlamaConfig

    H, n, m, d, F, V, _ = SHAPES[shape]
    return LlamaConfig(
        hidden_size=H, num_attention_heads=n, num_key_value_heads=m, head_dim=d, intermediate_size=F, vocab_size=V,
        num_hidden_layers=1, hidden_act="silu", rms_norm_eps=1e-6, max_position_embeddings=16384,
        tie_word_embeddings=False, attention_bias=False, mlp_bias=False, pad_token_id=None, **extra,
    )  # fmt: skip


class Peer:
    """What both have: random vocab map and the slices in which weights are made."""

    def __init__(self, shape: str) -> None:
        self.shape = shape
        self.H, *_, self.V, self.D = SHAPES[shape]
        self.gen = torch.Generator(device=DEVICE).manual_seed(0)
        # token 0 stays out: it is what an all-zero padding state would choose
        ids = torch.randperm(self.V - 1, generator=self.gen, device=DEVICE)[: self.D].add_(1).sort().values
        self.ids = ids
        self.t2d = torch.zeros(self.V, dtype=torch.bool, device=DEVICE)
        self.t2d[ids] = True
        self.d2t = ids - torch.arange(self.D, device=DEVICE)

    @torch.no_grad()
    def randomise(self, model: torch.nn.Module) -> None:
        for p in model.parameters():
            if p.ndim == 2:
                for i in range(0, p.shape[0], 8192):
                    part = p[i : i + 8192]
                    part.copy_(torch.randn(part.shape, generator=self.gen, device=DEVICE) * 0.02)

    def supervised(self, length: int, docs: int, share: float) -> torch.Tensor:
        index = torch.arange(length, device=DEVICE)
        return (index >= round(length * (1 - share))).repeat(docs, 1)


class SpecForge(Peer):
    def __init__(self, shape: str, wrap: bool) -> None:
        super().__init__(shape)
        import torch.distributed as dist
        from specforge.algorithms.eagle3.model import OnlineEagle3Model
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
        from specforge.modeling.target.target_head import TargetHead
        from specforge.optimizer import BF16Optimizer
        from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
        from specforge.training.controller import TrainerCore
        from specforge.training.strategies.base import Eagle3TrainStrategy

        if wrap:
            dist.init_process_group("nccl", device_id=DEVICE)
        config = layer_config(shape, architectures=["LlamaForCausalLMEagle3"])
        config.draft_vocab_size, config.pretraining_tp = self.D, 1
        with torch.device(DEVICE):
            draft = LlamaForCausalLMEagle3(config, attention_backend="flex_attention")
        self.randomise(draft)
        draft.freeze_embedding()
        self.draft = draft = draft.to(device=DEVICE, dtype=BF16)
        draft.t2d.copy_(self.t2d)
        draft.d2t.copy_(self.d2t)
        self.model = OnlineEagle3Model(draft, length=7, attention_backend="flex_attention").train()
        head = TargetHead.__new__(TargetHead)  # its constructor wants a checkpoint on disk
        torch.nn.Module.__init__(head)
        head.config, head.hidden_size, head.vocab_size = config, self.H, self.V
        with torch.device("meta"):
            head.fc = torch.nn.Linear(self.H, self.V, bias=False)
        rows = normal(self.gen, self.V, self.H, std=0.02)
        rows[self.ids] *= 3.0
        head.fc.weight = torch.nn.Parameter(rows, requires_grad=False)
        self.head = head.eval()
        backend = FSDPTrainingBackend(
            ParallelConfig.from_distributed(), optimizer_factory=lambda t: BF16Optimizer(t, lr=1e-4)
        )
        wrapped = backend.prepare_model(self.model, wrap=wrap, optimizer_target=self.model.draft_model)
        self.strategy = Eagle3TrainStrategy(wrapped, target_head=self.head, compact_teacher=False)
        self.core = TrainerCore(self.strategy, backend)

    def prepare(self, K: int, length: int, docs: int, share: float) -> None:
        from specforge.runtime.contracts import TrainBatch

        self.model.length = K
        ones = torch.ones(docs, length, dtype=torch.long, device=DEVICE)
        self.batch = TrainBatch(
            sample_ids=["0"],
            strategy="eagle3",
            tensors={
                "input_ids": torch.randint(self.V, (docs, length), generator=self.gen, device=DEVICE),
                "attention_mask": ones,
                "loss_mask": self.supervised(length, docs, share).long(),
                "hidden_state": normal(self.gen, docs * length, 3 * self.H).view(docs, length, -1),
                "target": normal(self.gen, docs * length, self.H).view(docs, length, -1),
            },
            metadata={"target_repr": "hidden_state"},
        )

    def step(self) -> float:
        return float(self.core.train_step(self.batch).loss)


class Speculators(Peer):
    def __init__(self, shape: str, wrap: bool) -> None:
        super().__init__(shape)
        import speculators.losses.fused as fused
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from speculators.train.optimizers import build_optimizers

        for name, value in list(vars(fused.loss_backward_kernel).items()):
            if isinstance(value, list):
                setattr(fused.loss_backward_kernel, name, list(value))
        layer = layer_config(shape)
        layer._attn_implementation = "simple_flex_attention"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=self.D, norm_before_residual=True, norm_before_fc=True,
            fc_norm=False, norm_output=True, embed_requires_grad=False,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )  # fmt: skip
        with torch.device(DEVICE):
            self.model = Eagle3DraftModel(config).train()
        self.randomise(self.model)
        self.model.t2d.copy_(self.t2d)
        self.model.d2t.copy_(self.d2t)
        with torch.no_grad():
            self.model.lm_head.weight.copy_(self.model.verifier_lm_head.weight)
        self.optimizers = build_optimizers(
            self.model,
            SimpleNamespace(optimizer="adamw", lr=1e-4, weight_decay=0.01, muon_lr=1e-4, muon_momentum=0.95,
                            muon_weight_decay=0.1, muon_ns_steps=5, muon_adjust_lr_fn="match_rms_adamw"),
        )  # fmt: skip

    def prepare(self, K: int, length: int, docs: int, share: float) -> None:
        self.options, _ = type(self.model).get_trainer_kwargs(
            loss_fn="kl_div", loss_implementation="fused", ttt_steps=K, ttt_step_loss_decay=1.0
        )
        n = length * docs
        self.batch = {
            "hidden_states": normal(self.gen, n, 3 * self.H)[None],
            "input_ids": torch.randint(self.V, (1, n), generator=self.gen, device=DEVICE),
            "document_ids": torch.arange(docs, device=DEVICE).repeat_interleave(length)[None],
            "loss_mask": self.supervised(length, docs, share).view(1, n),
            "position_ids": torch.arange(1, length + 1, device=DEVICE).repeat(docs)[None],
            "verifier_last_hidden_states": normal(self.gen, n, self.H)[None],
        }

    def step(self) -> torch.Tensor:
        with torch.autocast("cuda", dtype=BF16):
            _, loss, _ = self.model(**self.batch, **self.options)
        for o in self.optimizers:
            o.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for o in self.optimizers:
            o.step()
        return loss.detach()


PEERS: dict[str, Any] = {"specforge": SpecForge, "speculators": Speculators}


def measure(peer: Any, name: str, K: int, length: int, docs: int, opts: dict[str, str]) -> dict[str, Any]:
    GATE.shared()
    torch._dynamo.reset()
    peer.prepare(K, length, docs, float(opts.get("mask", 1.0)))
    began = time.time()
    losses = [float(peer.step())]
    torch.cuda.synchronize()
    compiled = time.time() - began
    GATE.exclusive()
    losses += [float(peer.step()) for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    static = torch.cuda.memory_allocated()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
    events[0].record()
    for event in events[1:]:
        peer.step()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    ms = statistics.median(times)
    result = {
        "side": name, "shape": peer.shape, "K": K, "length": length, "documents": docs, "options": opts,
        "ms": round(ms, 3), "ms_all": [round(t, 2) for t in times], "tok_s": round(length * docs / ms * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3), "static_gib": round(static / 2**30, 3),
        "losses": [round(x, 4) for x in losses], "first_step_s": round(compiled, 1),
    }  # fmt: skip
    GATE.free()
    return result


def main() -> None:
    name, shape, runs = sys.argv[1:4]
    opts = dict(a.split("=", 1) for a in sys.argv[4:])
    out, deadline = opts.pop("out", None), float(os.environ.get("DEADLINE", "inf"))
    peer = PEERS[name](shape, opts.get("wrap") == "1")
    for run in runs.split(","):
        if time.time() > deadline - 30:
            print(f"left out for want of time: {name} {shape} {run}", flush=True)
            continue
        K, length, docs, *share = run.split(":")
        chosen = opts | {"mask": share[0]} if share else opts
        result = measure(peer, name, int(K), int(length), int(docs), chosen)
        print("RESULT", json.dumps(result), flush=True)
        if out:
            with Path(out).open("a") as f:
                f.write(json.dumps(result) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    sys.stdout.flush()
    os._exit(0)  # the peers' background threads keep the interpreter alive otherwise


if __name__ == "__main__":
    main()
