"""Picks the form of the elementwise parts: Triton kernels on a GPU; on a CPU compiled loops, else plain torch."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import torch

from draftsmith.train.fused.native import library


def use_triton(device: torch.device) -> bool:
    """On a GPU; also on a CPU under Triton's interpreter, which is how the kernels are tested without a GPU."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def ops_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """ops_triton, ops_native (where a compiler is at hand) or ops_torch: the same functions."""
    if use_triton(device):
        name = "ops_triton"
    else:
        name = "ops_torch" if library(dtype) is None else "ops_native"
    return import_module(f"draftsmith.train.fused.{name}")
