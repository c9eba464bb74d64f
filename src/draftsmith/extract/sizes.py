"""Bytes of stored states, by codec; without torch, so that a forecast answers at once."""

from __future__ import annotations

CODECS = ("bf16", "fp8", "fp8-topk")
IDS = 4
"""Bytes of a token id, and of the target's most likely token at supervised positions."""


def aux_bytes(codec: str, aux_layers: int, hidden: int) -> int:
    """Bytes of the aux streams of one token; fp8 adds a float32 scale per layer."""
    return aux_layers * (2 * hidden if codec == "bf16" else hidden + 4)


def teacher_bytes(codec: str, hidden: int, k: int = 128, draft_vocab_size: int = 32000) -> int:
    """Bytes of the teacher at one supervised position: the final state, or k logits (float16, ids of 16 bits up to a
    draft vocab of 65,536) and the log-mass of the rest."""
    if codec == "bf16":
        return 2 * hidden
    if codec == "fp8":
        return hidden + 4
    return min(k, draft_vocab_size) * ((2 if draft_vocab_size <= 1 << 16 else 4) + 2) + 4


def row_bytes(
    codec: str, tokens: int, supervised: int, aux_layers: int, hidden: int, k: int = 128, draft_vocab_size: int = 32000
) -> int:
    """Bytes of a row with its ids."""
    return tokens * (IDS + aux_bytes(codec, aux_layers, hidden)) + supervised * (
        IDS + teacher_bytes(codec, hidden, k, draft_vocab_size)
    )
