"""What this machine's CPU can do."""

from __future__ import annotations

from pathlib import Path

BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
"""CPU flags with which oneDNN has bf16 products; without them torch's fallback is about five times slower than float32
(10 against 51 GFLOP/s at [2048, 576] x [576, 1536] on two AVX2 cores)."""


def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether it multiplies bfloat16 by instructions of its own."""
    if not cpuinfo.exists():
        return False
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not BF16_FLAGS.isdisjoint(flags)
