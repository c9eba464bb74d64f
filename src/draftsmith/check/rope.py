"""One reader for the four ways in which configs write rotary embeddings.

rope_theta + rope_scaling {"type" | "rope_type", …}      transformers 4
rope_parameters {"rope_theta", "rope_type", …}           transformers 5
rope_parameters {"full_attention": {…}, …}               one per layer type (Gemma 3, gpt-oss style hybrids)
nothing                                                  theta 10,000
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.check.values import shown

DEFAULT_THETA = 10000.0
MROPE_KEYS = ("mrope_section", "mrope_interleaved")
_IGNORED = frozenset({"type", "rope_type", "rope_theta", *MROPE_KEYS, "partial_rotary_factor", "finetuned"})


@dataclass(frozen=True)
class Rope:
    """theta, kind ("default", "yarn", "llama3", …), its further parameters. mrope: multimodal position keys are there.
    written: False = nothing was written and the default counts. layers: other layer types' ropes, where nested."""

    theta: float = DEFAULT_THETA
    kind: str = "default"
    extra: tuple[tuple[str, Any], ...] = ()
    mrope: bool = False
    written: bool = False
    layers: dict[str, Rope] = field(default_factory=dict)

    def __str__(self) -> str:
        more = ", ".join(f"{k} {val:g}" if isinstance(val, float) else f"{k} {val}" for k, val in self.extra)
        return f"theta {self.theta:g}, {self.kind}{f' ({more})' if more else ''}{'' if self.written else ' by default'}"

    def same(self, other: Rope) -> bool:
        return (self.theta, self.kind, self.extra) == (other.theta, other.kind, other.extra)


def _one(theta: Any, scaling: Mapping[str, Any], written: bool) -> Rope | str:
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e300:
        return f"rope_theta is {shown(theta)}"
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str):
        return f"the rope type is {shown(kind)}"
    mrope = any(k in scaling for k in MROPE_KEYS) or kind == "mrope"
    kind = "default" if kind == "mrope" else {"su": "longrope"}.get(kind, kind)
    extra: list[tuple[str, Any]] = []
    for key in sorted(set(scaling) - _IGNORED):
        value = scaling[key]
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int | float) and abs(value) < 1e300:
            extra.append((key, float(value)))
        elif isinstance(value, list) and len(value) <= 4096:
            extra.append((key, tuple(str(x) for x in value)))
    if kind == "default":
        extra = []
    elif kind not in ("longrope",) and kind != "dynamic" and "factor" not in dict(extra) and kind != "proportional":
        return f"rope type {kind!r} without a factor"
    return Rope(float(theta), kind, tuple(extra), mrope, written)


def read_rope(config: Mapping[str, Any]) -> Rope | str:
    """The rope of a flat (text) config, or a sentence that says what is wrong with it."""
    parameters, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    top = config.get("rope_theta")
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            return f"{name} is {shown(value)}, not an object"
    nested = {k: p for k, p in (parameters or {}).items() if isinstance(p, dict)}
    if nested and len(nested) == len(parameters or {}):
        ropes: dict[str, Rope] = {}
        for kind, p in nested.items():
            one = _one(p.get("rope_theta", DEFAULT_THETA if top is None else top), p, True)
            if isinstance(one, str):
                return f"rope_parameters.{kind[:40]}: {one}"
            ropes[kind] = one
        main = ropes.get("full_attention") or next(iter(ropes.values()))
        return Rope(main.theta, main.kind, main.extra, main.mrope, True, ropes)
    merged = {**(scaling or {}), **(parameters or {})}
    theta = merged.get("rope_theta", top)
    if theta is None and "rope_theta" not in merged and "rope_theta" not in config:
        return _one(DEFAULT_THETA, merged, bool(merged))
    return _one(DEFAULT_THETA if theta is None else theta, merged, True)
