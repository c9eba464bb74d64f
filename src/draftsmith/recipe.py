"""A whole run described in one YAML file; every command is one part of it.

Unknown keys are refused with the nearest known one. Relative paths count from the folder that the command is given in.
`draftsmith run RECIPE` (pipeline.py) walks the stages in `STAGES`; each stage command takes the same recipe or
options that fill the same model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, ValidationError

from draftsmith.errors import UserError, nearest
from draftsmith.secrets import require_none

Way = Literal["drafter", "none", "ngram"]
WAYS: tuple[Way, ...] = ("drafter", "none", "ngram")

STAGES = ("capture", "vocab", "extract", "train", "export", "check", "bench", "report")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class TargetSection(_Section):
    """The model to be accelerated."""

    model: str = Field(
        description="folder or hub id of the target; 'smollm2' fetches the demo's own, 'gemma3-270m' a base model"
    )
    revision: str | None = Field(None, description="hub revision")
    trust_remote_code: bool = Field(False, description="run the target's own Python code (only if you trust it)")


class EngineSection(_Section):
    """The engine that captures and serves."""

    path: str | None = Field(
        None,
        description="interpreter, environment or site-packages folder of an installed engine; "
        "none = the managed one (draftsmith engine install); 'reference' = the built-in reference "
        "engine (plain transformers, no vLLM)",
    )
    args: list[str] = Field(default_factory=list, description="further flags for the engine's server")
    env: dict[str, str] = Field(default_factory=dict, description="further environment variables for the engine")
    max_model_len: int = Field(2048, gt=0, description="tokens of context the server is started with")
    dtype: str = Field(
        "auto", description="the engine's compute type; auto = bfloat16 where the hardware multiplies it, else float32"
    )
    start_timeout: int = Field(900, gt=0, description="seconds to wait for the server to be ready")


class CaptureSection(_Section):
    """Which prompts the target answers, and how."""

    prompts: list[str] = Field(
        min_length=1,
        description="prompt sources: a file (JSONL or parquet of messages, ShareGPT or "
        "plain prompts) or a built-in set (sharegpt, gsm8k_train), each with an optional :COUNT",
    )
    held_out: list[str] = Field(
        default_factory=lambda: ["mt_bench", "gsm8k", "humaneval"],
        description="sets that must never be trained on; prompts equal to one of theirs are dropped",
    )
    endpoints: list[str] = Field(
        default_factory=list,
        description="OpenAI-compatible servers that already run the target; none = start the engine",
    )
    mode: Literal["chat", "raw"] = Field("chat", description="chat template, or raw completion for a base model")
    thinking: Literal["default", "on", "off"] = Field("default", description="enable_thinking handed to the template")
    samples: int = Field(1, gt=0, description="answers per prompt")
    temperature: float = Field(0.7, ge=0, description="sampling temperature")
    temperatures: list[NonNegativeFloat] = Field(
        default_factory=list, description="temperatures of the samples in turn (a mix); none = temperature for all"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling mass")
    max_tokens: int = Field(256, gt=0, description="longest answer, tokens")
    max_prompt_tokens: int = Field(1024, gt=0, description="prompts longer than this are dropped and counted")
    concurrency: int = Field(16, gt=0, description="requests in flight per server")
    request_timeout: int = Field(600, gt=0, description="seconds after which a request is made again")
    system: str | None = Field(None, description="system prompt put before every conversation")
    seed: int = Field(0, description="seed of prompt choice and sampling")
    max_dropped: float = Field(0.5, ge=0, le=1, description="share of prompts that may be dropped before capture stops")
    api_key_env: str | None = Field(None, description="environment variable that holds the endpoint's key")
    assistant_role: str | None = Field(None, description="a further name for the assistant in the prompt files")
    drop_images: bool = Field(False, description="take the text of messages with images (text-only targets)")
    trust_answers: bool = Field(
        False, description="take the answers in the files as they are: they must be the target's own, e.g. its logs"
    )


DRAFT_VOCAB = 8192
"""Size of the draft vocab that is chosen from the answers where the recipe gives none."""


class VocabSection(_Section):
    """The draft vocabulary."""

    size: int | None = Field(
        None,
        gt=0,
        description="target tokens that the drafter can propose; none = 8,192 chosen from the answers, or with train.from "
        "those of that drafter",
    )
    force: list[str] = Field(default_factory=list, description="tokens (text) that must be in the draft vocab")
    min_coverage: float = Field(0.9, ge=0, le=1, description="warn under this share of answer tokens covered")


class ExtractSection(_Section):
    """Hidden states of the captured rows."""

    backend: Literal["transformers", "vllm"] = Field("transformers", description="what computes the states")
    passes: Literal[1, 2] = Field(
        2, description="2: a second pass over captured rows; 1: states are kept while the engine answers"
    )
    aux_layers: list[int] | None = Field(
        None,
        description="aux layer ids (id k = stream entering layer k); none = 2, n//2, n-3, or with train.from that drafter's",
    )
    codec: Literal["bf16", "fp8", "fp8-topk"] = Field("bf16", description="how states are stored")
    topk: int = Field(128, gt=0, description="logits kept per position by fp8-topk")
    keep: Literal["keep", "until-trained", "never"] = Field(
        "keep", description="keep states, delete them after training, or never store them"
    )
    max_length: int = Field(2048, gt=1, description="rows longer than this are cut and counted")
    batch_tokens: int = Field(2048, gt=0, description="tokens per forward")
    self_check_rows: int = Field(4, ge=0, description="rows on which layer, norm and alignment are verified")
    self_check_min: float = Field(
        0.95, ge=0, le=1, description="share of positions at which our most likely token must be the engine's"
    )


class DrafterSection(_Section):
    """The drafter's shape; a size that is not given is taken from the target."""

    form: Literal["llama", "mla"] = Field(
        "llama", description="attention of its layer: llama (every engine has it) or mla (DeepSeek's, vLLM has it)"
    )
    hidden_size: int | None = Field(None, gt=0, description="width of its layer")
    num_attention_heads: int | None = Field(None, gt=0, description="query heads")
    num_key_value_heads: int | None = Field(None, gt=0, description="key and value heads")
    head_dim: int | None = Field(None, gt=0, description="size of a head")
    intermediate_size: int | None = Field(None, gt=0, description="width of its MLP")
    rope: dict[str, Any] | None = Field(None, description="rope parameters; none = the target's")
    norm_before_residual: bool = Field(False, description="take the residual after the state's norm, not before it")
    norm_before_fc: bool = Field(False, description="one norm over the joined aux streams before fc")
    fc_norm: bool = Field(False, description="a norm of its own for each aux stream before fc")
    norm_output: bool = Field(False, description="hand the state after the final norm to the next draft step")


