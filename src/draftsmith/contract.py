"""What trainer and engine must agree on: written once at capture, carried by every artifact, compared at every door.

`contract.json` starts with the target's facts (capture), gains the vocab map (vocab), aux layers and final state
(extract), the drafter's switches (train), and ends beside the exported drafter. A field that is None has not been
decided yet; two contracts disagree only where both have decided.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftsmith.errors import UserError
from draftsmith.formats import Step, upgrade
from draftsmith.record import read_json, write_json

FILE = "contract.json"
FORMAT = 1
STEPS: dict[int, Step] = {0: lambda raw: raw}
"""Format → how to make the next one of it. 0 is the same without a number."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TargetFacts(_Part):
    """Which target, and its sizes. `model_type` is the text config's; `outer_model_type` the wrapper's."""

    name: str
    revision: str | None = None
    config_hash: str
    architecture: str
    model_type: str
    outer_model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int


class NormSwitches(_Part):
    """The four norm switches of an EAGLE-3 drafter (vllm/model_executor/models/llama_eagle3.py)."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class DrafterSizes(_Part):
    form: Literal["llama", "mla"] = "llama"
    hidden_size: int
    num_layers: int = 1
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int


class Contract(_Part):
    """Every field that trainer and engine must share. aux_layer_ids: id k is the residual stream entering layer k
    (transformers' `hidden_states[k]`; k = n is after the last layer, before the final norm)."""

    format: int = Field(default_factory=lambda: FORMAT)
    target: TargetFacts
    tokenizer_hash: str | None = None
    chat_template_hash: str | None = None
    thinking: str | None = None
    data_hash: str | None = None
    draft_vocab_size: int | None = None
    vocab_map_hash: str | None = None
    aux_layer_ids: list[int] | None = None
    final_state: Literal["pre_norm", "post_norm"] | None = None
    norms: NormSwitches | None = None
    rope: dict[str, Any] | None = None
    sizes: DrafterSizes | None = None
    trained_length: int | None = None
    ttt_steps: int | None = None

    def with_(self, **changes: Any) -> Contract:
        """A copy with some fields decided (validated)."""
        return Contract.model_validate(self.model_dump() | changes)

    def save(self, folder: Path) -> Path:
        """Write `folder/contract.json` atomically."""
        path = folder / FILE
        write_json(path, self.model_dump(mode="json"))
        return path

    @staticmethod
    def load(folder: Path) -> Contract:
        """Read `folder/contract.json`; UserError if it is missing, broken or of a newer format."""
        path = folder / FILE if folder.is_dir() else folder
        try:
            raw = read_json(path)
        except FileNotFoundError:
            raise UserError(
                f"{path} is missing",
                "without it nothing says which target, layers and vocabulary these files were made for",
                "re-make the stage, or copy the contract from where they came",
            ) from None
        except (OSError, ValueError) as e:
            raise UserError(f"{path} cannot be read: {e}", "", "re-make the stage that wrote it") from None
        if isinstance(raw, dict):
            raw = upgrade(raw, FORMAT, STEPS, path, "contract")
        try:
            return Contract.model_validate(raw)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(str(p) for p in first["loc"])
            raise UserError(
                f"{path}: field {where or '(whole file)'}: {first['msg']}",
                "the contract cannot be compared",
                "re-make the stage that wrote it",
            ) from None


class Disagreement(_Part):
    field: str
    ours: Any
    theirs: Any


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and not prefix.endswith("rope."):
        out: dict[str, Any] = {}
        for key, v in value.items():
            out |= _flat(v, f"{prefix}{key}.")
        return out
    return {prefix[:-1]: value}


def compare(ours: Contract, theirs: Contract, ignore: frozenset[str] = frozenset()) -> list[Disagreement]:
    """Fields that both have decided, differently. `ignore` holds dotted names, e.g. "target.name"."""
    a, b = _flat(ours.model_dump(mode="json")), _flat(theirs.model_dump(mode="json"))
    return [
        Disagreement(field=k, ours=a[k], theirs=b[k])
        for k in a
        if k in b and k not in ignore and a[k] is not None and b[k] is not None and a[k] != b[k]
    ]


# A path or a hub id may name the same target; the config hash is what decides.
_NAMES = frozenset({"target.name", "target.revision", "format"})


def require_agreement(
    ours: Contract, theirs: Contract, where_ours: str, where_theirs: str, ignore: frozenset[str] = frozenset()
) -> None:
    """UserError naming the first field and both values if the contracts disagree."""
    found = compare(ours, theirs, ignore | _NAMES)
    if not found:
        return
    lines = "; ".join(f"{d.field}: {d.ours!r} in {where_ours}, {d.theirs!r} in {where_theirs}" for d in found[:4])
    raise UserError(
        f"the contracts disagree on {len(found)} field(s): {lines}",
        "a drafter made under one and used under the other accepts little or nothing, and no engine says so",
        "use artifacts of one run, or re-make the later one",
    )
