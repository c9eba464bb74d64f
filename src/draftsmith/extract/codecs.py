"""How states are written: bf16; fp8 (e4m3, a scale per token and layer); fp8-topk (fp8 aux streams, and the final state
replaced by the top k of the target's logits on the draft vocab plus the log-mass of the rest).

Bytes per token at G = 7168, A = 3, k = 128 and a draft vocab of at most 65,536: bf16 57,344 (+8 of ids); fp8 28,688;
fp8-topk 22,040. A codec turns `States` into named tensors and back; `shard.py` knows nothing of what they mean.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.extract.sizes import row_bytes
from draftsmith.extract.states import States, TopK

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest e4m3fn value


class Codec(Protocol):
    """encode/decode one row. `needs_topk`: encode wants States.topk, not States.final. `fields`: names that encode()
    always gives (besides argmax and answer, which a row may lack)."""

    name: str
    fields: tuple[str, ...]
    needs_topk: bool

    def params(self) -> dict[str, Any]:
        """What decode needs to know besides the tensors; stored in store.json."""

    def encode(self, s: States) -> dict[str, Tensor]: ...

    def decode(self, fields: dict[str, Tensor], boundary: int, final_start: int) -> States: ...

    def row_bytes(self, tokens: int, supervised: int, aux_layers: int, hidden: int) -> int:
        """Bytes that encode() will give for a row with argmax."""


def _ids(s: States) -> dict[str, Tensor]:
    out = {"token_ids": s.token_ids.to(torch.int32)}
    if s.argmax is not None:
        out["argmax"] = s.argmax.to(torch.int32)
    if s.answer is not None:
        out["answer"] = s.answer.to(torch.uint8)
    return out


def _base(fields: dict[str, Tensor], boundary: int, final_start: int, aux: Tensor) -> dict[str, Any]:
    argmax, answer = fields.get("argmax"), fields.get("answer")
    return {
        "token_ids": fields["token_ids"].long(),
        "boundary": boundary,
        "aux": aux,
        "final_start": final_start,
        "argmax": None if argmax is None else argmax.long(),
        "answer": None if answer is None else answer.bool(),
    }


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16/float32 [..., G] → e4m3 [..., G] and float32 scale [...]: x ≈ q * scale, the largest channel at 448."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1) / FP8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    q = (wide / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return q, scale


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """e4m3 [..., G], float32 [...] → bf16 [..., G]."""
    if q.device.type != "cpu":
        return q.float().mul_(scale.unsqueeze(-1)).to(torch.bfloat16)
    # torch converts e4m3 element by element on a CPU. The seven low bits, moved to where bfloat16 has its low exponent
    # bits and its mantissa, are the value times 2^-120, subnormals included: 2.5 times as fast (benchmarks/codec.py).
    bits = q.view(torch.int8).to(torch.int16)
    small = ((bits & 0x7F) << 4) | (bits & -0x8000)
    return small.view(torch.bfloat16).float().mul_(2.0**120).mul_(scale.unsqueeze(-1)).to(torch.bfloat16)


class Bf16:
    name = "bf16"
    fields: tuple[str, ...] = ("token_ids", "aux", "final")
    needs_topk = False

    def params(self) -> dict[str, Any]:
        return {}

    def encode(self, s: States) -> dict[str, Tensor]:
        if s.final is None:
            raise ValueError("the bf16 codec stores final states; these have none")
        return _ids(s) | {"aux": s.aux.to(torch.bfloat16), "final": s.final.to(torch.bfloat16)}

    def decode(self, fields: dict[str, Tensor], boundary: int, final_start: int) -> States:
        return States(**_base(fields, boundary, final_start, fields["aux"]), final=fields["final"])

    def row_bytes(self, tokens: int, supervised: int, aux_layers: int, hidden: int) -> int:
        return row_bytes(self.name, tokens, supervised, aux_layers, hidden)


class Fp8:
    name = "fp8"
    fields: tuple[str, ...] = ("token_ids", "aux", "aux_scale", "final", "final_scale")
    needs_topk = False

    def params(self) -> dict[str, Any]:
        return {}

    def encode(self, s: States) -> dict[str, Tensor]:
        if s.final is None:
            raise ValueError("the fp8 codec stores final states; these have none")
        aux, aux_scale = quantize(s.aux)
        final, final_scale = quantize(s.final)
        return _ids(s) | {"aux": aux, "aux_scale": aux_scale, "final": final, "final_scale": final_scale}

    def decode(self, fields: dict[str, Tensor], boundary: int, final_start: int) -> States:
        aux = dequantize(fields["aux"], fields["aux_scale"])
        final = dequantize(fields["final"], fields["final_scale"])
        return States(**_base(fields, boundary, final_start, aux), final=final)

    def row_bytes(self, tokens: int, supervised: int, aux_layers: int, hidden: int) -> int:
        return row_bytes(self.name, tokens, supervised, aux_layers, hidden)


class Fp8TopK:
    """`k` logits in float16 with ids in 16 bits where the draft vocab allows (stored as int16, read unsigned)."""

    name = "fp8-topk"
    fields: tuple[str, ...] = ("token_ids", "aux", "aux_scale", "topk_ids", "topk_logits", "topk_rest")
    needs_topk = True

    def __init__(self, k: int, draft_vocab_size: int) -> None:
        self.k, self.draft_vocab_size = min(k, draft_vocab_size), draft_vocab_size
        self.narrow = draft_vocab_size <= 1 << 16

    def params(self) -> dict[str, Any]:
        return {"k": self.k, "draft_vocab_size": self.draft_vocab_size}

    def encode(self, s: States) -> dict[str, Tensor]:
        if s.topk is None:
            raise ValueError("the fp8-topk codec stores top-k logits; these states have none")
        aux, aux_scale = quantize(s.aux)
        ids = s.topk.ids
        # The distribution does not change when all logits move together, so the largest becomes 0: float16 is then
        # finest where the probability is, and cannot overflow.
        top = s.topk.logits[:, :1]
        return _ids(s) | {
            "aux": aux,
            "aux_scale": aux_scale,
            "topk_ids": ids.to(torch.int32).to(torch.int16) if self.narrow else ids.to(torch.int32),
            "topk_logits": (s.topk.logits - top).clamp(min=-60000.0).to(torch.float16),
            "topk_rest": s.topk.rest.float() - top[:, 0],
        }

    def decode(self, fields: dict[str, Tensor], boundary: int, final_start: int) -> States:
        ids = fields["topk_ids"].long()
        if self.narrow:
            ids = ids & 0xFFFF
        topk = TopK(ids, fields["topk_logits"].float(), fields["topk_rest"])
        aux = dequantize(fields["aux"], fields["aux_scale"])
        return States(**_base(fields, boundary, final_start, aux), topk=topk)

    def row_bytes(self, tokens: int, supervised: int, aux_layers: int, hidden: int) -> int:
        return row_bytes(self.name, tokens, supervised, aux_layers, hidden, self.k, self.draft_vocab_size)


def make_codec(name: str, params: dict[str, Any] | None = None) -> Codec:
    """The codec called `name`. params: k and draft_vocab_size for fp8-topk."""
    if name == "bf16":
        return Bf16()
    if name == "fp8":
        return Fp8()
    if name == "fp8-topk":
        p = params or {}
        return Fp8TopK(int(p["k"]), int(p["draft_vocab_size"]))
    raise UserError(f"unknown states codec {name!r}", "these states cannot be read", "known: bf16, fp8, fp8-topk")


def topk_of_logits(logits: Tensor, k: int) -> TopK:
    """float32 [M, D] logits on the draft vocab → their top k and the log-mass of the rest."""
    wide = logits.float()
    k = min(k, wide.shape[-1])
    values, ids = wide.topk(k, dim=-1)
    total = torch.logsumexp(wide, dim=-1)
    top = torch.logsumexp(values, dim=-1)
    # log(exp(total) - exp(top)), exact enough where the rest is tiny: expm1 instead of a difference of exps.
    gap = (top - total).clamp(max=0.0)
    rest = total + torch.log((-torch.expm1(gap)).clamp(min=0.0))
    return TopK(ids, values, rest)
