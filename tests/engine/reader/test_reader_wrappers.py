"""What passes the engine's test and still stops it: hollow wrappers, and a backend that wants a newer transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_trees import REGISTRY, write, write_vllm

from draftsmith.check import gate
from draftsmith.check.types import Context, Options, run_checks
from draftsmith.engine.reader import EngineFacts, read_engine
from draftsmith.engine.reader.backend import transformers_need
from draftsmith.engine.releases_make import letters

OUTER = """
from .interfaces import SupportsEagle3
from .utils import init_vllm_registered_model
class FullForConditionalGeneration(SupportsEagle3):
    def __init__(self, vllm_config):
        self.language_model = init_vllm_registered_model(vllm_config=vllm_config, architectures=["LlamaForCausalLM"])
class HollowForConditionalGeneration(FullForConditionalGeneration):
    def __init__(self, vllm_config):
        self.language_model = init_vllm_registered_model(vllm_config=vllm_config, architectures=["PlainForCausalLM"])
class OpenForConditionalGeneration(SupportsEagle3):
    def __init__(self, vllm_config):
        self.language_model = init_vllm_registered_model(vllm_config=vllm_config)
"""
BACKEND = """
from .interfaces import SupportsEagle3
class TransformersForCausalLM(SupportsEagle3):
    def set_aux_hidden_state_layers(self, layers):
        self.check_version("5.2.0", "Eagle3 support")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    more = "".join(
        f'    "{kind}ForConditionalGeneration": ("outer", "{kind}ForConditionalGeneration"),\n'
        for kind in ("Full", "Hollow", "Open")
    )
    registry = REGISTRY.replace("_TEXT_GENERATION_MODELS = {\n", "_TEXT_GENERATION_MODELS = {\n" + more)
    return write_vllm(
        tmp_path,
        model_executor__models__outer=OUTER,
        model_executor__models__registry=registry,
        model_executor__models__backend=BACKEND,
    )


def interface(facts: EngineFacts, architecture: str, inner: str | None = None, **options: Any) -> tuple[str, str]:
    text: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 4}
    target = {"architectures": [architecture], "model_type": "x"}
    if inner is not None:
        target["text_config"] = text | ({"architectures": [inner]} if inner else {})
    ctx = Context(target_config=target, engine=facts, options=Options(**options))
    row = next(r for r in run_checks(ctx, groups=("gate",)) if r.id == gate.INTERFACE)
    return row.status, row.found


@pytest.mark.parametrize(
    ("outer", "inner", "status", "said"),
    [
        ("FullForConditionalGeneration", "", "pass", "LlamaForCausalLM, collects aux states"),
        ("HollowForConditionalGeneration", "LlamaForCausalLM", "fail", "PlainForCausalLM, does not collect aux states"),
        ("OpenForConditionalGeneration", "LlamaForCausalLM", "pass", "LlamaForCausalLM, collects"),
        ("OpenForConditionalGeneration", "PlainForCausalLM", "fail", "PlainForCausalLM, does not"),
        ("OpenForConditionalGeneration", "UnknownForCausalLM", "pass", "inherits SupportsEagle3"),
        ("OpenForConditionalGeneration", "", "pass", "inherits SupportsEagle3"),
    ],
)
def test_the_language_model_inside(root: Path, outer: str, inner: str, status: str, said: str) -> None:
    found = interface(read_engine(root), outer, inner)
    assert found[0] == status
    assert said in found[1]


@pytest.mark.parametrize(
    ("files", "met", "status"),
    [
        ({}, None, "pass"),
        (
            {"vllm-0.16.0.dist-info/METADATA": "Name: vllm\nVersion: 0.16.0\nRequires-Dist: transformers<5,>=4.56.0\n"},
            False,
            "fail",
        ),
        (
            {"vllm-0.16.0.dist-info/METADATA": "Name: vllm\nVersion: 0.16.0\nRequires-Dist: transformers>=5.5.3\n"},
            True,
            "pass",
        ),
        (
            {"vllm-0.16.0.dist-info/METADATA": "Name: vllm\nVersion: 0.16.0\nRequires-Dist: transformers-extra<5\n"},
            None,
            "pass",
        ),
        ({"transformers-4.57.1.dist-info/METADATA": ""}, False, "fail"),
        ({"transformers-5.10.0.dist-info/METADATA": ""}, True, "pass"),
    ],
)
def test_the_backend_wants_a_newer_transformers(
    root: Path, files: dict[str, str], met: bool | None, status: str
) -> None:
    facts = read_engine(write(root, files))
    assert facts.registry is not None
    need = transformers_need(facts, facts.registry.entries["TransformersForCausalLM"])
    assert need is not None
    assert (need.required, need.met) == ("5.2.0", met)
    assert transformers_need(facts, facts.registry.entries["LlamaForCausalLM"]) is None
    assert interface(facts, "TransformersForCausalLM")[0] == status


def test_both_are_letters_of_the_table(root: Path) -> None:
    write(root, {"vllm-0.16.0.dist-info/METADATA": "Name: vllm\nVersion: 0.16.0\nRequires-Dist: transformers<5\n"})
    found = letters(read_engine(root))
    assert found["TransformersForCausalLM"] == "p"
    assert (found["FullForConditionalGeneration"], found["HollowForConditionalGeneration"]) == ("y", "i")
    assert found["OpenForConditionalGeneration"] == "y"
