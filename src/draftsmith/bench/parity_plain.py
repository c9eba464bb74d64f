"""A second reading of an exported drafter's files, for machines without an engine: config keys and tensors taken straight
from the files as vLLM's classes take them (llama_eagle3.py, deepseek_eagle3.py), the forward written out in the plainest
form. Shares no code with drafter/ and dialects/, so that it can disagree with them.

Rows: T; heads n, of keys m; widths d (Llama), or nope + rope and v (MLA).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


class PlainDrafter:
    """`run` gives the same outputs as parity_engine.py. folder: config.json and *.safetensors in the vLLM dialect."""

    def __init__(self, folder: Path) -> None:
        self.c: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.t: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118
                    tensor = f.get_tensor(name)
                    self.t[name.replace("midlayer.", "layers.0.")] = (
                        tensor.float() if tensor.is_floating_point() else tensor
                    )
        self.eps = float(self.c.get("rms_norm_eps", 1e-6))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def flag(self, name: str) -> bool:
        return bool(self.c.get(name, False))

    def w(self, name: str) -> Tensor:
        return self.t[f"layers.0.{name}"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.w(f"{name}.weight").T
        bias = self.t.get(f"layers.0.{name}.bias") if self.flag("attention_bias") else None
        return out if bias is None else out + bias

    # rotary embedding

    def rope(self) -> dict[str, Any]:
        scaling = self.c.get("rope_parameters") or self.c.get("rope_scaling") or {}
        return {"rope_theta": self.c.get("rope_theta", 10000.0), "rope_type": "default", **scaling}

    def angles(self, position: Tensor, dim: int, deepseek: bool) -> tuple[Tensor, Tensor]:
        p = self.rope()
        base, kind = float(p["rope_theta"]), p.get("rope_type") or p.get("type")
        freq = torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
        place, size = position.double(), 1.0
        if kind == "linear":
            place = place / p["factor"]
        elif kind == "llama3":
            low, high = p["original_max_position_embeddings"] / p["low_freq_factor"], p["factor"]
            short = p["original_max_position_embeddings"] / p["high_freq_factor"]
            for i, f in enumerate(freq.tolist()):
                wave = 2 * math.pi / f
                if wave > low:
                    freq[i] = f / high
                elif wave >= short:
                    r = (p["original_max_position_embeddings"] / wave - p["low_freq_factor"]) / (
                        p["high_freq_factor"] - p["low_freq_factor"]
                    )
                    freq[i] = (1 - r) * f / high + r * f
        elif kind == "yarn":
            first, last = self._yarn_band(dim, base, p)
            for i, f in enumerate(freq.tolist()):
                ramp = min(max((i - first) / max(last - first, 0.001), 0.0), 1.0)
                freq[i] = f / p["factor"] * ramp + f * (1 - ramp)
            size = self._yarn_size(p, deepseek)
        phase = place[:, None] * freq
        return (phase.cos() * size).float(), (phase.sin() * size).float()

    @staticmethod
    def _yarn_band(dim: int, base: float, p: dict[str, Any]) -> tuple[float, float]:
        ends = []
        for turns in (p.get("beta_fast", 32), p.get("beta_slow", 1)):
            ends.append(
                dim * math.log(p["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))
            )
        if p.get("truncate", True):
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        return max(ends[0], 0), min(ends[1], dim - 1)

    @staticmethod
    def _yarn_size(p: dict[str, Any], deepseek: bool) -> float:
        def grow(scale: float, times: float) -> float:
            return 1.0 if scale <= 1 else 0.1 * times * math.log(scale) + 1.0

        if deepseek:
            return grow(p["factor"], p.get("mscale", 1)) / grow(p["factor"], p.get("mscale_all_dim", 0))
        if p.get("attention_factor") is not None:
            return float(p["attention_factor"])
        if p.get("mscale") and p.get("mscale_all_dim"):
            return grow(p["factor"], p["mscale"]) / grow(p["factor"], p["mscale_all_dim"])
        return grow(p["factor"], 1.0)

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
        """x [T, heads, dim] rotated; pairs: neighbours (DeepSeek), else halves (Llama)."""
        cos, sin = cos[:, None], sin[:, None]
        if pairs:
            a, b = x[..., 0::2], x[..., 1::2]
            out = torch.empty_like(x)
            out[..., 0::2], out[..., 1::2] = a * cos - b * sin, b * cos + a * sin
            return out
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    # attention

    def attend(self, q: Tensor, scale: float) -> Tensor:
        """q [T, n, d] over step-0 keys up to its own row, and its own row's keys of later steps → [T, n * v]."""
        group = q.shape[1] // self.keys[0].shape[1]
        out = []
        for t in range(len(q)):
            k = torch.cat([self.keys[0][: t + 1], *(x[t][None] for x in self.keys[1:])]).repeat_interleave(group, 1)
            v = torch.cat([self.values[0][: t + 1], *(x[t][None] for x in self.values[1:])]).repeat_interleave(group, 1)
            p = torch.softmax((q[t][None] * k).sum(-1) * scale, 0)
            out.append((p[..., None] * v).sum(0).flatten())
        return torch.stack(out)

    def llama(self, x: Tensor, position: Tensor) -> Tensor:
        n = self.c["num_attention_heads"]
        d = self.c.get("head_dim") or self.c["hidden_size"] // n
        q, k, v = (self.linear(f"self_attn.{p}_proj", x).reshape(len(x), -1, d) for p in ("q", "k", "v"))
        cos, sin = self.angles(position, d, deepseek=False)
        self.keys.append(self.turn(k, cos, sin, pairs=False))
        self.values.append(v)
        return self.linear("self_attn.o_proj", self.attend(self.turn(q, cos, sin, pairs=False), d**-0.5))

    def latent(self, x: Tensor, position: Tensor) -> Tensor:
        c, n, T = self.c, self.c["num_attention_heads"], len(x)
        nope, rot, wide = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        inner = norm(self.linear("self_attn.q_a_proj", x), self.w("self_attn.q_a_layernorm.weight"), self.eps)
        q = self.linear("self_attn.q_b_proj", inner).reshape(T, n, nope + rot)
        both = self.linear("self_attn.kv_a_proj_with_mqa", x)
        rank = c["kv_lora_rank"]
        low = norm(both[:, :rank], self.w("self_attn.kv_a_layernorm.weight"), self.eps)
        cos, sin = self.angles(position, rot, deepseek=True)
        shared = self.turn(both[:, rank:].reshape(T, 1, rot), cos, sin, pairs=True)
        spread = self.linear("self_attn.kv_b_proj", low).reshape(T, n, nope + wide)
        self.keys.append(torch.cat([spread[..., :nope], shared.expand(-1, n, -1)], -1))
        self.values.append(spread[..., nope:])
        q = torch.cat([q[..., :nope], self.turn(q[..., nope:], cos, sin, pairs=True)], -1)
        scale = (nope + rot) ** -0.5
        p = self.rope()
        if (p.get("rope_type") or p.get("type")) == "yarn" and p.get("mscale_all_dim"):
            scale *= (0.1 * p["mscale_all_dim"] * math.log(p["factor"]) + 1.0) ** 2
        return self.linear("self_attn.o_proj", self.attend(q, scale))

    # the drafter

    def fuse(self, aux: Tensor) -> Tensor:
        nested = self.c.get("eagle_config") or {}
        if self.flag("norm_before_fc") or nested.get("norm_before_fc"):
            aux = norm(aux, self.t["input_norm.weight"], self.eps)
        if self.flag("fc_norm"):
            count = sum(n.startswith("fc_norm.") for n in self.t)
            parts = aux.chunk(count, -1)
            aux = torch.cat([norm(x, self.t[f"fc_norm.{i}.weight"], self.eps) for i, x in enumerate(parts)], -1)
        return aux @ self.t["fc.weight"].T

    def step(self, state: Tensor, embedding: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """(output for lm_head, state for the next step)."""
        normed = norm(state, self.w("hidden_norm.weight"), self.eps)
        residual = normed if self.flag("norm_before_residual") else state
        x = torch.cat([norm(embedding, self.w("input_layernorm.weight"), self.eps), normed], -1)
        attention = self.latent if "layers.0.self_attn.kv_b_proj.weight" in self.t else self.llama
        stream = residual + attention(x, position)
        y = norm(stream, self.w("post_attention_layernorm.weight"), self.eps)
        gate = y @ self.w("mlp.gate_proj.weight").T
        up = y @ self.w("mlp.up_proj.weight").T
        stream = stream + (gate * torch.sigmoid(gate) * up) @ self.w("mlp.down_proj.weight").T
        out = norm(stream, self.t["norm.weight"], self.eps)
        return out, out if self.flag("norm_output") else stream

    @torch.no_grad()
    def run(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """in.safetensors' tensors → out.safetensors' (see parity_engine.py)."""
        self.keys, self.values, out = [], [], {}
        state = out["fused"] = self.fuse(given["aux"])
        for s, embedding in enumerate(given["embeddings"]):
            if "embed_tokens.weight" in self.t:
                embedding = out[f"embedding.{s}"] = self.t["embed_tokens.weight"][given["token_ids"][s]]
            normed, state = self.step(state, embedding, given["position"] + s)
            logits = normed @ self.t["lm_head.weight"].T
            out |= {f"normed.{s}": normed, f"state.{s}": state, f"logits.{s}": logits}
            best = logits.argmax(-1)
            offsets = self.t.get("d2t")
            out[f"proposals.{s}"] = best if offsets is None else best + offsets[best]
        return out
