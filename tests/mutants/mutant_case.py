"""A good pair on its way to disk (`Case`), the register of mutants, and what mutants share.

table.json beside this file says for each mutant which check must catch it, with which status, and what that check needs.
The same mutants run through a real engine in benchmarks/silent_faults.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tiny_pair as tp
from tiny_pair import Pair

from draftsmith.check.types import Options

P = "layers.0."
TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(tp.VOCAB)}, "unk_token": "w0"},
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclass
class Case:
    """A pair on its way to disk, and how it is launched. engine: a kind of engine_tree.py."""

    pair: Pair
    contract: dict[str, Any] | None
    folder: str = "drafter-eagle3"
    engine: str = "modern-v1"
    options: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(TOKENIZER)))
    template: str = TEMPLATE
    rows: list[list[int]] | None = None
    after: list[Callable[[Path, Path], None]] = field(default_factory=list)

    @property
    def c(self) -> dict[str, Any]:
        return self.pair.config

    @property
    def t(self) -> dict[str, np.ndarray]:
        return self.pair.drafter

    def write(self, root: Path) -> tuple[Path, Path]:
        """(target folder, drafter folder)."""
        target, drafter = root / "target", root / self.folder
        self.pair.write_target(target)
        write_tokenizer(target, self.tokenizer, self.template)
        self.pair.write_drafter(drafter)
        if self.contract is not None:
            (drafter / "contract.json").write_text(json.dumps(self.contract, indent=1))
        for change in self.after:
            change(target, drafter)
        return target, drafter

    def make_options(self) -> Options:
        return Options(**self.options)


def write_tokenizer(folder: Path, tokenizer: dict[str, Any], template: str) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template})
    )


def contract_for(pair: Pair, root: Path) -> dict[str, Any]:
    """The contract that a run would have written for this pair."""
    from draftsmith.contract import Contract, DrafterSizes, NormSwitches
    from draftsmith.target.config import facts_of
    from draftsmith.target.tokenizer import chat_template_hash, tokenizer_hash
    from draftsmith.vocab.map import VocabMap

    root.mkdir(parents=True, exist_ok=True)
    write_tokenizer(root, TOKENIZER, TEMPLATE)
    c = pair.config
    return Contract(
        target=facts_of(pair.target_config, "tiny"),
        tokenizer_hash=tokenizer_hash(root),
        chat_template_hash=chat_template_hash(root),
        draft_vocab_size=c["draft_vocab_size"],
        vocab_map_hash=VocabMap(pair.drafter["d2t"], pair.drafter["t2d"]).hash(),
        aux_layer_ids=list(tp.AUX_LAYERS),
        final_state="pre_norm",
        norms=NormSwitches(),
        rope={"rope_theta": 10000.0, "rope_type": "default"},
        sizes=DrafterSizes(
            hidden_size=c["hidden_size"],
            num_attention_heads=c["num_attention_heads"],
            num_key_value_heads=c["num_key_value_heads"],
            head_dim=c["head_dim"],
            intermediate_size=c["intermediate_size"],
        ),
        trained_length=512,
        ttt_steps=3,
    ).model_dump(mode="json")


Mutation = Callable[[Case], None]
MUTANTS: dict[str, Mutation] = {}


def mutant(function: Mutation) -> Mutation:
    MUTANTS[function.__name__] = function
    return function


@cache
def _good_pair() -> Pair:
    return tp.make_pair()


def good_case(scratch: Path, with_contract: bool = True) -> Case:
    pair = copy.deepcopy(_good_pair())
    return Case(pair, contract_for(pair, scratch) if with_contract else None)


def rename(case: Case, change: Callable[[str], str]) -> None:
    case.pair.drafter = {change(n): x for n, x in case.t.items()}


def drop(case: Case, *names: str) -> None:
    for n in names:
        del case.t[n]


def edit_json(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path, Path], None]:
    def after(target: Path, drafter: Path) -> None:
        value = json.loads((drafter / name).read_text())
        change(value)
        (drafter / name).write_text(json.dumps(value))

    return after


def offsets(ids: np.ndarray) -> np.ndarray:
    return ids.astype("<i8") - np.arange(len(ids), dtype="<i8")


def to_speculators(case: Case) -> None:
    """The same drafter as a speculators checkpoint."""
    c = dict(case.c)
    layer_keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                  "head_dim", "vocab_size", "max_position_embeddings", "rope_parameters", "rope_theta", "rms_norm_eps",
                  "hidden_act", "attention_bias", "model_type")  # fmt: skip
    case.pair.config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {k: c[k] for k in layer_keys},
        "draft_vocab_size": c["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": c["eagle_aux_hidden_state_layer_ids"],
        "norm_before_residual": c["norm_before_residual"],
        "norm_before_fc": c["norm_before_fc"],
        "torch_dtype": "bfloat16",
    }
