"""What an installed engine will do with a drafter, asked of its source: keys that its classes and runners read, where
it takes layer ids from, what it raises, what it takes for MLA.

Every answer comes from the reader's facts of this very installation; nothing here knows release numbers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from draftsmith.check import values as v
from draftsmith.check.drafter import Drafter
from draftsmith.check.target import Target
from draftsmith.check.types import Evidence, Options
from draftsmith.engine.reader import drafters as source
from draftsmith.engine.reader.configkeys import Reads
from draftsmith.engine.reader.functions import find_function

if TYPE_CHECKING:
    from draftsmith.engine.reader import EngineFacts
    from draftsmith.engine.reader.override import Override
    from draftsmith.engine.reader.runner import Choice

IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATIVE = "vllm.config.speculative"
CONVERTOR = "vllm.transformers_utils.model_arch_config_convertor"

CPU_BACKENDS = (("mla", "vllm.v1.attention.backends.mla.cpu_mla"), ("heads", "vllm.v1.attention.backends.cpu_attn"))
"""Latent attention takes one block size, the other any multiple of one."""

TYPE_TABLES = (
    "transformers/models/auto/auto_mappings.py",
    "transformers/models/auto/configuration_auto.py",
    "vllm/transformers_utils/config.py",
)
"""Where model_types stand as keys: transformers 5, transformers 4, vLLM's own."""

RunnerName = Literal["v1", "v2"]


@dataclass(frozen=True)
class Used:
    """The aux ids that will really be used. ids: sorted and without repeats, as the engine makes them; None = not
    known. where: "top level", "eagle_config", …, "default". as_written: before sorting."""

    ids: tuple[int, ...] | None
    runner: str
    where: str
    why: str
    evidence: Sequence[Evidence] = ()