class TrainSection(_Section):
    """How the drafter is trained."""

    from_: str | None = Field(None, alias="from", description="existing drafter (any dialect) to start from")
    init: Literal["target", "layer", "random"] = Field(
        "target",
        description="where training starts: target = lm_head rows from the target's; layer = its last decoder layer as well, "
        "where shapes allow",
    )
    ttt_steps: int = Field(3, gt=0, le=16, description="draft steps unrolled in training (K)")
    warm_fraction: float = Field(0.5, ge=0, lt=1, description="share of the steps trained with K = 1 first")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of step k is decay^k")
    steps: int | None = Field(None, gt=0, description="optimizer steps; none = by epochs")
    epochs: float = Field(3.0, gt=0, description="passes over the rows, where no steps are given")
    batch_tokens: int = Field(2048, gt=0, description="packed tokens per optimizer step and rank")
    context_parallel: int = Field(
        1,
        gt=0,
        description="processes that share one packed sequence, each keeping a part of its tokens (for sequences that one "
        "GPU cannot hold); it must divide the number of processes, and batch_tokens is then per group",
    )
    lr: float = Field(1e-3, gt=0, description="highest learning rate")
    min_lr: float = Field(0.05, ge=0, le=1, description="final learning rate as a share of lr")
    warmup: float = Field(0.03, ge=0, lt=1, description="share of the steps with rising learning rate")
    weight_decay: float = Field(0.1, ge=0, description="decay of matrices")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's two decay rates")
    clip: float = Field(1.0, gt=0, description="longest gradient; a longer one is scaled down")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="parameters and states; none = bfloat16 on a GPU; float32 on a CPU, its products in bfloat16 where the "
        "CPU has instructions for them (float32 given: those in float32 too)",
    )
    optimizer: Literal["adamw", "adamw-lean", "muon"] = Field(
        "adamw",
        description="adamw-lean keeps its two moments in 8 bits: less memory; muon moves the hidden matrices by orthogonal "
        "updates: more learnt per step, slower steps (both: llama form, without recompute)",
    )
    seed: int = Field(0, description="seed of the initial weights and of the order of the rows")
    held_out_rows: float = Field(0.04, gt=0, lt=1, description="share of captured rows kept for validation")
    eval_every: int = Field(200, gt=0, description="steps between validations (and checkpoints)")
    patience: int = Field(0, ge=0, description="stop after so many validations without a better acceptance; 0 = never")
    recompute: bool = Field(
        False, description="compute each draft step again in the backward pass: memory flat in K, a third more time"
    )
    stream: Literal["off", "memory", "disk", "ray"] = Field(
        "off",
        description="read states from running engines, nothing stored: through a buffer in memory, a ring of files, or "
        "from engines that Ray places on several machines",
    )
    stream_buffer_gb: float = Field(2.0, gt=0, description="most bytes (GB) of states that wait for the trainer")
    stream_engines: int = Field(1, gt=0, description="engines that make states for a stream (per rank)")
    select: Literal["offline", "engine"] = Field(
        "offline", description="what measures the acceptance by which the best checkpoint is chosen"
    )


