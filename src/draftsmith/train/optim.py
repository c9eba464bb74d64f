"""AdamW on the drafter's parameters, with float32 masters where the parameters themselves are bfloat16.

A bf16 parameter has 8 bits: an update below 1/256 of it is lost, so the optimizer moves a float32 copy and the
parameter follows. Matrices decay, vectors (norms, biases) do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

Named = Sequence[tuple[str, nn.Parameter]]


class Optimizer(Protocol):
    """What the loop needs."""

    def step(self, lr: float, clip: float) -> Tensor:
        """Clip `.grad` to a global norm, move the parameters, zero the gradients; returns the norm before clipping."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything that an exact resume needs, masters included, by name."""
        ...

    def load(self, state: dict[str, Tensor]) -> None: ...


class MasterAdamW:
    """torch's fused AdamW; `masters` are the parameters themselves where they are float32 (or float64) already."""

    def __init__(self, named: Named, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8) -> None:
        self.named = list(named)
        wide = [p.dtype in (torch.float32, torch.float64) for _, p in self.named]
        self.masters = [
            p if w else p.detach().float().requires_grad_() for (_, p), w in zip(self.named, wide, strict=True)
        ]
        groups = [
            {"params": [m for m in self.masters if (m.dim() > 1) == decays], "weight_decay": weight_decay * decays}
            for decays in (True, False)
        ]
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=True)

    def step(self, lr: float, clip: float) -> Tensor:
        for (_, p), m in zip(self.named, self.masters, strict=True):
            if m is not p:
                m.grad = None if p.grad is None else p.grad.float()
                p.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, clip)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        with torch.no_grad():
            for (_, p), m in zip(self.named, self.masters, strict=True):
                if m is not p:
                    p.copy_(m)
        self.adam.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for (name, p), m in zip(self.named, self.masters, strict=True):
            if m is not p:
                out[f"master.{name}"] = m.detach()
            for key, value in self.adam.state.get(m, {}).items():
                out[f"{key}.{name}"] = value.detach()
        return out

    def load(self, state: dict[str, Tensor]) -> None:
        for (name, p), m in zip(self.named, self.masters, strict=True):
            if m is not p:
                with torch.no_grad():
                    m.copy_(state[f"master.{name}"])
            found = {
                key: state[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in state
            }
            if found:
                self.adam.state[m] = {k: v.to(m.device).clone() for k, v in found.items()}
