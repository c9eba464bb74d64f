"""The target's norm and lm_head from its files alone: what turns a final state into logits where the whole model is
not loaded here (states through vLLM)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftsmith.extract.codecs import topk_of_logits
from draftsmith.extract.states import TopK
from draftsmith.target.config import load_config
from draftsmith.target.weights import head_rule, read_final_norm, read_lm_head

_CHUNK = 256


class WeightsHead:
    """RMS norm, lm_head rows, scale and softcap (target/weights.py). draft_ids int64 [D]: rows for top-k teachers; the
    whole head is read when `tops` first needs it."""

    def __init__(self, folder: Path, draft_ids: Tensor | None = None, device: str | None = None) -> None:
        self.folder, self.rule = folder, head_rule(load_config(folder))
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.norm = read_final_norm(folder).float().to(self.device)
        self.draft: Tensor | None = None
        if draft_ids is not None:
            self.draft = read_lm_head(folder, rows=draft_ids.tolist()).float().to(self.device)
        self._whole: Tensor | None = None

    def normed(self, x: Tensor) -> Tensor:
        """float32 [..., G] → RMS-normed."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.rule.eps) * self.norm

    def _logits(self, normed: Tensor, rows: Tensor) -> Tensor:
        logits = (normed @ rows.T) * self.rule.scale
        cap = self.rule.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def tops(self, final: Tensor, times: int = 1) -> Tensor:
        """Most likely tokens int64 [M] of final states [M, G] before the norm, with the norm applied `times` times."""
        if self._whole is None:
            self._whole = read_lm_head(self.folder).float().to(self.device)
        out = []
        for part in final.split(_CHUNK):
            x = part.to(self.device).float()
            for _ in range(times):
                x = self.normed(x)
            out.append(self._logits(x, self._whole).argmax(-1).cpu())
        return torch.cat(out)

    def topk(self, final: Tensor, k: int) -> TopK:
        """The teacher on the draft vocab: final [M, G] → its top k and the rest's mass, on the CPU."""
        assert self.draft is not None
        parts = [
            topk_of_logits(self._logits(self.normed(p.to(self.device).float()), self.draft), k).cpu()
            for p in final.split(_CHUNK)
        ]
        return TopK.cat(parts)
