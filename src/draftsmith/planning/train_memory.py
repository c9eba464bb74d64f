"""Peak memory of training, part by part, from shapes alone (no torch): what the code of train/ allocates, added up.

The hand-written step keeps all of a step in one block (train/fused/arena.py); `_hand_step` follows its takes and gives
the block's size. Against what was measured on an H200 (results/train_*.json, `arena_gib`) it is within 1 %; whole
processes on a CPU are measured by benchmarks/train_memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.planning.sizes import WIDTH, DrafterShape, optimizer_bytes

CHUNK = {True: 512 << 20, False: 16 << 20}
"""Bytes of one chunk of logits in the hand-written step: on a GPU, on a CPU."""
PROCESS = 330 << 20
"""Anonymous memory of a training process before its first tensor (Python, torch, its libraries; CPU). On a GPU the
measure is the device's memory and this is not part of it."""
BATCHES = {True: 2, False: 3}
"""Batches alive at once: the one in work and the one read ahead; on a CPU that one's single documents too."""


@dataclass(frozen=True)
class Step:
    """tokens: of one forward (T). steps: K. rows: tokens that count at some step (R). width: bytes of a number."""

    tokens: int
    steps: int
    rows: int
    width: int

    @property
    def compact(self) -> bool:
        return self.rows < self.tokens

    @property
    def pairs(self) -> int:
        return self.steps * self.rows


def _hand_step(shape: DrafterShape, x: Step, chunk: int) -> int:
    """Bytes of the arena: what the forward keeps, and the largest of what comes on top of it. The names are those of
    train/fused/step.py and backward.py."""
    T, R, K, N = x.tokens, x.rows, x.steps, x.pairs
    H, G, D, F = shape.hidden, shape.target_hidden, shape.draft_vocab, shape.intermediate
    q, kv = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    full_rows = T * q if x.compact else 0
    w, wide = x.width, max(x.width, 4)
    kv_rows = T + (K - 1) * R
    kept = T * H + (kv_rows + (R if x.compact else 0)) * H + kv_rows * kv + N * (2 * q + 2 * H + 3 * F)
    forward = (T + K - 1) * (q + kv) + max((T + K - 1) * H, R * H + full_rows)
    slices = -(-N // max(chunk // (D * w), 1))
    logits = -(-N // slices) * (D + H)
    loss = R * D + max(R * G, logits)
    per_step = N * q + R * H + max(R * F, 3 * full_rows)  # dmixed, dx, and what is alive only inside a step
    weights = (T + K - 1) * (q + kv + H)
    back = N * (H + q) + T * H + max(per_step + T * kv * wide // w, weights)
    return w * (kept + max(forward, N * H + max(loss, back))) + wide * K * shape.heads * T


def _autograd_step(shape: DrafterShape, x: Step, recompute: bool) -> int:
    """Bytes of the reference step (train/objective.py): saved tensors of K steps and the loss of all of them, or, with
    recompute, of one step and the streams between steps. The teacher's rows are gathered once per step."""
    T, N, K, w = x.tokens, x.rows, x.steps, x.width
    H, D, F = shape.hidden, shape.draft_vocab, shape.intermediate
    if shape.mla:
        _, rank, nope, rope, v = shape.mla
        attention = shape.heads * (2 * (nope + rope) + 3 * v) + 2 * (rank + rope)
        keys = shape.heads * (nope + rope + v)
    else:
        attention = shape.head_dim * (3 * shape.heads + 2 * shape.kv_heads)
        keys = 2 * shape.head_dim * shape.kv_heads
    layer = T * (12 * H + attention + 4 * F) * w
    loss = N * D * (3 * 4 + (w if w < 4 else 0))  # teacher rows, logits' logarithm, their product
    between = T * (H + keys) * w + N * D * 4  # what a checkpoint keeps: the stream, keys and values, teacher rows
    backward = 2 * N * D * 4 + 4 * T * F * w  # gradients of logits and of the MLP, alive one step at a time
    saved = layer + loss + K * between if recompute else K * (layer + loss)
    return saved + backward


def train_memory(
    shape: DrafterShape,
    tokens: int,
    steps: int,
    optimizer: str,
    dtype: str,
    *,
    supervised: float = 1.0,
    recompute: bool = False,
    gpu: bool = True,
    context: int = 1,
) -> dict[str, int]:
    """Peak bytes of training by part, on one device. tokens: packed tokens of one sequence; steps: K; supervised: share
    of the tokens that are answer; recompute, context (devices that share a sequence): as the recipe's keys.

    weights: parameters, gradients, optimizer. frozen: the target's embedding and the draft rows of its head. batch: aux
    streams and final states. step: forward and backward (its block, or autograd's tensors). teacher: probabilities on
    the draft vocab (part of the block in the hand-written step). scratch: what kernels and library calls take for
    themselves. shared: keys and values of a sequence that devices share, and their gradient. process: of the process
    itself (CPU)."""
    w, own = WIDTH[dtype], tokens
    if context > 1:  # two chunks of the sequence; the step reads K + 1 rows past each (train/context.py)
        own = 2 * -(-tokens // (2 * context))
    T = own + (2 * (steps + 1) if context > 1 else 0)
    H, G, D, F = shape.hidden, shape.target_hidden, shape.draft_vocab, shape.intermediate
    x = Step(T, steps, max(1, min(own, round(own * supervised))), w)
    hand = shape.mla is None and not recompute
    # a weight the reference moves in bf16 has a float32 master and gradient beside it (train/core.py)
    reference = {"float32": 16, "bfloat16": 2 + 2 + 4 + 4 + 8}[dtype] * shape.trained
    weights = optimizer_bytes(shape, optimizer, dtype) if hand else reference
    if context > 1:  # each device keeps 1/context of the optimizer's state (FSDP2: of the float32 weights too)
        alone = 2 * w * shape.trained
        weights = alone + -(-(weights - alone) // context)
    q, kv = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    if shape.mla:
        _, _, nope, rope, _ = shape.mla
        kv = 2 * shape.heads * (nope + rope)  # values are as wide as keys there
    kernels = T * (4 * q + 4 * shape.kv_heads * shape.head_dim) * w  # attention's output and gradients
    plain = 0 if gpu else max(6 * x.rows * F, 4 * T * F + 6 * T * H) * max(w, 4)  # SiLU, or a validation's layer
    # muon, after the step's own scratch is free: copies of the largest hidden matrix and squares of its shorter side
    largest = H * max(shape.aux_layers * G, F)
    orthogonal = (3 * largest + 3 * H * H) * w if optimizer == "muon" else 0
    parts = {
        "weights": weights,
        "frozen": ((shape.vocab * H if H == G else 0) + D * G) * w,
        "batch": BATCHES[gpu] * T * (shape.aux_layers + 1) * G * w,
        "teacher": 0 if hand else 3 * x.rows * D * 4,
        "step": _hand_step(shape, x, CHUNK[gpu]) if hand else _autograd_step(shape, x, recompute),
        "scratch": max(kernels + plain, orthogonal),
        # gathered; float32 gradient; gradient of one rectangle's keys, or half of the sum on its way back
        "shared": 0 if context == 1 else own * context * kv * (w + max(w, 4) + max(w, max(w, 4) // 2)),
        "process": 0 if gpu else PROCESS,
    }
    return parts | {"total": sum(parts.values())}
