"""Which family of drafter a folder is, from config keys and tensor names alone; and whether it is EAGLE-3 at all.

A table, first match wins. Families differ in where they write aux layer ids, in what the ids count, in defaults of
the norm switches and in tensor names; `writes` says so for the reader of a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from draftsmith.check.values import Config, ids, mapping

Names = Collection[str]


@dataclass(frozen=True)
class Dialect:
    """name: our word. eagle3: False = this is another kind of drafter, which method eagle3 cannot serve.
    ids_mean: what an aux id counts in files of this family, where the family says so. signed: the ids of the streams that
    enter, where the file itself says them beside (SIGNED)."""

    name: str
    title: str
    writes: str
    eagle3: bool = True
    ids_mean: Literal["entering", "output", "unsaid"] = "unsaid"
    signed: tuple[int, ...] = ()


SIGNED = "draftsmith_aux_layer_ids"
"""Key of config.json that every writer here adds and no engine reads: the ids in vLLM's meaning. Without it [1, 3, 4] of
eight layers could be either."""


def _nested(c: Config) -> list[int] | None:
    return ids(mapping(c, "eagle_config").get("eagle_aux_hidden_state_layer_ids"))


def _speculators_type(c: Config) -> str | None:
    kind = c.get("speculators_model_type")
    return kind if isinstance(kind, str) else ("eagle3" if isinstance(c.get("speculators_config"), dict) else None)


def _has(names: Names, part: str) -> bool:
    return any(part in n for n in names)


def _eagle1(c: Config, names: Names) -> bool:
    """EAGLE-1/2 heads have an fc over [embedding, state] and no norm of the fused state."""
    return "fc.weight" in names and not _has(names, "hidden_norm") and _has(names, "layers.0.") and "d2t" not in names


def _architecture(c: Config) -> str:
    a = c.get("architectures")
    return a[0] if isinstance(a, list) and a and isinstance(a[0], str) else ""


TABLE: tuple[tuple[Callable[[Config, Names], bool], Dialect], ...] = (
    (
        lambda c, n: _speculators_type(c) == "eagle3",
        Dialect(
            "speculators", "speculators EAGLE-3", "transformer_layer_config; ids at top level", ids_mean="entering"
        ),
    ),
    (
        lambda c, n: _speculators_type(c) == "peagle",
        Dialect("p-eagle", "speculators P-EAGLE", "mask_hidden; parallel drafting", ids_mean="entering"),
    ),
    (
        lambda c, n: _speculators_type(c) is not None,
        Dialect("speculators-other", "another speculators algorithm", "", eagle3=False),
    ),
    (
        lambda c, n: isinstance(c.get("dflash_config"), dict) or "DFlash" in _architecture(c),
        Dialect("dflash", "DFlash", "dflash_config.target_layer_ids", eagle3=False),
    ),
    (
        lambda c, n: c.get("model_type") in ("medusa", "mlp_speculator") or _has(n, "medusa_head"),
        Dialect("medusa", "Medusa or MLP speculator heads", "", eagle3=False),
    ),
    (
        lambda c, n: _has(n, ".eh_proj.") or _has(n, "mtp.") or "MTP" in _architecture(c),
        Dialect("mtp", "multi-token-prediction layers", "", eagle3=False),
    ),
    (_eagle1, Dialect("eagle-1", "EAGLE-1/2", "fc over [embedding, state]", eagle3=False)),
    (
        lambda c, n: bool(n) and "model.embed_tokens.weight" in n and not any(x.endswith("fc.weight") for x in n),
        Dialect("language-model", "an ordinary language model", "", eagle3=False),
    ),
    (
        lambda c, n: _architecture(c) == "LlamaEagle3DraftModel",
        Dialect("automodel", "NeMo Automodel", "model.-prefixed names; must be rewritten for an engine"),
    ),
    (
        lambda c, n: "mask_hidden" in n or c.get("pard_token") is not None,
        Dialect("p-eagle", "P-EAGLE", "mask_hidden; parallel drafting"),
    ),
    (
        lambda c, n: ids(c.get("eagle_aux_hidden_state_layer_ids")) is not None,
        Dialect("vllm", "vLLM / draftsmith", "ids at top level", ids_mean="entering"),
    ),
    (
        lambda c, n: _nested(c) is not None,
        Dialect("sglang", "SpecForge / SGLang / ModelOpt", "ids in eagle_config", ids_mean="output"),
    ),
    (lambda c, n: True, Dialect("eagle", "reference EAGLE-3 form", "no ids: the engine's default layers")),
)


def detect(config: Config, names: Names) -> Dialect:
    """The family of a drafter. names: its tensor names ({} where they could not be read: the config decides)."""
    found = next(d for test, d in TABLE if test(config, names))
    return replace(found, signed=tuple(ids(config.get(SIGNED)) or ()))


def meaning(layer_ids: list[int], layers: int | None, family: Dialect) -> Literal["entering", "output", "unsaid"]:
    """What ids count: "entering" (the stream entering layer k, vLLM's) or "output" (of layer k, SGLang's; = k + 1).

    A file that says it beside is believed where both lists agree. Else a last boundary (n) exists only in the first
    meaning, and the producers' defaults tell the rest apart (sglang#25454: 1, n/2-1, n-4 are outputs; 2, n/2, n-3 enter)."""
    if family.signed in (tuple(layer_ids), tuple(k + 1 for k in layer_ids)):
        return "entering" if family.signed == tuple(layer_ids) else "output"
    if layers is None:
        return family.ids_mean
    if max(layer_ids) == layers or layer_ids == [2, layers // 2, layers - 3]:
        return "entering"
    if layer_ids[0] == 1 and layer_ids[-1] in (layers - 4, layers - 3) and family.name != "vllm":
        return "output"
    if layer_ids == [1, layers // 2 - 1, layers - 4]:
        return "output"
    return "entering" if layer_ids[0] == 2 and family.name == "sglang" else family.ids_mean