class ExportSection(_Section):
    """How the drafter is written for the engine."""

    dialect: Literal["vllm", "speculators", "sglang", "eagle"] = Field(
        "vllm", description="form of the files: vLLM's own, speculators', SGLang's (SpecForge) or SafeAILab's"
    )
    name: str | None = Field(None, description="folder name; none = the recipe's name + -eagle3")
    dtype: Literal["bfloat16", "float32", "float16"] = Field("bfloat16", description="type of the written weights")


class BenchSection(_Section):
    """What is measured in the engine."""

    sets: list[str] = Field(
        default_factory=lambda: ["mt_bench:40", "gsm8k:20", "humaneval:20"],
        description="prompt sets (built-in or files), each with an optional :COUNT",
    )
    ways: list[Way] = Field(
        default_factory=lambda: list(WAYS),
        description="what is compared: the drafter, none (no drafting) and ngram (the engine's drafting by repetition)",
    )
    concurrency: list[int] = Field(
        default_factory=lambda: [8, 1],
        description="requests at once, a measurement each; the first above 1 is the headline",
    )
    max_tokens: int = Field(128, gt=0, description="longest answer, tokens, when several are asked at once")
    single_prompts: int = Field(20, gt=0, description="prompts of the one-at-a-time measurement and losslessness test")
    single_max_tokens: int = Field(64, gt=0, description="longest answer of that measurement, tokens")
    num_speculative_tokens: int = Field(3, gt=0, description="tokens that the drafter proposes at a time")
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0 = the likeliest token")
    assertions: list[str] = Field(
        default_factory=list, description="what must hold, or bench ends with 1: tokens_per_target_step>=1.4"
    )


