"""vLLM's Transformers backend asks for a release of transformers before it collects aux states (`check_version` in
vllm/model_executor/models/transformers/base.py); releases up to 0.18 pin transformers below what they ask for.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.interface import SETTER
from draftsmith.engine.reader.registry import Entry

if TYPE_CHECKING:
    from draftsmith.engine.reader.facts import EngineFacts


@dataclass(frozen=True)
class Need:
    """required: the release asked for; installed: the one in the environment, None where that cannot be seen; pin: what
    the engine's own metadata asks for. met: None where neither says."""

    required: str
    installed: str | None
    pin: str
    met: bool | None
    where: Evidence


def numbers(version: str) -> tuple[int, ...]:
    """(5, 2, 0) of "5.2.0.dev0"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in match.group().split(".")) if match else ()


def transformers_need(facts: EngineFacts, entry: Entry) -> Need | None:
    """What the class behind a Transformers-backend entry asks of transformers for EAGLE-3; None where it asks nothing."""
    cls = facts.class_of(entry) if entry.by_transformers else None
    found = None if cls is None else facts.graph.members(cls).get(SETTER)
    if found is None:
        return None
    owner, function = found
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("check_version") and node.args:
            required = node.args[0]
            if isinstance(required, ast.Constant) and isinstance(required.value, str):
                installed, pin = installed_transformers(facts), transformers_pin(facts)
                met = _met(required.value, installed, pin)
                return Need(required.value, installed, pin, met, owner.module.evidence(node))
    return None


def _met(required: str, installed: str | None, pin: str) -> bool | None:
    if installed is not None:
        return numbers(installed) >= numbers(required)
    least = re.search(r">=\s*([\d.]+)", pin)
    if least and numbers(least.group(1)) >= numbers(required):
        return True
    most = re.search(r"<\s*(\d[\d.]*)", pin)
    return False if most and numbers(most.group(1)) <= numbers(required) else None


def installed_transformers(facts: EngineFacts) -> str | None:
    """Release of the transformers beside the engine."""
    for name in facts.source.names(""):
        match = re.fullmatch(r"transformers-(.+)\.dist-info", name)
        if match:
            return match.group(1)
    return None


def transformers_pin(facts: EngineFacts) -> str:
    """The requirement on transformers in the distribution's metadata; "" where there is none."""
    for name in facts.source.names(""):
        if re.match(r"(vllm|sglang)\b.*\.dist-info$", name.replace("_", "-")) and facts.source.exists(
            f"{name}/METADATA"
        ):
            match = re.search(
                r"^Requires-Dist: transformers(?=[<>=!~ (])\s*([^;\n]*)",
                facts.source.read(f"{name}/METADATA"),
                re.MULTILINE,
            )
            if match:
                return match.group(1).strip(" ()")
    return ""
