"""One training step's loss and gradients, written out by hand: K unrolled draft steps without an autograd graph.

What that buys over autograd (objective.reference_loss computes the same):
  * each weight gradient is one product over the rows of all K steps, not K products and K-1 additions;
  * the embedding's half of q/k/v is projected once: step s reads it shifted by s rows (rotation comes after). Its
    weight gradient is one product with the shift-summed gradient, its norm's gradient follows from that product
    (ops.through_norm), and no gradient flows to the frozen embedding;
  * only rows that count somewhere run through queries, o_proj and MLP, only pairs that count through lm_head (plan.py);
  * norms, SiLU and softmax gradients replace their inputs in memory; nothing of K*T*D exists.

Order: all steps forward; one loss pass (head.py) gives the gradient of every step's state; steps backward from the
last; then the weight products. Shapes: T tokens, R active rows, K steps, H width, n/m query/key heads of d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafter.rope import Rope
from draftsmith.train.batch import StepBatch
from draftsmith.train.fused.arena import Arena
from draftsmith.train.fused.attention import Causal, causal_part
from draftsmith.train.fused.backward import backward
from draftsmith.train.fused.context import ContextCausal
from draftsmith.train.fused.cpu_attention import RowsCausal
from draftsmith.train.fused.head import FullTeacher, LossInputs, loss_pass, target_normed, teacher_logits
from draftsmith.train.fused.layout import FlatParams
from draftsmith.train.fused.ops import ops_for
from draftsmith.train.fused.plan import Plan, draft_index, make_plan
from draftsmith.train.objective import StepStats, TargetHead


@dataclass
class Kept:
    """What the forward leaves for the backward. Per-row buffers are in the plan's block order."""

    causal: Causal | ContextCausal
    ids: Tensor  # int64 [T + K - 1]: the token whose embedding row t sees at step s is ids[t + s]
    position: Tensor  # of active rows
    h0: Tensor  # [T, H] fused aux states
    x: Tensor  # normed states: [T | (K-1) R | R if compact, H]
    q: Tensor  # [K*R, n*d], rotated
    kv: Tensor  # [kv_rows, 2*m*d], keys rotated
    mixed: Tensor  # [K*R, n*d] attention output
    lses: Tensor  # [K, B, n, L] joined log-sum-exps
    states: list[object]
    h1: Tensor  # [K*R, H] stream after attention
    gate_up: Tensor  # [K*R, 2F]
    act: Tensor  # [K*R, F]
    y: Tensor  # [K*R, H] stream after the MLP
    fed: Tensor  # what the next step takes: y, or its norm (norm_output)


