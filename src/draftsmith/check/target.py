"""The target as the checks need it: sizes, vocabulary, rope, special tokens, cache bytes; from config and headers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.check import values as v
from draftsmith.check.headers import Weights
from draftsmith.check.rope import Rope, read_rope
from draftsmith.check.types import TensorHeader
from draftsmith.target.config import HIDDEN, LAYERS, VOCAB, text_config

VISION_KEYS = ("vision_config", "vision_tower", "audio_config", "mm_vision_tower", "visual")


EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embeddings.weight", "word_embeddings.weight")

"""Endings of the names of a token embedding: the only tensor of the target that is looked at."""


def _first(config: v.Config, keys: tuple[str, ...]) -> int | None:
    return next((n for key in keys if (n := v.integer(config, key)) is not None and 0 < n < 1 << 40), None)


@dataclass(frozen=True)
class Target:
    """raw: config.json as it lies there."""

    folder: Path | None
    raw: dict[str, Any]
    weights: Weights

    @cached_property
    def text(self) -> dict[str, Any]:
        return text_config(self.raw)

    @property
    def architecture(self) -> str | None:
        for c in (self.raw, self.text):
            a = c.get("architectures")
            if isinstance(a, list) and a and isinstance(a[0], str):
                return a[0]
        return None

    @property
    def multimodal(self) -> bool:
        return any(isinstance(self.raw.get(k), dict) for k in VISION_KEYS)

    @cached_property
    def hidden(self) -> int | None:
        return _first(self.text, HIDDEN)

    @cached_property
    def layers(self) -> int | None:
        return _first(self.text, LAYERS)

    @cached_property
    def vocab(self) -> int | None:
        return _first(self.text, VOCAB)

    @cached_property
    def max_positions(self) -> int | None:
        return _first(self.text, ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"))

    @cached_property
    def heads(self) -> tuple[int, int] | None:
        """(query heads, key/value heads)."""
        n = _first(self.text, ("num_attention_heads", "n_head"))
        return None if n is None else (n, _first(self.text, ("num_key_value_heads", "n_head_kv")) or n)

    @cached_property
    def rope(self) -> Rope | str:
        return read_rope(self.text)

    @cached_property
    def special_ids(self) -> dict[int, str]:
        """Ids that end a turn or an answer → where they are named (config.json, generation_config.json)."""
        from draftsmith.check.inputs import load_json
        from draftsmith.errors import UserError

        found: dict[int, str] = {}
        sources: list[tuple[str, v.Config]] = [("config.json", self.text), ("config.json", self.raw)]
        if self.folder is not None and (self.folder / "generation_config.json").is_file():
            try:
                sources.append(("generation_config.json", load_json(self.folder / "generation_config.json")))
            except UserError:
                sources = sources[:2]  # an unreadable generation config says nothing about the end of a turn
        for name, config in sources:
            eos = config.get("eos_token_id")
            for token in eos if isinstance(eos, list) else [eos]:
                if isinstance(token, int) and not isinstance(token, bool):
                    found.setdefault(token, name)
        return found

    @cached_property
    def kv_bytes_per_token(self) -> int | None:
        """Bytes of 16-bit cache per token on one device without tensor parallelism; None where sizes are missing.
        MLA stores one compressed row per layer; linear-attention layers store none."""
        layers = self.layers
        if layers is None:
            return None
        kinds = self.text.get("layer_types")
        if isinstance(kinds, list) and len(kinds) == layers:
            layers = sum(1 for k in kinds if isinstance(k, str) and "attention" in k and "linear" not in k)
        rank, rope = v.integer(self.text, "kv_lora_rank"), v.integer(self.text, "qk_rope_head_dim")
        if rank and rope:
            return layers * (rank + rope) * 2
        if self.heads is None or self.hidden is None:
            return None
        dim = v.integer(self.text, "head_dim") or self.hidden // self.heads[0]
        return layers * 2 * self.heads[1] * dim * 2

    @cached_property
    def embedding(self) -> TensorHeader | None:
        """The token embedding, by the one name that fits: [V, G]."""
        found = [t for n, t in self.weights.tensors.items() if n.endswith(EMBEDDINGS) and ".layers." not in n]
        fits = [t for t in found if t.shape and self.vocab and self.hidden and t.shape[-1] == self.hidden]
        return fits[0] if len(fits) == 1 else None
