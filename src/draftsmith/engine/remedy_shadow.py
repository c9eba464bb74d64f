"""A shadow drafter folder: the weights linked (never copied), config.json rewritten so that the engine reads what was trained.

Only what the files prove is changed, and every change is told. The folder made for the engine says the same drafter;
contract.json is copied.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError
from draftsmith.record import write_json

if TYPE_CHECKING:
    from draftsmith.check.look import Look

MARK = "shadow.json"
"""What was changed and why, inside the shadow folder; also says that draftsmith made it and may replace it."""
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Change:
    key: str
    old: Any
    new: Any
    why: str

    def __str__(self) -> str:
        old = "" if self.old is None else f" (was {json.dumps(self.old)})"
        return f"{self.key}: {json.dumps(self.new)}{old}: {self.why}"


Rule = Callable[["Look", dict[str, Any]], list[Change]]


def aux_ids(look: Look, config: dict[str, Any]) -> list[Change]:
    """Ids at top level in vLLM's meaning, where both runners read them; no nested copy; their count beside them."""
    from draftsmith.check.dialect import meaning

    d, layers = look.drafter, look.target.layers
    contract = look.contract.aux_layer_ids if look.contract is not None else None
    written = d.top_ids or d.nested_ids
    if contract:
        ids, why = list(contract), "the contract's aux layers"
    elif written and d.top_ids:
        ids, why = list(written), ""
    elif written:
        kind = meaning(written, layers, d.dialect)
        if kind == "unsaid":
            return []
        ids = [i + 1 for i in written] if kind == "output" else list(written)
        why = (
            f"{written} in eagle_config count outputs of layers (SGLang's meaning); vLLM's id is one more"
            if kind == "output"
            else "vLLM's two runners both read the top level alone"
        )
    else:
        return []
    changes = [] if d.top_ids == ids else [Change(IDS, d.top_ids, ids, why)]
    nested = config.get("eagle_config")
    if isinstance(nested, dict) and IDS in nested:
        kept = {k: x for k, x in nested.items() if k != IDS}
        changes.append(Change("eagle_config", nested, kept or None, "one list, at top level"))
    if config.get("num_aux_hidden_states") != len(ids):
        old = config.get("num_aux_hidden_states")
        changes.append(
            Change("num_aux_hidden_states", old, len(ids), "sizes fc; a top-level list does not")  # vllm#54526
        )
    return changes


def switches(look: Look, config: dict[str, Any]) -> list[Change]:
    """Every norm switch written out: as the contract says, else as the tensors prove, else the default of this form."""
    d = look.drafter
    trained = look.contract.norms if look.contract is not None else None
    proved = {
        "norm_before_fc": d.has("input_norm.weight"),
        "fc_norm": any(n.startswith("fc_norm.") for n in d.tensors),
        "norm_before_residual": False,
        "norm_output": False,
    }
    changes = []
    for key, value in proved.items():
        # A tensor that is there decides; what no tensor shows is left as it is written.
        by_tensor = key in ("norm_before_fc", "fc_norm")
        if trained is not None:
            wanted, why = bool(getattr(trained, key)), "the contract"
        elif by_tensor:
            wanted, why = value, "its tensors are there" if value else "it has no tensors"
        elif config.get(key) is None:
            wanted, why = value, "written out; absent means this in a config of this form"
        else:
            continue
        if config.get(key) is not wanted and not (by_tensor and trained is None and d.switches[key] == wanted):
            changes.append(Change(key, config.get(key), wanted, why))
    return changes


def nulls(look: Look, config: dict[str, Any]) -> list[Change]:
    """true or false where the library refuses a null (ModelOpt#1417); a switch that other tools overwrite lm_head by."""
    from draftsmith.check.values import STRICT_BOOLS

    plain = {"use_cache": True}
    changes = [
        Change(key, None, plain.get(key, False), "null is refused where true or false is wanted")
        for key in STRICT_BOOLS
        if key in config and config[key] is None
    ]
    if config.get("tie_word_embeddings") is True and look.drafter.has("lm_head.weight"):
        changes.append(Change("tie_word_embeddings", True, False, "the drafter has its own lm_head"))
    return changes


def architecture(look: Look, config: dict[str, Any]) -> list[Change]:
    """A registered name for the layout that the tensors prove, and a model_type that the engine leaves alone and, for
    an MLA drafter, takes for MLA."""
    d = look.drafter
    p = "layers.0.self_attn."
    if d.has(p + "kv_a_proj_with_mqa.weight"):
        fitting = ["Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"]
    elif d.has(p + "q_norm.weight"):
        fitting = ["Eagle3Qwen3ForCausalLM"]
    elif d.has(p + "q_proj.weight"):
        fitting = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"]
    else:
        return []
    changes = []
    if look.engine_known:
        registered = look.release.registered
        fits = d.architecture in registered and (d.architecture in fitting or fitting[0].startswith("Llama"))
        name = next((n for n in fitting if n in registered), None)
        if not fits and name is not None:
            changes.append(
                Change("architectures", config.get("architectures"), [name], "the registered class of this layout")
            )
    changes += _model_type(look, config, fitting[0])
    return changes


def _model_type(look: Look, config: dict[str, Any], name: str) -> list[Change]:
    d, release = look.drafter, look.release if look.engine_known else None
    old = config.get("model_type")
    if name.startswith("Eagle3Deepseek"):
        wanted = release.mla_type(d) if release else "deepseek_v2"
        taken = release.mla_types if release else None
        if d.model_type not in (taken[0] if taken else (wanted,)):
            return [Change("model_type", old, wanted, "else it is not taken for MLA")]  # vllm#45764
    else:
        wanted = "qwen3" if name == "Eagle3Qwen3ForCausalLM" else "llama"
    if release and release.override(d) is not None and release.override(d, wanted) is None:
        return [Change("model_type", old, wanted, "else the engine turns it into an MTP head's")]
    return []