@dataclass(frozen=True)
class Release:
    facts: EngineFacts

    @staticmethod
    def of(facts: EngineFacts) -> Release:
        return Release(facts)

    @property
    def label(self) -> str:
        return f"{'vLLM' if self.facts.name == 'vllm' else self.facts.name} {self.facts.version or '(unknown version)'}"

    @property
    def is_vllm(self) -> bool:
        return self.facts.name == "vllm"

    # the drafter's class

    @cached_property
    def registered(self) -> list[str]:
        return sorted(self.facts.drafters)

    def reads(self, architecture: str) -> Reads:
        cache: dict[str, Reads] = self.__dict__.setdefault("_reads", {})
        if architecture not in cache:
            cache[architecture] = source.class_reads(self.facts, architecture)
        return cache[architecture]

    def class_reads(self, architecture: str, key: str, under: tuple[str, ...] = ()) -> bool:
        """Whether the class reads a key; True where its source was not found (nothing is held against the drafter)."""
        reads = self.reads(architecture)
        return reads.place is None or any(r.key == key and r.under == under for r in reads.reads)

    def key_evidence(self, architecture: str, key: str) -> list[Evidence]:
        return [r.where for r in self.reads(architecture).all(key)[:1]]

    @cached_property
    def speculators(self) -> Reads:
        """Keys taken over from a speculators config."""
        return source.speculators_reads(self.facts)

    def aux_count(self, d: Drafter) -> tuple[int, str]:
        """Number of aux states for which the class builds fc, and the key it takes it from."""
        arch = d.architecture
        top = d.top_ids if not d.speculators or self.speculators.understands(IDS) else None
        for key in ("num_aux_layers", "num_aux_hidden_states"):
            if self.class_reads(arch, key) and (n := d.size(key)) and not d.speculators:
                return n, key
        if self.class_reads(arch, IDS) and top and d.form == "qwen3":
            return len(top), IDS
        if self.class_reads(arch, IDS, ("eagle_config",)) and d.nested_ids:
            return len(d.nested_ids), f"eagle_config.{IDS}"
        return 3, "the class's default"

    # layer ids

    def id_reads(self, runner: RunnerName) -> Reads:
        return source.runner_reads(self.facts, runner)

    def runner(self, d: Drafter, t: Target, options: Options) -> tuple[RunnerName | None, str, list[Evidence]]:
        """Which model runner serves the target, why, and where that is written."""
        from draftsmith.engine.reader.runner import choose_runner

        cache: dict[str, Choice] = self.__dict__.setdefault("_choice", {})
        if not cache:
            cache[""] = choose_runner(self.facts, t.raw, options, parallel_drafting=d.dialect.name == "p-eagle")
        return cache[""].runner, cache[""].why, cache[""].evidence

    def default_ids(self, t: Target) -> tuple[tuple[int, ...] | None, list[Evidence]]:
        if t.layers is None:
            return None, []
        found = source.default_layers(self.facts, self.facts.resolve(t.raw).entry, t.layers)
        return found.ids, [found.where] if found.where else []

    def ids_for(self, runner: RunnerName, d: Drafter, t: Target) -> Used:
        """The ids that one of the two runners will use."""
        reads = self.id_reads(runner)
        c, nested = d.config, v.mapping(d.config, "eagle_config")
        arrives = not d.speculators or self.speculators.understands(IDS)
        places: list[tuple[str, tuple[str, ...], str, object, int]] = [
            (IDS, (), "top level", c.get(IDS) if arrives else None, 0),
            ("target_layer_ids", (), "target_layer_ids + 1", c.get("target_layer_ids"), 1),
            (IDS, ("eagle_config",), f"eagle_config.{IDS}", nested.get(IDS), 0),
            ("layer_ids", ("eagle_config",), "eagle_config.layer_ids", nested.get("layer_ids"), 0),
        ]
        for key, under, where, value, add in places:
            ids = v.ids(value)
            found = next((r for r in reads.reads if r.key == key and r.under == under), None)
            if ids and found:
                made = tuple(sorted({i + add for i in ids}))
                return Used(made, runner.upper(), where, f"from {where}", [found.where])
        default, evidence = self.default_ids(t)
        shown = None if default is None else tuple(sorted(set(default)))
        written = d.nested_ids or d.top_ids
        why = "the engine's default for this target" + (f"; the written {written} are ignored" if written else "")
        return Used(shown, runner.upper(), "default", why, [*([reads.place] if reads.place else []), *evidence])

    def used_ids(self, d: Drafter, t: Target, options: Options) -> Used:
        runner, why, evidence = self.runner(d, t, options)
        if runner is None:
            one, two = self.ids_for("v1", d, t), self.ids_for("v2", d, t)
            if one.ids == two.ids:
                return Used(one.ids, "V1 or V2", one.where, one.why, one.evidence)
            return Used(None, "V1 or V2", "", f"V1 would use {one.ids}, V2 {two.ids}; {why}", evidence)
        return self.ids_for(runner, d, t)

    # what else the source says

    @cached_property
    def raises_positions(self) -> bool:
        """Whether a drafter's max_position_embeddings is raised to the target's length (vllm#49343)."""
        module = self.facts.modules.get(SPECULATIVE)
        return module is not None and "_maybe_override_draft_max_position_embeddings" in module.text

    @cached_property
    def mla_types(self) -> tuple[frozenset[str], list[Evidence]] | None:
        """model_types that an eagle-wrapped drafter may have to be taken for MLA; None where the source has no such
        list."""
        for module_name in (CONVERTOR, "vllm.config.model", "vllm.config"):
            found = find_function(self.facts.modules, module_name, "is_deepseek_mla")
            if found is None:
                continue
            module, function = found
            groups = [
                (n, [e.value for e in n.comparators[0].elts if isinstance(e, ast.Constant)])
                for n in ast.walk(function)
                if isinstance(n, ast.Compare) and isinstance(n.comparators[0], ast.Tuple | ast.List)
            ]
            for node, names in groups:
                if ".model.model_type" in ast.unparse(node.left):
                    return frozenset(str(x) for x in names), [module.evidence(node)]
        return None

    def knows_type(self, model_type: str) -> bool | None:
        """Whether a model_type has a config class in the engine or in the transformers beside it; None where that
        transformers is not there (a wheel, a checkout)."""
        texts = []
        for name in TYPE_TABLES:
            try:
                texts.append(self.facts.source.read(name))
            except FileNotFoundError:
                continue
        if not any("CONFIG_MAPPING_NAMES" in text for text in texts):
            return None
        entry = re.compile(rf'"{re.escape(model_type)}"\s*[,:]|^\s*{re.escape(model_type)}\s*=', re.MULTILINE)
        return any(entry.search(text) for text in texts)

    def override(self, d: Drafter, model_type: str | None = None) -> Override | None:
        """What the engine turns the drafter's model_type (or another one) and architecture into, before it looks at
        the method. None: nothing."""
        from draftsmith.engine.reader.override import override_of

        if not self.is_vllm or d.speculators:  # a speculators config has a model_type of its own there
            return None
        asked = {"model_type": model_type or d.model_type, "architectures": [d.declared or d.architecture]}
        return override_of(self.facts, dict(d.config) | asked)

    def mla_type(self, d: Drafter) -> str:
        """A model_type for an MLA drafter that is taken for one and left alone."""
        types = sorted(self.mla_types[0]) if self.mla_types else ["deepseek_v2"]
        fitting = [t for t in types if t.startswith("deepseek") and self.override(d, t) is None]
        return (fitting or ["deepseek_v2"])[0]

    def fuses_query(self, architecture: str) -> Evidence | None:
        """Where the drafter's class stacks kv_a_proj_with_mqa into fused_qkv_a_proj whatever q_lora_rank is: without
        that rank the graph has no such module. None: it does not, or asks first."""
        entry = self.facts.drafters.get(architecture)
        cls = None if entry is None else self.facts.class_of(entry)
        if cls is None:
            return None
        for node in ast.walk(cls.module.tree):
            if isinstance(node, ast.If | ast.IfExp):
                test = ast.unparse(node.test)
                if "q_lora_rank" in test and "None" in test:
                    return None
        line = cls.module.line_of("kv_a_proj_with_mqa")
        text = cls.module.evidence_at(line) if line else None
        return text if text and "fused_qkv_a_proj" in text.text else None

    @cached_property
    def cpu_blocks(self) -> tuple[list[tuple[str, int]], list[Evidence]] | None:
        """Cache block sizes of the CPU's two attention backends, as (kind, multiple or size): [("mla", 16), ("heads",
        32)] where no size serves both; None where one does, or the source does not say."""
        found: list[tuple[str, int]] = []
        evidence: list[Evidence] = []
        for kind, module in CPU_BACKENDS:
            place = find_function(self.facts.modules, module, "get_supported_kernel_block_sizes")
            returns = [n for n in ast.walk(place[1]) if isinstance(n, ast.Return)] if place else []
            sizes = [c.value for r in returns for c in ast.walk(r) if isinstance(c, ast.Constant)]
            whole = [s for s in sizes if isinstance(s, int) and s > 0]
            if place is None or len(whole) != 1:
                return None
            found.append((kind, whole[0]))
            evidence.append(place[0].evidence(returns[0]))
        (_, fixed), (_, multiple) = found
        return None if fixed % multiple == 0 else (found, evidence)

    def supports_pipeline(self, t: Target) -> tuple[bool, list[Evidence]]:
        """Whether the target's decoder hands aux states from stage to stage."""
        entry = self.facts.resolve(t.raw).entry
        cls = None if entry is None else self.facts.class_of(entry)
        if cls is None:
            return False, []
        line = cls.module.line_of("supports_aux_hidden_states_over_pp = True") or cls.module.line_of(
            "supports_aux_hidden_states_over_pp: ClassVar[bool] = True"
        )
        return line is not None, [cls.module.evidence_at(line)] if line else [cls.evidence]

    @cached_property
    def transformers(self) -> tuple[int, ...]:
        """Release of the transformers beside the engine; () where it is not installed there."""
        for name in self.facts.source.names(""):
            if name.startswith("transformers-") and name.endswith(".dist-info"):
                return v.release(name.removeprefix("transformers-").removesuffix(".dist-info"))
        return ()

    def captures_last(self, t: Target) -> tuple[bool | None, list[Evidence]]:
        """Whether the target's class captures after each layer (so that id n exists): it adds with `idx + 1`, or lets
        the mixin do so. None = not known."""
        entry = self.facts.resolve(t.raw).entry
        cls = None if entry is None else self.facts.class_of(entry)
        if cls is None:
            return None, []
        for one in self.facts.graph.mro(cls):
            module = getattr(one, "module", None)
            if module is None:
                continue
            for needle, answer in (
                ("idx + 1", True),
                ("layer_idx + 1", True),
                ("in self.aux_hidden_state_layers", False),
            ):
                if "aux_hidden_state" in module.text and (line := module.line_of(needle)):
                    return answer, [module.evidence_at(line)]
        return None, []

    def knows_image_token(self, architecture: str) -> tuple[bool, list[Evidence]]:
        """Whether the V1 proposer names the architecture in its list of image tokens."""
        for name in ("vllm.v1.spec_decode.llm_base_proposer", "vllm.v1.spec_decode.eagle"):
            module = self.facts.modules.get(name)
            if module and (line := module.line_of("image_token_index")):
                there = module.line_of(f'"{architecture}"') if architecture else None
                return there is not None, [module.evidence_at(there or line)]
        return True, []

    def speculators_name(self, raw: v.Config) -> str | None:
        """The architecture under which a speculators config is served."""
        return source.speculators_architecture(self.facts, dict(raw))

    def registered_evidence(self, name: str) -> list[Evidence]:
        registry, entry = self.facts.registry, self.facts.drafters.get(name)
        return [registry.evidence(entry)] if registry and entry else []

    def layout_name(self, d: Drafter) -> str | None:
        """The registered name whose tensors these are."""
        if any("kv_a_proj_with_mqa" in n for n in d.tensors):
            return "Eagle3DeepseekV2ForCausalLM"
        if any("q_norm" in n for n in d.tensors):
            return "Eagle3Qwen3ForCausalLM"
        return "LlamaForCausalLMEagle3" if any(".self_attn.q_proj." in n for n in d.tensors) else None
