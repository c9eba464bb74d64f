"""What this release makes of a drafter: its architecture's name in the registry, the config keys its class and the two
model runners read, the default aux layers.

Engine files: vllm/transformers_utils/configs/eagle.py, …/configs/speculators/algos.py, model_executor/models/llama_eagle3.py,
v1/worker/gpu_model_runner.py (V1 runner), v1/worker/gpu/spec_decode/eagle/eagle3_utils.py (V2 runner).
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.configkeys import KeyRead, Reads, reads_of
from draftsmith.engine.reader.functions import find_function
from draftsmith.engine.reader.registry import Entry

if TYPE_CHECKING:
    from draftsmith.engine.reader.facts import EngineFacts

Runner = Literal["v1", "v2"]

V1_RUNNER = ("vllm.v1.worker.gpu_model_runner", "_get_eagle3_aux_layers_from_config")
V2_RUNNER = ("vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils", "get_eagle3_aux_layers_from_config")
SPECULATORS = ("vllm.transformers_utils.configs.speculators.algos", "update_eagle3")
USES_AUX = (
    ("vllm.v1.spec_decode.llm_base_proposer", "_get_eagle3_use_aux_hidden_state_from_config"),
    ("vllm.v1.spec_decode.eagle", "_get_eagle3_use_aux_hidden_state_from_config"),
)
SWITCHES = (
    "target_hidden_size",
    "attention_bias",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "num_aux_hidden_states",
    "draft_vocab_size",
    "use_aux_hidden_state",
    "eagle_aux_hidden_state_layer_ids",
    "layer_ids",
    "logit_scale",
)
"""Keys whose being understood or not changes what a drafter does (vllm-facts: what llama_eagle3.py reads)."""


def registered_name(architecture: str) -> str:
    """The name that vLLM looks up for a drafter's architecture with method eagle3 (configs/eagle.py)."""
    kept = architecture.startswith("Eagle3") or architecture.endswith("Eagle3")
    return architecture if kept else f"Eagle3{architecture}"


def looked_up(architecture: str, registered: Collection[str]) -> str:
    """A name that is registered as it stands, or the name vLLM would make of it (P-EAGLE names are registered whole)."""
    return architecture if architecture in registered else registered_name(architecture)


def drafter_entry(facts: EngineFacts, config: dict[str, Any]) -> tuple[str | None, Entry | None]:
    """(the name looked up, the registry entry or None) of a drafter's config.json; a speculators config is served
    under the name that the engine itself writes for it."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if isinstance(config.get("speculators_model_type"), str):
        name = speculators_architecture(facts, config) or name
    if name is None:
        return None, None
    asked = looked_up(name, facts.drafters)
    return asked, facts.drafters.get(asked)


def speculators_architecture(facts: EngineFacts, config: dict[str, Any]) -> str | None:
    """The architecture that vLLM writes into a speculators config (configs/speculators/algos.py)."""
    found = find_function(facts.modules, *SPECULATORS)
    if found is None:
        return None
    names = [
        node.value
        for node in ast.walk(found[1])
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in facts.drafters
    ]
    layer = config.get("transformer_layer_config")
    kind = layer.get("model_type") if isinstance(layer, dict) else None
    if isinstance(kind, str):
        for name in names:
            if kind.lower() in name.lower():
                return name
    return names[0] if names else None


def _function_reads(facts: EngineFacts, module: str, function: str) -> Reads:
    found = find_function(facts.modules, module, function)
    if found is None:
        return Reads(None)
    where, node = found
    return Reads(where.evidence_at(node.lineno), tuple(reads_of(where, node)))


def runner_reads(facts: EngineFacts, runner: Runner) -> Reads:
    """Where a runner looks for aux layer ids. `place` None: this release's runner looks nowhere (or does not exist)."""
    return _function_reads(facts, *(V1_RUNNER if runner == "v1" else V2_RUNNER))


def use_aux_reads(facts: EngineFacts) -> Reads:
    """Where the V1 runner looks whether the drafter uses aux states at all."""
    return next((r for r in (_function_reads(facts, *one) for one in USES_AUX) if r.place), Reads(None))


def speculators_reads(facts: EngineFacts) -> Reads:
    """What is taken over from a speculators config for EAGLE-3, with the defaults it gets there."""
    return _function_reads(facts, *SPECULATORS)


def class_reads(facts: EngineFacts, architecture: str) -> Reads:
    """The keys that a registered drafter class reads: its whole module, then the modules of its ancestors' classes."""
    entry = facts.drafters.get(architecture)
    cls = None if entry is None else facts.class_of(entry)
    if cls is None:
        return Reads(None)
    return Reads(cls.evidence, tuple(reads_of(cls.module, cls.module.tree)))


def switches(facts: EngineFacts, architecture: str) -> dict[str, KeyRead]:
    """Those of SWITCHES that the class reads, by spelling ("eagle_config.norm_before_fc")."""
    found: dict[str, KeyRead] = {}
    for read in class_reads(facts, architecture).reads:
        if read.key in SWITCHES:
            found.setdefault(read.spelled, read)
    return found


@dataclass(frozen=True)
class DefaultLayers:
    """ids: the default aux layers for this many layers, None where the code could not be evaluated."""

    ids: tuple[int, ...] | None
    where: Evidence | None


_GETTERS = ("get_eagle3_default_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers")


def default_layers(facts: EngineFacts, entry: Entry | None, num_layers: int) -> DefaultLayers:
    """The aux layers that a target class uses where the drafter names none."""
    interface = facts.interface
    cls = None if entry is None else facts.class_of(entry)
    owners = [c for c in (cls, interface.protocol if interface else None) if c is not None]
    # The runner calls the getter that the interface declares; classes may keep the old name as dead code.
    wanted = [g for g in _GETTERS if interface is None or g in interface.members] or list(_GETTERS)
    where = None
    for owner in owners:
        for name in wanted:
            found = facts.graph.members(owner).get(name)
            if found is None or not isinstance(found[1], ast.FunctionDef):
                continue
            returns = [n for n in ast.walk(found[1]) if isinstance(n, ast.Return) and n.value is not None]
            for node in returns:
                ids = _ids(node.value, num_layers)
                if ids is not None:
                    return DefaultLayers(ids, found[0].module.evidence(node))
            where = where or found[0].module.evidence(found[1])
    return DefaultLayers(None, where)


def _ids(node: ast.expr | None, n: int) -> tuple[int, ...] | None:
    if not isinstance(node, ast.Tuple):
        return None
    values = [_number(e, n) for e in node.elts]
    return None if any(v is None for v in values) else tuple(v for v in values if v is not None)


def _number(node: ast.expr, n: int) -> int | None:
    """Integers, the number of layers under whatever name, and + - // of them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name | ast.Attribute) or (
        isinstance(node, ast.Call) and ast.unparse(node).startswith("len(")
    ):
        return n
    if isinstance(node, ast.BinOp):
        a, b = _number(node.left, n), _number(node.right, n)
        if a is None or b is None:
            return None
        if isinstance(node.op, ast.Add):
            return a + b
        if isinstance(node.op, ast.Sub):
            return a - b
        if isinstance(node.op, ast.FloorDiv) and b:
            return a // b
    return None
