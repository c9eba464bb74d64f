"""Known releases: which of them takes a target, and a drafter. A table made by the reader from wheels (releases_make.py).

It answers only "which release would take it?"; what an installed engine does is always read from that installation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from draftsmith.engine.reader.drafters import looked_up
from draftsmith.target.config import text_config

FILE = "releases.json"

MEANING: dict[str, str] = {
    "-": "not registered",
    "n": "registered, without the EAGLE-3 interface",
    "y": "registered, with the EAGLE-3 interface",
    "u": "through the Transformers backend, without the interface",
    "t": "through the Transformers backend, with the interface",
    "i": "with the interface, but the language model inside collects no aux states",
    "p": "through the Transformers backend, whose EAGLE-3 needs a newer transformers than this release allows",
    "?": "the class could not be followed",
}
"""One letter per release and architecture."""

_NEEDED = ("norm_before_fc", "fc_norm", "norm_output")
"""Switches that change the drafter's graph when true: a release that does not know one accepts nothing, silently."""


@dataclass(frozen=True)
class Release:
    """One release as the reader saw it. model_types None: no list. switches: config keys its Llama drafter class reads;
    rewritten: model types of drafters that it turns into an MTP head's (reader/override.py).
    speculators: keys taken over from a speculators config; ids_v1, ids_v2: where each runner looks for aux layer ids."""

    version: str
    model_types: tuple[str, ...] | None
    drafters: tuple[str, ...]
    switches: tuple[str, ...]
    speculators: tuple[str, ...]
    ids_v1: tuple[str, ...]
    ids_v2: tuple[str, ...]
    transformers: str
    rewritten: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    engine: str
    releases: tuple[Release, ...]
    architectures: dict[str, str]
    """Architecture → one letter of MEANING per release, in the order of `releases`."""


@dataclass(frozen=True)
class Answer:
    """One release's answer. listed, interface, drafter: True, False, or None for "could not tell" / "not asked"."""

    version: str
    listed: bool
    interface: bool | None
    drafter: bool | None
    notes: tuple[str, ...]

    @property
    def takes(self) -> bool | None:
        parts = (self.listed, self.interface, self.drafter is not False)
        return False if False in parts else None if None in parts else True


@cache
def table(engine: str = "vllm") -> Table:
    """The table of an engine; empty where none was made."""
    raw = json.loads(files("draftsmith.engine").joinpath(FILE).read_text(encoding="utf-8")).get(engine, {})
    releases = tuple(
        Release(
            version=r["version"],
            model_types=None if r["model_types"] is None else tuple(r["model_types"]),
            drafters=tuple(r["drafters"]),
            switches=tuple(r["switches"]),
            speculators=tuple(r["speculators"]),
            ids_v1=tuple(r["ids_v1"]),
            ids_v2=tuple(r["ids_v2"]),
            transformers=r["transformers"],
            rewritten=tuple(r["rewritten"]),
        )
        for r in raw.get("releases", [])
    )
    return Table(engine, releases, raw.get("architectures", {}))


def answers(target: dict[str, Any], drafter: dict[str, Any] | None = None, engine: str = "vllm") -> list[Answer]:
    """Every known release's answer for a target's (and a drafter's) config.json, oldest first."""
    known = table(engine)
    return [_answer(known, i, release, target, drafter) for i, release in enumerate(known.releases)]


def _answer(
    known: Table, index: int, release: Release, target: dict[str, Any], drafter: dict[str, Any] | None
) -> Answer:
    notes: list[str] = []
    kind = text_config(target).get("model_type") or target.get("model_type")
    listed = release.model_types is None or any(word in str(kind) for word in release.model_types)
    if not listed:
        notes.append(f"model type {kind!r} is not on the list")
    letter = "-"
    architectures = target.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        letter = known.architectures.get(str(name), "").ljust(index + 1, "-")[index]
        if letter != "-":
            break
    interface = {"y": True, "t": True, "n": False, "u": False, "i": False, "p": False}.get(letter)
    if letter == "-" and "TransformersForCausalLM" not in known.architectures:
        interface = False
    elif letter == "-":
        backend = known.architectures.get("TransformersForCausalLM", "").ljust(index + 1, "-")[index]
        interface = None if backend == "t" else False
        letter = backend if backend == "p" else letter
        if interface is None:
            notes.append("not registered: perhaps through the Transformers backend")
    if interface is False:
        notes.append(MEANING[letter])
    takes_drafter = None
    if drafter is not None:
        lacking = _lacking(known.engine, release, drafter)
        takes_drafter = not lacking
        notes += lacking
    return Answer(release.version, listed, interface, takes_drafter, tuple(notes))


def _lacking(engine: str, release: Release, drafter: dict[str, Any]) -> list[str]:
    """What this release lacks for a drafter: its architecture, or a switch that it sets."""
    from_speculators = isinstance(drafter.get("speculators_model_type"), str)
    lacking: list[str] = []
    names = drafter.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if from_speculators:
        if not release.speculators:
            lacking.append("does not read speculators configs for EAGLE-3")
    elif name is None or (looked_up(name, release.drafters) if engine == "vllm" else name) not in release.drafters:
        lacking.append(f"drafter architecture {name} is not registered")
    if not from_speculators and drafter.get("model_type") in release.rewritten:
        lacking.append(f"turns a drafter of model type {drafter['model_type']} into an MTP head's")
    understood = release.speculators if from_speculators else tuple(s.rsplit(".", 1)[-1] for s in release.switches)
    nested = drafter.get("eagle_config")
    for switch in _NEEDED:
        value = drafter.get(switch) or (nested.get(switch) if isinstance(nested, dict) else None)
        if value and switch not in understood:
            lacking.append(f"does not know {switch}")
    return lacking


def first_release(target: dict[str, Any], engine: str = "vllm", drafter: dict[str, Any] | None = None) -> str | None:
    """The first known release that takes a target (and a drafter); None where none surely does."""
    return next((a.version for a in answers(target, drafter, engine) if a.takes), None)


def last_release(target: dict[str, Any], engine: str = "vllm", drafter: dict[str, Any] | None = None) -> str | None:
    return next((a.version for a in reversed(answers(target, drafter, engine)) if a.takes), None)