def sizes(look: Look, config: dict[str, Any]) -> list[Change]:
    """Sizes that the tensors and the target prove: target_hidden_size, vocab_size, draft_vocab_size, head_dim."""
    d, t = look.drafter, look.target
    changes: list[Change] = []
    fc, head, q = d.shape("fc.weight"), d.shape("lm_head.weight"), d.shape("layers.0.self_attn.q_proj.weight")
    own = d.size("hidden_size")
    fits = bool(t.hidden and fc and len(fc) == 2 and fc[1] % t.hidden == 0)
    if fits and own and t.hidden != own and config.get("target_hidden_size") is None:
        changes.append(Change("target_hidden_size", None, t.hidden, "fc reads the target's width"))
    rows = head[0] if head else None
    vocab = config.get("vocab_size")
    if t.vocab and rows and vocab == rows and vocab != t.vocab and d.has("d2t"):
        # speculators#188: the draft size written into vocab_size.
        changes.append(Change("vocab_size", vocab, t.vocab, "must be the target's; lm_head's rows are the draft size"))
        if config.get("draft_vocab_size") != rows:
            changes.append(Change("draft_vocab_size", config.get("draft_vocab_size"), rows, "lm_head's rows"))
    heads = d.size("num_attention_heads")
    if q and heads and q[0] % heads == 0 and config.get("head_dim") is None and own and own // heads != q[0] // heads:
        changes.append(Change("head_dim", None, q[0] // heads, "rows of q_proj / heads"))
    return changes


def mrope(look: Look, config: dict[str, Any]) -> list[Change]:
    """No multimodal rope keys beside a text-only target (speculators#598)."""
    if look.target.multimodal:
        return []
    changes = []
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if not isinstance(rope, dict):
            continue
        kept = {k: x for k, x in rope.items() if k not in ("mrope_section", "mrope_interleaved")}
        for kind in ("type", "rope_type"):
            if kept.get(kind) == "mrope":
                kept[kind] = "default"
        if kept != rope:
            changes.append(Change(name, rope, kept, "the target is text-only"))
    return changes


def positions(look: Look, config: dict[str, Any]) -> list[Change]:
    """The target's length, where the rotary table is all that it sizes: what vLLM 0.28 and later do by themselves."""
    from draftsmith.check.rope import Rope, read_rope

    own, wanted = look.drafter.size("max_position_embeddings"), look.target.max_positions
    served = look.options.max_model_len or wanted
    rope = read_rope(look.drafter.config)
    if not own or not wanted or not served or own >= served or not isinstance(rope, Rope):
        return []
    if rope.kind not in ("default", "linear", "llama3"):
        return []  # the others derive their angles from this number
    why = "sizes the rotary table; nothing past the old value was trained"
    return [Change("max_position_embeddings", own, wanted, why)]


RULES: tuple[Rule, ...] = (aux_ids, switches, nulls, architecture, sizes, mrope, positions)


def rewrite(look: Look) -> tuple[dict[str, Any], list[Change]]:
    """The config that says to the engine what was trained, and what was changed. No change where the folder is of a
    family whose config vLLM rewrites itself (speculators): `draftsmith convert` makes another folder of that."""
    config = dict(look.drafter.raw)
    if look.drafter.speculators or not look.drafter.dialect.eagle3:
        return config, []
    changes = [change for rule in RULES for change in rule(look, config)]
    for change in changes:
        if change.new is None:
            config.pop(change.key, None)
        else:
            config[change.key] = change.new
    return config, changes


def shadow_path(drafter: Path) -> Path:
    """Beside the drafter, with a name that vLLM takes for eagle3 and never for eagle."""
    name = drafter.name.removesuffix("-eagle3").replace("eagle-", "eagle_")
    return drafter.parent / f"{name}-shadow-eagle3"


def _link(real: Path, link: Path) -> None:
    """A hard link, which outlives a moved or deleted drafter and is no way out of the folder; a symbolic one where the
    file lies on another disk, belongs to someone else, or is a folder. `real` is resolved: hub caches hold links."""
    try:
        if real.is_dir():
            raise OSError
        link.hardlink_to(real)
    except OSError:
        link.symlink_to(real, target_is_directory=real.is_dir())


def write_shadow(drafter: Path, config: dict[str, Any], changes: list[Change], out: Path) -> Path:
    """Make the folder: weights and all else linked, config.json new, contract.json copied. A folder that draftsmith made
    there before is replaced; UserError if something else lies there."""
    source = drafter.resolve(strict=True)
    if out.resolve() == source:
        raise UserError(f"{out} is the drafter itself", "its own config would be lost", "give another --out")
    if out.exists() and not (out / MARK).is_file():
        raise UserError(f"{out} exists and was not made by draftsmith", "it would be overwritten", "give another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        for path in sorted(source.iterdir()):
            if path.name in ("config.json", MARK):
                continue
            if path.name == "contract.json":
                shutil.copyfile(path, made / path.name)
            else:
                _link(path.resolve(), made / path.name)
        write_json(made / "config.json", config)
        write_json(
            made / MARK,
            {
                "of": str(source),
                "changes": [{"key": c.key, "old": c.old, "new": c.new, "why": c.why} for c in changes],
            },
        )
        made.chmod(0o755)
        if out.exists():
            old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.old."))
            out.rename(old / out.name)
            made.rename(out)
            shutil.rmtree(old)
        else:
            made.rename(out)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return out
