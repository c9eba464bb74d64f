"""Which class vLLM would choose for a target's `architectures`: registered, by another name, or through transformers.

Mirrors `_ModelRegistry.resolve_model_cls` and `ModelConfig._get_transformers_backend_cls` of 0.16–0.32
(vllm/model_executor/models/registry.py, vllm/config/model.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.registry import Entry
from draftsmith.target.config import text_config

if TYPE_CHECKING:
    from draftsmith.engine.reader.facts import EngineFacts

EXPERTS = (
    "num_experts",
    "moe_num_experts",
    "num_local_experts",
    "n_routed_experts",
    "ffn_config.moe_num_experts",
    "num_moe_experts",
    "moe_config.num_experts",
)
"""Where configs say that they are mixtures of experts."""


@dataclass(frozen=True)
class Resolved:
    """entry: None where nothing was found; how: "registered", "transformers", "unknown" or "unsupported"."""

    architecture: str | None
    entry: Entry | None
    how: str
    reason: str
    evidence: list[Evidence]


def experts(text: dict[str, Any]) -> int:
    """How many routed experts a text config declares; 0 = dense."""
    for name in EXPERTS:
        node: Any = text
        for key in name.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, list) and node:
            node = max((n for n in node if isinstance(n, int)), default=0)
        if isinstance(node, int) and not isinstance(node, bool) and node > 0:
            return node
    return 0


def backend_class(config: dict[str, Any]) -> str:
    """The Transformers backend's class for a config: nested configs are multimodal, routed experts make it MoE."""
    text = text_config(config)
    return f"Transformers{'MultiModal' if text is not config else ''}{'MoE' if experts(text) else ''}ForCausalLM"


def resolve_architecture(facts: EngineFacts, config: dict[str, Any], model_impl: str = "auto") -> Resolved:
    names = config.get("architectures")
    names = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
    if facts.name == "sglang":
        return _in_sglang(facts, names, config)
    registry = facts.registry
    if registry is None:
        return Resolved(None, None, "unknown", f"no model registry found in {facts.path}", [])
    if not names:
        return Resolved(None, None, "unsupported", "config.json names no architectures", [])
    if model_impl == "transformers":
        return _by_transformers(facts, names[0], config, [])
    for name in names:
        entry = registry.entries.get(name)
        if entry is not None:
            return Resolved(
                name, entry, "registered", f"{name} is {entry.cls} in {entry.module}", [registry.evidence(entry)]
            )
    # Transformers' own class is tried first, also for architectures that were taken out.
    found = _by_transformers(facts, names[0], config, [])
    taken_out = next((n for n in names if n in registry.former), None)
    if found.how == "transformers" or taken_out is None:
        return found
    reason = f"{taken_out} was taken out; the last release with it is {registry.former[taken_out]}"
    entry = found.entry if found.how == "unknown" else None
    return Resolved(taken_out, entry, found.how, f"{reason}. {found.reason}", found.evidence)


def _in_sglang(facts: EngineFacts, names: list[str], config: dict[str, Any]) -> Resolved:
    """SGLang registers classes by their own names and falls back to its Transformers class."""
    from draftsmith.engine.reader.sglang import entry_of, registered

    entry = entry_of(facts, config)
    if not names or entry is None:
        return Resolved(names[0] if names else None, None, "unsupported", "no class is registered for it", [])
    how = "registered" if entry.architecture in names else "transformers"
    return Resolved(names[0], entry, how, f"{names[0]} is {entry.cls} in {entry.module}", [registered(facts, entry)])


def _by_transformers(facts: EngineFacts, name: str, config: dict[str, Any], evidence: list[Evidence]) -> Resolved:
    """vLLM's fallback: transformers' own class, where that says it can take vLLM's attention.

    Whether it does is asked of the transformers in the same environment, from its source.
    """
    registry = facts.registry
    assert registry is not None
    wanted = backend_class(config)
    entry = registry.entries.get(wanted)
    if entry is None:
        reason = f"{name} is not registered, and this release has no {wanted}"
        return Resolved(name, None, "unsupported", reason, evidence)
    found = _transformers_modelling(facts, name, config)
    if found is None:
        why = (
            "its code comes with the checkpoint (auto_map)"
            if isinstance(config.get("auto_map"), dict)
            else "no transformers lies beside this engine to look into"
            if not facts.source.exists("transformers/__init__.py")
            else "this environment's transformers has no such class"
        )
        how = "unsupported" if why.startswith("this environment") else "unknown"
        return Resolved(
            name, entry, how, f"{name} is not registered: vLLM would try transformers' own class, but {why}", evidence
        )
    fits, where = found
    if not fits:
        reason = f"{name} is not registered, and transformers' class cannot take vLLM's attention"
        return Resolved(name, None, "unsupported", reason, [where])
    layer = _other_layer(config) or (_OTHER.search(facts.source.read(where.file)) and "layers that are no attention")
    if layer and (place := _line(facts, BACKEND, "does not dispatch through")):
        reason = f"{name} is not registered, and the Transformers backend has no way to run its {layer}"
        return Resolved(name, None, "unsupported", reason, [place])
    reason = f"{name} is served through the Transformers backend ({wanted})"
    return Resolved(name, entry, "transformers", reason, [registry.evidence(entry), where])


