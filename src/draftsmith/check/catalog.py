"""Every check as data: what it finds, what it must be given, and where the fault was seen.

`draftsmith check --list` prints this table and the docs are made from it. A check's code is registered under its id
by `look.finding`; a test holds the two together. needs, beside the drafter's config: target, headers (safetensors
headers of the drafter), map (the bytes of d2t and t2d), deep (--deep: blocks of weights are read), contract
(contract.json beside the drafter), rows (captured rows, --rows), engine (an installed engine's source).
"""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.check.types import GROUPS, Group


@dataclass(frozen=True)
class Spec:
    id: str
    finds: str
    needs: tuple[str, ...]
    source: str

    @property
    def group(self) -> Group:
        return next(g for g in GROUPS if g == self.id.split(".", 1)[0])


_TABLE: tuple[tuple[str, str, str, str], ...] = (
    # id, what fault it finds, needs, source
    ("gate.list", "a target whose model type is not on the engine's list (vLLM 0.8.5 to 0.21)", "target engine",
     "vllm#31254; vllm#42536"),
    ("gate.interface", "a target class without the EAGLE-3 interface: refused after the weights are loaded",
     "target engine", "vllm#25134; vllm#33329; EAGLE#290"),
    ("gate.releases", "(--before-training) a target that no known release takes", "target", "table of releases"),
    ("form.choice", "(--before-training) which drafter form the engine can serve", "target", "vllm registry"),
    ("pair.mappable", "(--before-training) a config without the sizes a drafter needs", "target", ""),
    ("runner.default_ids", "(--before-training) a target too shallow for three default aux layers", "target",
     "interfaces.py: (2, n//2, n-3)"),
    ("form.files", "weights missing, cut, overlapping, outside the folder, or only pickled", "", "speculators#184"),
    ("form.config", "a key of the wrong type, or a null or absent key for which the library has another default", "",
     "ModelOpt#1417; transformers StrictDataclassFieldValidationError"),
    ("form.dialect", "a folder that is no EAGLE-3 drafter", "", "vllm/transformers_utils/configs/eagle.py"),
    ("form.method", "a method, given or made of the folder's name, that is not eagle3", "",
     "AngelSlim#15; vllm/config/speculative.py"),
    ("form.architecture", "an architecture that the engine has not registered", "engine", "TorchSpec#61; vllm#30987"),
    ("form.mla_type", "an MLA drafter under a model_type that the engine does not take for MLA", "engine",
     "vllm#45764; vllm/transformers_utils/model_arch_config_convertor.py"),
    ("form.activation", "an activation other than silu", "", "vllm/model_executor/models/llama.py: LlamaMLP"),
    ("form.model_type", "a model_type that no config class has", "engine", "transformers AutoConfig"),
    ("form.override", "a model_type or architecture that the engine turns into an MTP head's before the method is looked "
     "at (deepseek_v3, qwen3_next, …)", "engine", "vllm/config/speculative.py: hf_config_override"),
    ("form.mla_query", "an MLA drafter without q_lora_rank on a class that cannot load one", "engine",
     "vllm/model_executor/models/deepseek_eagle3.py: fused_qkv_a_proj"),
    ("form.inventory", "a missing tensor: it stays uninitialised and nothing says so", "headers",
     "speculators#1114; llama_eagle3.py load_weights returns None"),
    ("form.names", "a tensor name or prefix that the loader refuses", "headers", "vllm#54526; Automodel"),
    ("form.sizes", "a shape that the config's sizes do not give (head_dim, heads, widths)", "headers",
     "speculators#134; ModelOpt#398"),
    ("form.fc", "an fc width that is not aux layers x target hidden size, as this engine counts them", "headers",
     "vllm#54526; vllm#17957"),
    ("form.lm_head", "no lm_head, or one whose rows are not the draft vocabulary", "headers",
     "speculators#74; EAGLE#249"),
    ("form.dtypes", "weights of a type that is not loaded as it is", "headers", "speculators#136"),
    ("form.heads", "head counts that do not divide", "", "vllm verify_with_parallel_config"),
    ("form.draft_vocab", "a draft vocabulary that is empty or larger than the target's", "",
     "SpecForge#76; Automodel#2260"),
    ("form.map", "a reduced vocabulary without d2t: the first D ids are drafted", "headers",
     "Automodel#2447; verl-SpeCo#66"),
    ("form.map_type", "a d2t that is not int64 [D]", "headers", "vllm 0.32 loads int32 and float32 silently"),
    ("form.map_values", "a d2t of absolute ids, out of range, or not strictly ascending", "map",
     "verl-SpeCo#67; mblt-model-zoo#110; EAGLE#222"),
    ("form.t2d", "a t2d that is not the mask of d2t", "map", "EAGLE#248"),
    ("form.norms", "a norm's tensor without its switch, or a switch without its tensors", "headers",
     "vllm#38111; speculators#297"),
    ("form.aux_ids", "aux layer ids out of range, repeated, not ascending, or too few", "target",
     "vllm/model_executor/models/interfaces.py: sorted(set(ids))"),
    ("form.rope", "rope keys that cannot be read, or one rope per layer type", "", "speculators#649; SpecForge#502"),
    ("form.mrope", "multimodal rope keys on a text-only target", "target", "speculators#598; sglang#34152"),
    ("form.tie", "tie_word_embeddings, by which other tools overwrite lm_head", "headers",
     "speculators#74; sglang#8230"),
    ("form.quantisation", "quantised tensors without quantization_config, or the reverse", "headers", "vllm#25882"),
    ("form.parallel", "a parallel-drafting checkpoint without mask_hidden or its token", "headers",
     "llama_eagle3.py: mask_hidden"),
    ("form.deep_norms", "norms that are all ones (untrained) or all zeros", "headers deep", "speculators#358"),
    ("form.deep_values", "NaN, infinite or all-zero weights", "headers deep", "speculators#615"),
    ("form.deep_head", "lm_head rows that repeat, as after a failed resize", "headers deep", "EAGLE#249"),
    ("pair.files", "target weights that are cut or missing a shard: the engine stops after reading the others", "target",
     "speculators#184; SpecForge#666"),
    ("pair.hidden", "a hidden size that differs from the target's without target_hidden_size", "target",
     "vllm#17957; vllm#19174"),
    ("pair.embedding", "a missing or misshapen embedding table", "target headers", "engine notes: widths; vllm#28549"),
    ("pair.vocab", "a vocab_size that is not the target's: the scatter width of the logits", "target",
     "speculators#188; SpecForge e07da1d"),
    ("pair.positions", "max_position_embeddings below the served length", "target", "vllm#48894; vllm#49343"),
    ("pair.rope", "a rope that differs from the target's", "target", "speculators#574; TorchSpec#54"),
    ("pair.eos", "end-of-turn ids that the drafter can never propose", "target map", "SpecForge d73f9ae"),
    ("pair.tokenizer", "another tokenizer than the one trained for", "target", "contract; drafter's own tokenizer"),
    ("pair.template", "another chat template than the one captured with", "target contract", "SpecForge 1de70d1"),
    ("pair.target", "another target than the contract's", "target contract", "contract"),
    ("pair.aux_ids", "layers that will be used are not those that were trained", "contract engine", "vllm#50170"),
    ("pair.norms", "norm switches that are not those that were trained", "contract", "speculators#268"),
    ("pair.trained_rope", "a rope that is not the one trained with", "contract", "sfllm#32; ModelOpt#1238"),
    ("pair.sizes", "sizes that are not the contract's", "contract", "contract"),
    ("pair.map", "a vocab map that is not the contract's", "contract map", "speculators#602"),
    ("pair.coverage", "a draft vocabulary that covers too few of the captured answer tokens", "rows map",
     "verl-SpeCo#66"),
    ("pair.tensor_parallel", "head counts that the tensor-parallel size does not divide", "target",
     "vllm#31345; vllm#26328"),
    ("pair.pipeline_parallel", "pipeline parallelism, which drops aux states", "target engine",
     "vllm#36151; vllm#50514"),
    ("pair.memory", "weights and cache that do not fit", "target", "forecast"),
    ("runner.which", "which model runner will serve the target, and why", "engine", "vllm/config/vllm.py"),
    ("runner.aux_ids", "ids that the runner ignores, or reads in another meaning than they were written in",
     "target engine", "vllm#43671; sglang#25454; vllm#42764"),
    ("runner.blocks", "a drafter whose kind of cache the CPU build cannot hold beside the target's", "target engine",
     "vllm/v1/worker/utils.py: No common block size"),
    ("runner.last_layer", "an id after the last layer on a class that cannot capture it", "target engine",
     "vllm#46788; vllm#46973"),
    ("runner.multimodal", "a multimodal target that the runner has no image token for", "target engine",
     "llm_base_proposer.py: image_token_index"),
    ("runner.tokens", "num_speculative_tokens that the engine refuses", "", "vllm/config/speculative.py"),
    ("silence.switches", "a switch that this release does not read", "engine", "vllm#42764; vllm#46488; vllm#38111"),
    ("silence.window", "a sliding window that came with the target's layer_types", "engine",
     "vllm/model_executor/models/llama.py: per_layer_sliding_window"),
    ("silence.residual", "norm_before_residual left to a default that differs by format", "", "speculators#297"),
    ("silence.bias", "bias tensors that the loader drops", "headers", "models/utils.py: ignore_unexpected_suffixes"),
    ("silence.embedding", "an embedding of its own that is not the target's", "target headers deep",
     "TorchSpec#39; vllm#28549"),
    ("engine.faults", "a known fault of this very release, proved by its source", "engine", "table of engine faults"),
    ("engine.dry_run", "(--dry-run) a config that the engine itself refuses", "engine", "EngineArgs.create_engine_config"),
    ("silence.input_norm", "input_norm tensors that are dropped without the switch", "headers",
     "llama_eagle3.py: load_weights"),
)  # fmt: skip

CATALOG: dict[str, Spec] = {i: Spec(i, finds, tuple(needs.split()), source) for i, finds, needs, source in _TABLE}
