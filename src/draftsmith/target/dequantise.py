"""One tensor of a quantised checkpoint as plain numbers. Nearly every published recipe leaves embedding, norms and
lm_head alone; where one does not, the needed rows are undone here, and what cannot be is refused by name.

Stored forms (safetensors names beside X.weight):
  fp8, int8      X.weight + X.weight_scale ([] or [N] or [N, 1]) or X.weight_scale_inv ([N/b, M/b] blocks; DeepSeek)
  NVFP4          X.weight_packed or X.weight uint8 [N, M/2] + fp8 X.weight_scale [N, M/16] + a global scale
  pack-quantized X.weight_packed int32 [N, M/8] + X.weight_scale [N, M/g] (compressed-tensors, 4 bits)
  GPTQ           X.qweight int32 [M/8, N] + X.scales [M/g, N] + X.qzeros (+ X.g_idx), 4 bits
  AWQ            X.qweight int32 [M, N/8] + X.scales [M/g, N] + X.qzeros
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.errors import UserError
from draftsmith.target.tensors import Checkpoint

QUANTISED = ("qweight", "weight_packed")
"""What stands in the place of `weight` where it was packed."""

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The sixteen values of e2m1."""


def dequantised(point: Checkpoint, key: str, rows: Sequence[int] | None) -> torch.Tensor:
    """Tensor `key` (…weight), or its rows. Plain ones keep their type; dequantised ones come as float32."""
    base = key.removesuffix("weight")
    entry = point.entries.get(key)
    if entry is None:
        return _packed(point, base, rows)
    if entry.dtype in ("F8_E4M3", "F8_E5M2", "I8"):
        return _scaled(point, base, rows)
    if entry.dtype == "U8" and base + "weight_scale" in point.entries:
        return _nvfp4(point, base, key, rows)
    if entry.dtype not in ("F32", "F16", "BF16", "F64"):
        raise _unknown(point, key, f"stored as {entry.dtype} without a scale that is known here")
    return point.read(key, rows)


def _unknown(point: Checkpoint, key: str, why: str) -> UserError:
    return UserError(
        f"{point.name}: {key} cannot be read: {why}",
        "the drafter shares the target's embedding and starts from its lm_head",
        "use the unquantised model as target.model for training; the quantised one may still be served",
    )


def _pick(value: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
    return value if rows is None else value[torch.tensor(list(rows), dtype=torch.long)]


def _scaled(point: Checkpoint, base: str, rows: Sequence[int] | None) -> torch.Tensor:
    n, m = point.entries[base + "weight"].shape
    value = point.read(base + "weight", rows).float()
    for name in ("weight_scale_inv", "weight_scale"):
        if base + name not in point.entries:
            continue
        scale = point.read(base + name).float()
        if scale.numel() == 1:
            return value * scale.reshape(())
        if scale.numel() == n:
            return value * _pick(scale.reshape(n, 1), rows)
        if scale.dim() == 2:
            block_n, block_m = -(-n // scale.shape[0]), -(-m // scale.shape[1])
            # block sizes are powers of two in every recipe; the last block may be cut off
            block_n, block_m = 1 << (block_n - 1).bit_length(), 1 << (block_m - 1).bit_length()
            at = torch.arange(n) if rows is None else torch.tensor(list(rows), dtype=torch.long)
            return value * scale[at // block_n].repeat_interleave(block_m, dim=1)[:, :m]
        break
    raise _unknown(point, base + "weight", "8 bits without a scale that is known here")


def _nvfp4(point: Checkpoint, base: str, key: str, rows: Sequence[int] | None) -> torch.Tensor:
    packed, scale = point.read(key, rows), point.read(base + "weight_scale", rows).float()
    if base + "weight_scale_2" in point.entries:  # ModelOpt: multiply
        scale = scale * point.read(base + "weight_scale_2").float()
    elif base + "weight_global_scale" in point.entries:  # compressed-tensors: divide
        scale = scale / point.read(base + "weight_global_scale").float()
    low, high = FP4[(packed & 0xF).long()], FP4[(packed >> 4).long()]
    value = torch.stack((low, high), dim=-1).reshape(packed.shape[0], -1)
    return value * scale.repeat_interleave(value.shape[1] // scale.shape[1], dim=1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """int32 [..., K] → the eight 4-bit numbers of each, low first: int64 [..., K, 8]."""
    return (packed.long().unsqueeze(-1) >> (4 * torch.arange(8))) & 0xF


def _packed(point: Checkpoint, base: str, rows: Sequence[int] | None) -> torch.Tensor:
    names = point.entries
    if base + "weight_packed" in names:
        if names[base + "weight_packed"].dtype == "U8":
            return _nvfp4(point, base, base + "weight_packed", rows)
        value = _nibbles(point.read(base + "weight_packed", rows)).flatten(1)
        scale = point.read(base + "weight_scale", rows).float()
        _, m = point.read(base + "weight_shape").tolist() if base + "weight_shape" in names else (0, value.shape[1])
        if scale.shape[1] == 0 or m % scale.shape[1] or base + "weight_zero_point" in names:
            raise _unknown(point, base + "weight_packed", "packed with zero points or odd groups")
        return (value[:, :m] - 8).float() * scale.repeat_interleave(m // scale.shape[1], dim=1)
    if base + "qweight" not in names:
        raise _unknown(point, base + "weight", "not in the checkpoint")
    qweight, scales, zeros = (point.read(base + n) for n in ("qweight", "scales", "qzeros"))
    m_by_packed, n_by_packed = qweight.shape[0] * 8, qweight.shape[1] * 8
    groups, n = scales.shape
    if n == qweight.shape[1] and zeros.shape[1] * 8 == n:  # GPTQ: packed along the input
        value = _nibbles(qweight).permute(0, 2, 1).reshape(m_by_packed, n)
        zero = _nibbles(zeros).reshape(groups, n) + 1
        group = point.read(base + "g_idx").long() if base + "g_idx" in names else None
    elif n == n_by_packed:  # AWQ: packed along the output, in this order of nibbles
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
        value = _nibbles(qweight)[..., order].reshape(qweight.shape[0], n)
        zero, group = _nibbles(zeros)[..., order].reshape(groups, n), None
    else:
        raise _unknown(point, base + "qweight", f"packed in a form that is not known here {tuple(qweight.shape)}")
    if group is None:
        group = torch.arange(value.shape[0]) // (value.shape[0] // groups)
    full = (value - zero[group]).float() * scales.float()[group]  # [M, N]
    return _pick(full.T.contiguous(), rows)