BACKEND = ("vllm/model_executor/models/transformers/base.py",)
LOADERS = ("vllm/v1/spec_decode/llm_base_proposer.py", "vllm/v1/spec_decode/eagle.py",
           "vllm/v1/worker/gpu/spec_decode/eagle/utils.py")  # fmt: skip
"""Where the drafter's loader takes the target's input embedding (`model.embed_tokens` or `model.embedding`)."""


_OTHER = re.compile(
    r"^class \w*(?:Mixer|Mamba|GatedDelta|ShortConv|RecurrentBlock|LinearAttention|Rwkv)\w*\(nn\.Module\):",
    re.MULTILINE,
)
"""Classes of layers that keep a state and no keys, in transformers' files."""


def _other_layer(config: dict[str, Any]) -> str | None:
    """The first layer that is not softmax attention, as the config names it."""
    kinds = text_config(config).get("layer_types")
    for k, kind in enumerate(kinds if isinstance(kinds, list) else []):
        if isinstance(kind, str) and ("attention" not in kind or kind.startswith("linear")):
            return f"layer {k} ({kind})"
    return None


def _line(facts: EngineFacts, files: tuple[str, ...], needle: str) -> Evidence | None:
    for rel in files:
        try:
            text = facts.source.read(rel)
        except FileNotFoundError:
            continue
        at = text.find(needle)
        if at >= 0:
            line = text.count("\n", 0, at) + 1
            return Evidence(rel, line, text.split("\n")[line - 1])
    return None


def lacks_embedding(facts: EngineFacts, resolved: Resolved, config: dict[str, Any]) -> list[Evidence]:
    """Where transformers' class keeps its input embedding under a name that the drafter's loader does not know; [] where
    it does not, or cannot be told (a multimodal class holds a text model of another file)."""
    name = resolved.architecture or ""
    asks = _line(facts, LOADERS, '"embed_tokens"')
    entry = resolved.entry
    if entry is None or not entry.by_transformers or "MultiModal" in entry.cls or asks is None:
        return []
    for folder in model_folders(facts, name, config):
        rel = f"transformers/models/{folder}/modeling_{folder}.py"
        if not facts.source.exists(rel):
            continue
        text = facts.source.read(rel)
        own = re.search(r"^\s+self\.(\w+) = nn\.Embedding\(config\.vocab_size", text, re.MULTILINE)
        if f"class {name}(" in text and own and not re.search(r"self\.(embed_tokens|embedding) = ", text):
            line = text.count("\n", 0, own.start(1)) + 1
            return [Evidence(rel, line, text.split("\n")[line - 1]), asks]
    return []


_MARK = re.compile(r"^\s+_supports_attention_backend(: bool)? = True", re.MULTILINE)
_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)
AUTO = "transformers/models/auto/modeling_auto.py"


def _transformers_modelling(facts: EngineFacts, name: str, config: dict[str, Any]) -> tuple[bool, Evidence] | None:
    """(whether it can take vLLM's attention, where) of transformers' class `name`; None where it is not there.

    As `PreTrainedModel.is_backend_compatible` and, where the release asks it (0.30 on), `_can_set_attn_implementation`.
    """
    source = facts.source
    for folder in model_folders(facts, name, config):
        rel = f"transformers/models/{folder}/modeling_{folder}.py"
        if not source.exists(rel):
            continue
        text = source.read(rel)
        at = text.find(f"class {name}(")
        if at < 0:
            continue
        mark = _MARK.search(text)
        asks_more = facts.registry is not None and "_can_set_attn_implementation" in facts.registry.module.text
        settable = asks_more and (not _ATTENTION.search(text) or "ALL_ATTENTION_FUNCTIONS.get_interface(" in text)
        line = text.count("\n", 0, mark.start() + 1 if mark else at) + 1
        return bool(mark or settable), Evidence(rel, line, text.split("\n")[line - 1])
    return None


def model_folders(facts: EngineFacts, name: str, config: dict[str, Any]) -> list[str]:
    """Folders of transformers in which a class may be: by its table of classes, else by the model types."""
    types: list[Any] = []
    if facts.source.exists(AUTO):
        types += re.findall(rf'\("([\w-]+)", "{re.escape(name)}"\)', facts.source.read(AUTO))
    types += [config.get("model_type"), text_config(config).get("model_type")]
    words = [t.replace("-", "_") for t in types if isinstance(t, str) and re.fullmatch(r"[\w-]+", t)]
    return list(dict.fromkeys(w for word in words for w in (word, word.removesuffix("_text"))))
