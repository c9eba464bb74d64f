"""Picks the form of the elementwise parts: Triton kernels on a GPU, plain torch on a CPU."""

from __future__ import annotations

import os
from types import ModuleType

import torch


def ops_for(device: torch.device) -> ModuleType:
    """ops_triton for a GPU (or under Triton's interpreter, when tests ask for it), else ops_torch."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        from draftsmith.train.fused import ops_triton

        return ops_triton
    from draftsmith.train.fused import ops_torch

    return ops_torch