class Recipe(_Section):
    """One run, whole."""

    name: str = Field(
        "drafter", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the run's folder and drafter"
    )
    out: str = Field("runs", description="folder that holds the run's folder")
    target: TargetSection
    engine: EngineSection = Field(default_factory=EngineSection)
    capture: CaptureSection
    vocab: VocabSection = Field(default_factory=VocabSection)
    extract: ExtractSection = Field(default_factory=ExtractSection)
    drafter: DrafterSection = Field(default_factory=DrafterSection)
    train: TrainSection = Field(default_factory=TrainSection)
    export: ExportSection = Field(default_factory=ExportSection)
    bench: BenchSection = Field(default_factory=BenchSection)

    @property
    def folder(self) -> Path:
        """Where the run's stages lie: out/name."""
        return Path(self.out) / self.name


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for a in get_args(annotation) for m in _models_in(a)]


def _unknown_key(model: type[BaseModel], path: tuple[Any, ...]) -> tuple[str, list[str]]:
    """The unknown key at `path` and the known keys beside it."""
    current: type[BaseModel] | None = model
    for part in path[:-1]:
        field = current.model_fields.get(part) if current and isinstance(part, str) else None
        found = _models_in(field.annotation) if field else []
        current = found[0] if found else None
    known = [f.alias or n for n, f in current.model_fields.items()] if current else []
    return str(path[-1]), known


def explain_validation(e: ValidationError, model: type[BaseModel], source: str) -> UserError:
    """A pydantic error as one block: the key, the value, what is allowed."""
    lines, fixes = [], []
    for err in e.errors()[:4]:
        where = ".".join(str(p) for p in err["loc"])
        if err["type"] == "extra_forbidden":
            key, known = _unknown_key(model, err["loc"])
            close = nearest(key, known)
            lines.append(f"{source}: unknown key {where!r}")
            fixes.append(f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(known)}")
        elif err["type"] == "missing":
            lines.append(f"{source}: {where} is missing")
            fixes.append(f"give {where}")
        else:
            lines.append(f"{source}: {where} is {err['input']!r}: {err['msg']}")
    more = len(e.errors()) - 4
    what = "; ".join(lines) + (f"; and {more} more" if more > 0 else "")
    return UserError(
        what,
        "a value that is not understood would be left out silently",
        "; ".join(dict.fromkeys(fixes)) or "mend the value; `draftsmith recipe --keys` lists all keys",
    )


def parse_recipe(raw: Any, source: str) -> Recipe:
    """Validate a parsed YAML document; UserError names key, value and nearest known key."""
    if not isinstance(raw, dict):
        raise UserError(
            f"{source} holds {'nothing' if raw is None else type(raw).__name__}, not a mapping of sections",
            "",
            "`draftsmith recipe` prints one to start from",
        )
    raw = {key: value for key, value in raw.items() if value is not None}  # a heading with nothing below it
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise explain_validation(e, Recipe, source) from None
    require_none(recipe.engine.args, recipe.engine.env, source)
    return recipe


def load_recipe(path: Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe. overrides: dotted key → value, laid over the file (command-line options)."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"no recipe at {path}", "", "give the path of a YAML file; `draftsmith recipe > mine.yaml` writes one"
        ) from None
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder, not a recipe", "", "give a YAML file; `draftsmith recipe > mine.yaml` writes one"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(
            f"{path} is not readable YAML: {e}", "", "mend the file; `draftsmith recipe` prints a right one"
        ) from None
    if isinstance(raw, dict):
        lay_over(raw, overrides or {})
    return parse_recipe(raw, str(path))


def lay_over(raw: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Put dotted keys into a recipe that is not validated yet. UserError where a part on the way is no section."""
    for dotted, value in overrides.items():
        node: Any = raw
        *parents, leaf = dotted.split(".")
        for part in parents:
            if node.get(part) is None:  # absent, or a heading with nothing below it
                node[part] = {}
            node = node[part]
            if not isinstance(node, dict):
                raise UserError(
                    f"--set {dotted}: {part!r} is a value ({node!r}), not a section",
                    "",
                    "`draftsmith recipe --keys` lists all keys",
                )
        node[leaf] = value
