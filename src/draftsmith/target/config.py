"""What a target's config.json says, without torch: the text part of any wrapper, the sizes, a hash, the facts of
the contract.

Every reader of a target's config goes through `text_config`: wrappers nest the language model under different keys,
and the outer `model_type` is not the inner one (`kimi_k25` holds `kimi_k2`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError
from draftsmith.record import content_hash
from draftsmith.untrusted import read_json

if TYPE_CHECKING:
    from draftsmith.contract import TargetFacts

FILE = "config.json"

TEXT_KEYS: tuple[tuple[str, ...], ...] = (
    ("text_config",),  # Llama-4, Gemma-3, Qwen-VL, Kimi-K2.5, Mistral3
    ("llm_config",),  # InternVL, NVLM
    ("language_config",),  # DeepSeek-VL2, Janus
    ("thinker_config", "text_config"),  # Qwen-Omni: the thinker is the part that writes text
)
"""Where wrappers keep the language model's config; the first that is there and not null wins."""

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
VOCAB = ("vocab_size", "padded_vocab_size")

_NOISE = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation", "use_cache"})
"""Keys that say who wrote the file, not which model it is."""


def config_path(path: str | Path) -> Path:
    """The config.json of a folder, or the file itself."""
    p = Path(path).expanduser()
    return p / FILE if p.is_dir() else p


def load_config(path_or_id: str | Path, revision: str | None = None) -> dict[str, Any]:
    """The parsed config.json of a folder, a file, a hub id (only that one file is downloaded), or a name that
    `target.resolve` knows.

    Raises UserError if it is missing, unreadable, or no mapping."""
    path = Path(path_or_id).expanduser()
    if not path.exists():
        from draftsmith.target.resolve import named_target

        path = named_target(str(path_or_id)) or path
    if not path.exists() and not path.is_absolute() and str(path_or_id).count("/") <= 1 and path.suffix != ".json":
        from draftsmith.target.hub import hub_file

        path = hub_file(str(path_or_id), FILE, revision)
    file = config_path(path)
    try:
        raw = read_json(file)
    except FileNotFoundError:
        raise UserError(
            f"{file} is missing",
            "without a config.json nothing says which model this is",
            "give the folder that holds config.json, tokenizer and safetensors, or a hub id",
        ) from None
    except (OSError, ValueError) as e:
        raise UserError(f"{file} cannot be read as JSON: {e}", "", "copy the target's folder again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file} holds a {type(raw).__name__}, not a mapping", "", "copy the target's folder again")
    return raw


def text_config(cfg: dict[str, Any]) -> dict[str, Any]:
    """The language model's own config inside any wrapper; `cfg` itself where it is no wrapper."""
    for keys in TEXT_KEYS:
        node: Any = cfg
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and node:
            return text_config(node)
    return cfg


def _with_defaults(text: dict[str, Any]) -> dict[str, Any]:
    """`text` over the installed transformers' defaults of its model type; Gemma-3's nested config, for one, is saved
    without the sizes that equal the defaults."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return text
    return CONFIG_MAPPING[model_type]().to_dict() | text


def size_of(text: dict[str, Any], names: tuple[str, ...], source: str) -> int:
    """The first of `names` in the text config as a positive int; UserError names what was looked for."""
    for candidate in (text, None):
        found = candidate if candidate is not None else _with_defaults(text)
        for name in names:
            value = found.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    raise UserError(
        f"{source}: none of {', '.join(names)} is a positive number (model_type {text.get('model_type')!r})",
        "the drafter takes its sizes from the target's",
        "check that the folder is a language model's, and that its config.json is whole",
    )


def config_hash(cfg: dict[str, Any]) -> str:
    """Content hash of a target's config, deaf to who saved it (paths, library version, `dtype`'s two spellings)."""

    def clean(node: Any) -> Any:
        if isinstance(node, dict):
            out = {k: clean(v) for k, v in node.items() if k not in _NOISE and v is not None}
            if "torch_dtype" in out:
                out.setdefault("dtype", out.pop("torch_dtype"))
                out.pop("torch_dtype", None)
            return out
        if isinstance(node, list):
            return [clean(v) for v in node]
        return node

    return content_hash(clean(cfg))


def facts_of(cfg: dict[str, Any], name: str, revision: str | None = None) -> TargetFacts:
    """The contract's target part from a parsed config. `name` is how the user named the target."""
    from draftsmith.contract import TargetFacts  # pydantic: not for those who only read a config

    text = text_config(cfg)
    architectures = cfg.get("architectures") or text.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise UserError(
            f"{name}: config.json has no `architectures`",
            "the engine chooses the model class, and we the checks, by it",
            "take the config.json of the published model",
        )
    model_type = text.get("model_type") or cfg.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{name}: config.json has no `model_type`", "", "take the config.json of the published model")
    return TargetFacts(
        name=name,
        revision=revision,
        config_hash=config_hash(cfg),
        architecture=architectures[0],
        model_type=model_type,
        outer_model_type=str(cfg.get("model_type") or model_type),
        hidden_size=size_of(text, HIDDEN, name),
        num_layers=size_of(text, LAYERS, name),
        vocab_size=size_of(text, VOCAB, name),
    )


def target_facts(folder: str | Path, name: str | None = None) -> TargetFacts:
    """The contract's target part of a model folder (or hub id). A hub snapshot's commit becomes the revision."""
    path = Path(folder).expanduser()
    revision = path.name if path.parent.name == "snapshots" else None
    return facts_of(load_config(folder), name or (path.name if revision is None else str(folder)), revision)


def default_aux_layers(n: int) -> list[int]:
    """vLLM's own choice for a target of n layers: 2, n//2, n-3 (id k = the stream entering layer k).

    Raises UserError where these are not three distinct layers: engines drop duplicates without a word and the
    drafter's first matrix no longer fits."""
    ids = [2, n // 2, n - 3]
    if len(set(ids)) != 3 or sorted(ids) != ids or ids[0] < 0:
        raise UserError(
            f"target has {n} layers: the default aux layers ({', '.join(map(str, ids))}) are not 3 distinct layers",
            "the engine takes each layer once, and the drafter would get fewer states than it was made for",
            "give extract.aux_layers (--aux-layers), ascending and distinct, from 0 to the number of layers",
        )
    return ids


def check_aux_layers(ids: list[int], n: int) -> list[int]:
    """`ids` if they are distinct, ascending and within 0..n; else UserError (vLLM sorts and de-duplicates silently)."""
    if not ids or sorted(set(ids)) != list(ids) or ids[0] < 0 or ids[-1] > n:
        raise UserError(
            f"aux layers {list(ids)} for a target of {n} layers",
            f"ids must be distinct, ascending and between 0 (the embeddings) and {n} (after the last layer); the engine "
            "sorts them, drops duplicates and never fills in those that do not exist",
            f"give for instance {[2, n // 2, n - 3]}" if n >= 7 else "give ids in that range",
        )
    return list(ids)