class FusedStep:
    """Loss and gradients of a Llama-form drafter.

    flat: weights, and where gradients go. head: the target's head over the draft vocab (None for stored top-k
    teachers). embedding [V, H]: the target's table, unless the drafter trains its own. t2d bool [V].
    chunk_bytes: most memory for one chunk of logits. kernel: attention kernel, see attention.causal_part.
    """

    def __init__(
        self,
        flat: FlatParams,
        head: TargetHead | None,
        embedding: Tensor | None,
        t2d: Tensor,
        *,
        full: FullTeacher | None = None,
        chunk_bytes: int | None = None,
        kernel: str | None = None,
    ) -> None:
        self.flat, self.head, self.full, self.kernel, self.t2d = flat, head, full, kernel, t2d
        self.config, self.device, self.dtype = flat.config, flat.param.device, flat.param.dtype
        self.embedding = flat.w["embedding"] if flat.train_embedding else embedding
        if self.embedding is None:
            raise ValueError("the drafter has no embedding: give the target's")
        c = flat.config
        self.H, self.n, self.m, self.d = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.Nq, self.Nkv, self.F = self.n * self.d, 2 * self.m * self.d, c.intermediate_size
        self.scale, self.eps = self.d**-0.5, c.rms_norm_eps
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.ops = ops_for(self.device, self.dtype)
        self.arena = Arena(self.device)
        self.draft_index = draft_index(t2d.cpu())
        self._rope = Rope(c.rope, self.d)
        self._tables: tuple[Tensor, Tensor] | None = None
        self._weights: dict[tuple[float, ...], Tensor] = {}
        default = (512 if self.device.type == "cuda" else 16) << 20
        self.chunk_bytes = chunk_bytes or default

    def plan(self, batch: StepBatch, K: int, mask: Tensor | None = None, multiple: int | None = None) -> Plan:
        """Which rows will be computed; give it the batch while it is still on the CPU (plan.make_plan). On a GPU their
        numbers are rounded up, so that few different shapes occur."""
        spans = batch.spans if batch.context is None else batch.context.spans
        longest = max((stop - start for start, stop in spans), default=1)
        self._reserve_tables(max(longest, batch.tokens) + K)
        multiple = multiple or (128 if self.device.type == "cuda" else 8)
        return make_plan(batch, self.t2d, K, self.device, mask, multiple, self.draft_index)

    def _reserve_tables(self, length: int) -> None:
        if self._tables is None or self._tables[0].shape[0] < length:
            cos, sin = self._rope.angles(torch.arange(length, device=self.device), self.wide)
            self._tables = cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def _step_weights(self, weights: Sequence[float] | Tensor) -> Tensor:
        """On the device; lists are copied there once."""
        if isinstance(weights, Tensor):
            return weights.to(self.device, self.wide)
        key = tuple(weights)
        if key not in self._weights:
            self._weights[key] = torch.tensor(key, dtype=self.wide, device=self.device)
        return self._weights[key]

    def rotate(self, x: Tensor, position: Tensor, s: int, back: bool = False) -> None:
        """Rotate x [rows, heads*d] (may be a view of wider rows) in place."""
        assert self._tables is not None
        self.ops.rope(x.unflatten(1, (-1, self.d)), *self._tables, position, s, back)

    @torch.no_grad()
    def loss_and_grads(
        self,
        batch: StepBatch,
        plan: Plan,
        weights: Sequence[float] | Tensor,
        counts: Tensor | None = None,
        accumulate: bool = False,
    ) -> tuple[Tensor, StepStats]:
        """Loss as objective.reference_loss defines it, gradients into flat.grad (added to it with `accumulate`).

        batch: on the step's device, floating fields in its dtype. weights: w_s. counts [K]: rows that count in the
        whole optimizer step; None = this batch's. Nothing waits for the device; loss and figures stay on it.
        """
        self.arena.reset()
        K, R = plan.K, plan.R
        w = self._step_weights(weights)[:K]
        per_step = w / (plan.counts if counts is None else counts).to(self.wide).clamp_min(1)
        kept = self._forward(batch, plan)
        figures = torch.zeros(3, K * R, dtype=self.wide, device=self.device)
        dstates = self.arena.take(K * R, self.H, dtype=self.dtype)
        if plan.losses is not None:
            dstates.zero_()
        norm_grads = {name: torch.zeros_like(g, dtype=self.wide) for name, g in self.flat.g.items() if g.dim() == 1}
        count = self._loss(batch, plan, kept, per_step, figures, dstates, norm_grads["norm"], accumulate)
        backward(self, batch, plan, kept, dstates, norm_grads, accumulate)
        by_step = figures.view(3, K, R).sum(-1)
        if plan.compact:
            by_step = by_step.roll(1, 1)
        loss = (by_step[0] * per_step).sum()
        return loss, StepStats(count=count, ce=by_step[0], top1=by_step[2], entropy=by_step[1])

    def _loss(
        self,
        batch: StepBatch,
        plan: Plan,
        kept: Kept,
        per_step: Tensor,
        figures: Tensor,
        dstates: Tensor,
        norm_grad: Tensor,
        accumulate: bool,
    ) -> Tensor:
        """The loss pass; returns the pairs that count per step [K]."""
        arena, flat = self.arena, self.flat
        mark = arena.mark()
        M = len(plan.teachers)
        teacher = arena.take(M, self.config.draft_vocab_size, dtype=self.dtype)
        weight, goal, count = per_step[plan.step] * plan.live, plan.goal, plan.counts
        if self.full is not None:
            inner = arena.mark()
            assert batch.final is not None
            normed = arena.take(M, batch.final.shape[1], dtype=self.dtype)
            target_normed(batch, plan, self.head, normed, self.ops)
            first = self.full.run(normed, teacher, self.ops, arena)
            arena.release(inner)
            goal = self.full.index[first][plan.slot.long()]
            covered = (goal >= 0) * plan.live
            weight = weight * covered
            count = torch.zeros_like(plan.counts).index_add_(0, plan.step, covered)
        else:
            teacher_logits(batch, plan, self.head, teacher, self.ops, arena)
        inputs = LossInputs(
            states=kept.y,
            normed=kept.fed if self.config.norms.norm_output else None,
            teacher=teacher,
            entropy=self.ops.settle(teacher),
            goal=goal,
            weight=weight,
        )
        loss_pass(
            inputs, plan, flat.w["lm_head"], flat.named["norm.weight"], self.eps, flat.g["lm_head"], norm_grad, dstates,
            figures, accumulate, self.chunk_bytes, self.ops, arena,
        )  # fmt: skip
        arena.release(mark)
        return count

    def fuse_inputs(self, aux: Tensor, out: Tensor, unit: bool = False) -> None:
        """Aux states through input_norm and fc_norm (as configured) → out; unit: the last norm without its gain."""
        c, named = self.config, self.flat.named
        if c.norms.norm_before_fc:
            gain = None if unit and not c.norms.fc_norm else named["input_norm.weight"]
            self.ops.norm_fwd(aux, gain, self.eps, out)
            aux = out
        if c.norms.fc_norm:
            G = c.target_hidden_size
            for a in range(c.num_aux_layers):
                part = slice(a * G, (a + 1) * G)
                gain = None if unit else named[f"fc_norm.{a}.weight"]
                self.ops.norm_fwd(aux[:, part], gain, self.eps, out[:, part])

    def _project_embedding(self, ids: Tensor, out: Tensor) -> None:
        """The embedding's half of q/k/v for tokens `ids` → out [len(ids), Nq + Nkv], before rotation."""
        assert self.embedding is not None
        mark = self.arena.mark()
        normed = self.arena.take(len(ids), self.H, dtype=self.dtype)
        self.ops.norm_fwd(self.embedding, self.flat.named["layers.0.input_layernorm.weight"], self.eps, normed, ids)
        torch.mm(normed, self.flat.w["qkv"][:, : self.H].t(), out=out)
        if "qkv_bias" in self.flat.w:
            out += self.flat.w["qkv_bias"]
        self.arena.release(mark)

    def _causal(self, plan: Plan) -> Causal | ContextCausal:
        if plan.context is not None:
            return ContextCausal(plan.context, self.n, self.m, self.scale, self.kernel)
        if self.ops.__name__.endswith("ops_native"):
            return RowsCausal(plan.docs.spans, self.n, self.m, self.scale, plan.active, plan.T, self.arena)
        return causal_part(plan.docs, self.n, self.m, self.scale, self.kernel)

    def _forward(self, batch: StepBatch, plan: Plan) -> Kept:
        take, ops, w, H = self.arena.take, self.ops, self.flat.w, self.H
        T, R, K, Nq = plan.T, plan.R, plan.K, self.Nq
        kind = {"dtype": self.dtype}
        norms = self.config.norms
        hidden_norm, norm = self.flat.named["layers.0.hidden_norm.weight"], self.flat.named["norm.weight"]
        ids = torch.zeros(T + K - 1, dtype=torch.int64, device=self.device)
        ids[: T - 1] = batch.token_ids[1:]
        y = take(K * R, H, **kind)
        causal = self._causal(plan)
        kept = Kept(
            causal=causal,
            ids=ids,
            position=batch.position if plan.active is None else batch.position[plan.active],
            h0=take(T, H, **kind),
            x=take(T + (K - 1) * R + (R if plan.compact else 0), H, **kind),
            q=take(K * R, Nq, **kind),
            kv=take(plan.kv_rows, self.Nkv, **kind),
            mixed=take(K * R, Nq, **kind),
            lses=take(K, causal.B, self.n, T // causal.B, dtype=self.wide),
            states=[],
            h1=take(K * R, H, **kind),
            gate_up=take(K * R, 2 * self.F, **kind),
            act=take(K * R, self.F, **kind),
            y=y,
            fed=take(K * R, H, **kind) if norms.norm_output else y,
        )
        mark = self.arena.mark()
        aux = batch.aux
        if norms.norm_before_fc or norms.fc_norm:
            aux = take(*batch.aux.shape, **kind)
            self.fuse_inputs(batch.aux, aux)
        torch.mm(aux, w["fc"].t(), out=kept.h0)
        self.arena.release(mark)
        projected = take(T + K - 1, Nq + self.Nkv, **kind)
        self._project_embedding(ids, projected)
        normed2 = take(R, H, **kind)
        wq, wkv = w["qkv"][:Nq, H:].t(), w["qkv"][Nq:, H:].t()
        ops.norm_fwd(kept.h0, hidden_norm, self.eps, kept.x[:T])
        for s in range(K):
            b, kvb = plan.block(s), plan.kv_block(s)
            x_kv = kept.x[kvb]
            x_q = self.query_rows(kept.x, plan)[b]
            q, kv, mixed, h1, y = kept.q[b], kept.kv[kvb], kept.mixed[b], kept.h1[b], kept.y[b]
            if plan.active is not None and s == 0:
                torch.index_select(kept.x[:T], 0, plan.active, out=x_q)
            if plan.active is None:
                q.copy_(projected[s : s + T, :Nq])
            else:
                torch.index_select(projected[:, :Nq], 0, plan.active + s, out=q)
            if plan.active is None or s == 0:
                kv.copy_(projected[s : s + T, Nq:])
            else:
                torch.index_select(projected[:, Nq:], 0, plan.active + s, out=kv)
            q.addmm_(x_q, wq)
            kv.addmm_(x_kv, wkv)
            self.rotate(q, kept.position, s)
            self.rotate(kv[:, : self.Nkv // 2], batch.position if s == 0 else kept.position, s)
            self._attend(kept, plan, s, q, mixed)
            residual = x_q if norms.norm_before_residual else (kept.h0 if s == 0 else kept.fed[plan.block(s - 1)])
            if plan.active is not None and s == 0 and not norms.norm_before_residual:
                torch.index_select(residual, 0, plan.active, out=h1)
            else:
                h1.copy_(residual)
            if "o_bias" in w:
                h1 += w["o_bias"]
            h1.addmm_(mixed, w["o"].t())
            ops.norm_fwd(h1, self.flat.named["layers.0.post_attention_layernorm.weight"], self.eps, normed2)
            torch.mm(normed2, w["gate_up"].t(), out=kept.gate_up[b])
            ops.silu_mul_fwd(kept.gate_up[b], kept.act[b])
            torch.addmm(h1, kept.act[b], w["down"].t(), out=y)
            if norms.norm_output:
                ops.norm_fwd(y, norm, self.eps, kept.fed[b])
            if s + 1 < K:
                after = self.query_rows(kept.x, plan)[plan.block(s + 1)]
                ops.norm_fwd(kept.fed[b], hidden_norm, self.eps, after)
        self.arena.release(mark)
        return kept

    @staticmethod
    def query_rows(x: Tensor, plan: Plan) -> Tensor:
        """The rows of Kept.x that queries are made from, in block order."""
        return x[plan.T :] if plan.compact else x

    def query_heads(self, rows: Tensor, plan: Plan, causal: Causal | ContextCausal) -> Tensor:
        """Active rows [R, n*d] as the attention takes them: [R, n, d], or all rows [T, n, d] (zeros elsewhere), taken
        from the arena."""
        if plan.active is None or isinstance(causal, RowsCausal):
            return rows.view(-1, self.n, self.d)
        out = self.arena.take(plan.T, self.Nq, dtype=self.dtype).zero_()
        return out.index_copy_(0, plan.active, rows).view(plan.T, self.n, self.d)

    def keys_values(self, kv: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Step-0 keys and values [T, m, d] each."""
        first = kv[: plan.T].view(plan.T, 2, self.m, self.d)
        return first[:, 0], first[:, 1]

    def _attend(self, kept: Kept, plan: Plan, s: int, q: Tensor, mixed: Tensor) -> None:
        mark = self.arena.mark()
        out, lse, state = kept.causal.forward(self.query_heads(q, plan, kept.causal), *self.keys_values(kept.kv, plan))
        kept.lses[s].copy_(lse)
        heads = (-1, self.n, self.d)
        if s == 0:
            flat = out.reshape(-1, self.Nq)
            mixed.copy_(flat if plan.active is None or len(flat) == plan.R else flat[plan.active])
        else:
            own = kept.kv.view(-1, 2, self.m, self.d)
            self.ops.merge(q.view(heads), own, out, kept.lses[s], mixed.view(heads), plan, s, self.scale)
        kept.states.append(state)
        self.arena.release(mark)
