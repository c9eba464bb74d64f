"""How a transformers model is given its KV cache."""

from __future__ import annotations

import inspect
from typing import Any


def cache_word(model: Any) -> str:
    """The argument of the model's `forward` that takes the cache: `past_key_values`, newer releases of transformers say
    `cache` and warn of the other."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
