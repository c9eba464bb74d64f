"""Targets that are served through transformers' own code: which of them EAGLE-3 can have, seen in that code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_trees import write, write_vllm

from draftsmith.check import gate
from draftsmith.check.types import CheckRow, Context, run_checks
from draftsmith.engine.reader import read_engine

BACKEND = """
from .interfaces import SupportsEagle3
class TransformersForCausalLM(SupportsEagle3):
    pass
"""
LOADER = """
class Proposer:
    def _maybe_share_embeddings(self, target):
        if hasattr(target.model, "embed_tokens"):
            self.table = target.model.embed_tokens
"""
DISPATCH = 'raise ValueError(f"Layer {i} does not dispatch through the Transformers attention interface")\n'
MODELLING = """
class OwnModel(PreTrainedModel):
    _supports_attention_backend = True
    def __init__(self, config):
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
{more}
class {name}(PreTrainedModel):
    pass
"""


def ask(root: Path, architecture: str, modelling: str | None, dispatches: bool = True, **config: Any) -> CheckRow:
    write_vllm(root, model_executor__models__backend=BACKEND)
    files = {"transformers/__init__.py": "", "vllm/v1/spec_decode/llm_base_proposer.py": LOADER}
    if modelling is not None:
        files["transformers/models/own/modeling_own.py"] = modelling
    if dispatches:
        files["vllm/model_executor/models/transformers/base.py"] = DISPATCH
    target = {"architectures": [architecture], "model_type": "own", "num_hidden_layers": 4} | config
    ctx = Context(target_config=target, engine=read_engine(write(root, files)))
    return next(r for r in run_checks(ctx, groups=("gate",)) if r.id == gate.INTERFACE)


def code(name: str = "OwnForCausalLM", more: str = "", change: tuple[str, str] = ("", "")) -> str:
    return (
        MODELLING.format(name=name, more=more).replace(*change) if change[0] else MODELLING.format(name=name, more=more)
    )


def test_a_class_that_takes_the_engines_attention_is_served(tmp_path: Path) -> None:
    assert ask(tmp_path, "OwnForCausalLM", code()).status == "pass"


def test_an_architecture_that_was_taken_out_is_served_where_transformers_has_it(tmp_path: Path) -> None:
    """Persimmon in vLLM 0.32: out of the registry since 0.26, served all the same."""
    row = ask(tmp_path, "OldForCausalLM", code("OldForCausalLM"))
    assert row.status == "pass" and "Transformers backend" in row.found


@pytest.mark.parametrize("modelling", [None, code(), code("OldForCausalLM", change=("True", "False"))])
def test_one_that_was_taken_out_and_cannot_be_run_says_both(tmp_path: Path, modelling: str | None) -> None:
    row = ask(tmp_path, "OldForCausalLM", modelling)
    assert row.status == "fail"
    assert (
        "OldForCausalLM was taken out; the last release with it is 0.9.2" in row.found and "transformers" in row.found
    )


def test_one_that_was_taken_out_is_undecided_where_no_transformers_lies_beside(tmp_path: Path) -> None:
    write_vllm(tmp_path, model_executor__models__backend=BACKEND)
    ctx = Context(
        target_config={"architectures": ["OldForCausalLM"], "model_type": "own"}, engine=read_engine(tmp_path)
    )
    row = next(r for r in run_checks(ctx, groups=("gate",)) if r.id == gate.INTERFACE)
    assert row.status == "skip" and "taken out" in row.found


def test_an_embedding_of_another_name_is_refused(tmp_path: Path) -> None:
    """GPT-NeoX's embed_in: "Target model does not have 'embed_tokens' or 'embedding' attribute", after loading."""
    row = ask(tmp_path, "OwnForCausalLM", code(change=("embed_tokens", "embed_in")))
    assert row.status == "fail" and "embedding" in row.found
    assert {e.file for e in row.evidence} >= {
        "transformers/models/own/modeling_own.py",
        "vllm/v1/spec_decode/llm_base_proposer.py",
    }
    assert any("self.embed_in = nn.Embedding" in e.text for e in row.evidence)


@pytest.mark.parametrize(("more", "config"), [
    ("", {"layer_types": ["full_attention", "linear_attention"]}),
    ("", {"layer_types": ["conv", "full_attention"]}),
    ("class OwnMixer(nn.Module):\n    pass\n", {}),
    ("class OwnGatedDeltaNet(nn.Module):\n    pass\n", {}),
])  # fmt: skip
def test_layers_that_are_no_attention_are_refused(tmp_path: Path, more: str, config: dict[str, Any]) -> None:
    """Bamba in vLLM 0.32: "Layer 0 (linear_attention) does not dispatch through the Transformers attention interface"."""
    row = ask(tmp_path, "OwnForCausalLM", code(more=more), **config)
    assert row.status == "fail" and "Transformers backend has no way" in row.found
    assert any("does not dispatch" in e.text for e in row.evidence)


def test_where_the_release_does_not_refuse_them_nothing_is_said(tmp_path: Path) -> None:
    row = ask(tmp_path, "OwnForCausalLM", code(), dispatches=False, layer_types=["linear_attention"])
    assert row.status == "pass"


def test_windows_and_chunks_are_attention(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "chunked_attention", "full_attention"]
    assert ask(tmp_path, "OwnForCausalLM", code(), layer_types=kinds).status == "pass"
