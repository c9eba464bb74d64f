"""Rotary position embedding as the engine computes it (vllm/model_executor/layers/rotary_embedding/).

`Rope(parameters, head_dim)` turns transformers' `rope_parameters` into inverse frequencies once; `angles(position)`
gives cos and sin for any positions, so no table has to be sized. Types: default, linear, llama3, yarn (and yarn in
DeepSeek's meaning for the MLA form). Everything is made in float32, as in the engine, whatever the model's type.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError, nearest

# type → keys that it cannot do without
TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def _plain(dim: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _llama3(dim: int, base: float, p: dict[str, Any]) -> Tensor:
    """Wave lengths under original/high keep their frequency, those over original/low are divided by the factor,
    those between are blended (llama3_rope.py)."""
    freq = _plain(dim, base)
    original, low, high, factor = (
        p["original_max_position_embeddings"],
        p["low_freq_factor"],
        p["high_freq_factor"],
        p["factor"],
    )
    wave = 2 * math.pi / freq
    smooth = (original / wave - low) / (high - low) if low != high else torch.zeros_like(wave)
    blended = (1 - smooth) * freq / factor + smooth * freq
    return torch.where(wave < original / high, freq, torch.where(wave > original / low, freq / factor, blended))


def _yarn_range(dim: int, base: float, p: dict[str, Any]) -> tuple[float, float]:
    """Dimensions between which interpolation is ramped in (YaRN paper, section 3.2; common.py)."""

    def at(rotations: float) -> float:
        original = p["original_max_position_embeddings"]
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = at(p.get("beta_fast", 32)), at(p.get("beta_slow", 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def _yarn(dim: int, base: float, p: dict[str, Any]) -> Tensor:
    freq = _plain(dim, base)
    low, high = _yarn_range(dim, base, p)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return freq / p["factor"] * ramp + freq * (1 - ramp)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the scaling factor (common.py `yarn_get_mscale`)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _amplitude(p: dict[str, Any], deepseek: bool) -> float:
    """What cos and sin are multiplied with under yarn."""
    factor = p["factor"]
    if deepseek:  # deepseek_scaling_rope.py: mscale_all_dim 0 still divides, by 1
        return yarn_mscale(factor, p.get("mscale", 1)) / yarn_mscale(factor, p.get("mscale_all_dim", 0))
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return yarn_mscale(factor, p["mscale"]) / yarn_mscale(factor, p["mscale_all_dim"])
    return yarn_mscale(factor)


class Rope:
    """Angles of one attention layer.

    parameters: transformers' `rope_parameters`; head_dim: width that may be rotated (MLA: the rope part);
    deepseek: yarn in DeepSeek's meaning. Raises UserError for an unknown type or a missing key.
    """

    def __init__(self, parameters: dict[str, Any], head_dim: int, deepseek: bool = False) -> None:
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in TYPES:
            close = nearest(str(kind), list(TYPES))
            raise UserError(
                f"rope type {kind!r} cannot be trained",
                "the engine would rotate keys in another way than training did",
                f"did you mean {close[0]!r}?" if close else f"known types: {', '.join(TYPES)}",
            )
        missing = [key for key in TYPES[kind] if parameters.get(key) is None]
        if missing:
            raise UserError(
                f"rope type {kind!r} without {', '.join(missing)}",
                "the frequencies are not defined without it",
                "give it under drafter.rope in the recipe, as the target's config.json has it",
            )
        base = float(parameters.get("rope_theta", 10000.0))
        self.dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        self.amplitude, self.position_scale = 1.0, 1.0
        if kind == "llama3":
            self.inv_freq = _llama3(self.dim, base, parameters)
        elif kind == "yarn":
            self.inv_freq = _yarn(self.dim, base, parameters)
            self.amplitude = _amplitude(parameters, deepseek)
        else:
            self.inv_freq = _plain(self.dim, base)
        if kind == "linear":
            self.position_scale = 1.0 / float(parameters["factor"])

    def angles(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position int64 [T] → cos, sin [T, 1, dim/2] of `dtype`."""
        if self.inv_freq.device != position.device:
            self.inv_freq = self.inv_freq.to(position.device)
        phase = (position.float() * self.position_scale)[:, None] * self.inv_freq
        return (phase.cos() * self.amplitude).to(dtype)[:, None], (phase.sin() * self.amplitude).to(dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first 2*cos.shape[-1] channels of x [T, heads, d]; the rest passes.

    Pairs are (i, i + dim/2) as in Llama, or (2i, 2i + 1) if `interleaved` (DeepSeek)."""
    dim = 2 * cos.shape[-1]
    turned, passed = x[..., :dim], x[..., dim:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((out, passed), dim=-1) if passed.shape[-1] else out
