"""Picks the form of the elementwise parts: Triton kernels on a GPU, plain torch on a CPU."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import torch


def use_triton(device: torch.device) -> bool:
    """On a GPU; also on a CPU under Triton's interpreter, which is how the kernels are tested without a GPU."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def ops_for(device: torch.device) -> ModuleType:
    """ops_triton or ops_torch: the same functions."""
    return import_module("draftsmith.train.fused." + ("ops_triton" if use_triton(device) else "ops_torch"))
