"""The two gate rows: both always there, outer and inner model type named, the engine's words, lines and a way out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine" / "reader"))

from engine_trees import LIST_ELSEWHERE, LIST_LOCAL, LIST_NONE, write, write_vllm

from draftsmith.check import gate  # registers the checks
from draftsmith.check.types import REGISTRY, CheckRow, Context, EngineId, Options, Verdict, check, run_checks
from draftsmith.engine.reader import read_engine

WRAPPED: dict[str, Any] = {
    "architectures": ["PlainForCausalLM"],
    "model_type": "outer_llama",
    "text_config": {"model_type": "kimi_k2", "num_hidden_layers": 61},
}


def rows(engine: Path, target: dict[str, Any], **options: Any) -> dict[str, CheckRow]:
    ctx = Context(target_config=target, engine=read_engine(engine), options=Options(**options))
    return {row.id: row for row in run_checks(ctx, groups=("gate",))}


def test_both_reasons_are_given_at_once(tmp_path: Path) -> None:
    found = rows(write_vllm(tmp_path, LIST_LOCAL, version="0.10.2"), WRAPPED)
    listed, interface = found[gate.LIST], found[gate.INTERFACE]
    assert (listed.status, interface.status) == ("fail", "fail")
    assert "text model_type 'kimi_k2', outer model_type 'outer_llama'" in listed.found
    assert "Eagle3 is only supported for ['llama', 'qwen'] models. Got self.target" in listed.found
    assert "hf_text_config.model_type='kimi_k2'" in listed.found
    assert [(e.file, e.line) for e in listed.evidence] == [("vllm/config/speculative.py", n) for n in (6, 7, 9)]
    assert "PlainForCausalLM lacks SupportsEagle3" in interface.found
    files = [e.file for e in interface.evidence]
    assert files[0].endswith("registry.py")
    assert files[1].endswith("plain.py")
    assert "vllm/v1/worker/gpu_model_runner.py" in files
    assert "draftsmith remedy" in listed.fix


def test_the_substring_of_the_text_config_decides(tmp_path: Path) -> None:
    root = write_vllm(tmp_path, LIST_LOCAL)
    found = rows(
        root, {"architectures": ["LlamaForCausalLM"], "model_type": "x", "text_config": {"model_type": "a_llama4_b"}}
    )
    assert (found[gate.LIST].status, found[gate.INTERFACE].status) == ("pass", "pass")
    assert "'llama' matches" in found[gate.LIST].found


def test_no_list_passes_and_an_unreadable_one_is_said(tmp_path: Path) -> None:
    assert rows(write_vllm(tmp_path / "a", LIST_NONE), WRAPPED)[gate.LIST].status == "pass"
    found = rows(write_vllm(tmp_path / "b", LIST_ELSEWHERE), WRAPPED)
    assert found[gate.LIST].status == "skip"
    verdict = Verdict.of(EngineId("vllm", "1", "x"), [found[gate.LIST], CheckRow("form.x", "form", "pass", "")])
    assert (verdict.verdict, verdict.exit_code) == ("unknown", 3)


def test_other_methods_are_not_gated(tmp_path: Path) -> None:
    assert rows(write_vllm(tmp_path, LIST_LOCAL), WRAPPED, method="dflash")[gate.LIST].status == "pass"


def test_a_config_without_a_type_or_architectures(tmp_path: Path) -> None:
    root = write_vllm(tmp_path, LIST_LOCAL)
    assert rows(root, {"architectures": ["PlainForCausalLM"]})[gate.LIST].status == "skip"
    for broken in (
        {"model_type": "llama"},
        {"model_type": "llama", "architectures": "LlamaForCausalLM"},
        {"architectures": [3]},
    ):
        assert rows(root, broken)[gate.INTERFACE].status == "fail"


def test_unregistered_targets_go_through_transformers_where_that_can_be_seen(tmp_path: Path) -> None:
    target = {"architectures": ["NewForCausalLM"], "model_type": "new"}
    root = write_vllm(tmp_path)
    assert rows(root, target)[gate.INTERFACE].status == "skip"
    modelling = (
        "class NewPreTrainedModel(PreTrainedModel):\n    {}\nclass NewForCausalLM(NewPreTrainedModel):\n    pass\n"
    )
    write(root, {"transformers/__init__.py": "", "transformers/models/new/modeling_new.py": modelling.format("pass")})
    assert rows(root, target)[gate.INTERFACE].status == "fail"
    write(root, {"transformers/models/new/modeling_new.py": modelling.format("_supports_attention_backend = True")})
    found = rows(root, target)[gate.INTERFACE]
    assert found.status == "pass"
    assert "Transformers backend, TransformersForCausalLM" in found.found
    assert rows(root, {"architectures": ["OtherForCausalLM"], "model_type": "new"})[gate.INTERFACE].status == "fail"
    old = rows(root, {"architectures": ["OldForCausalLM"], "model_type": "old"})[gate.INTERFACE]
    assert old.status == "fail" and "taken out; the last release with it is 0.9.2" in old.found


def test_a_class_that_cannot_be_followed_is_no_verdict(tmp_path: Path) -> None:
    row = rows(write_vllm(tmp_path), {"architectures": ["LostForCausalLM"], "model_type": "lost"})[gate.INTERFACE]
    assert row.status == "skip"
    assert "could not be followed: Base" in row.found


def test_without_an_engine_the_rows_are_skipped() -> None:
    found = list(run_checks(Context(target_config=WRAPPED, engine=None), groups=("gate",)))
    assert [(row.id, row.status) for row in found] == [(gate.LIST, "skip"), (gate.INTERFACE, "skip")]
    assert Verdict.of(EngineId(), found).exit_code == 3


def test_the_json_of_a_verdict_is_the_promised_one(tmp_path: Path) -> None:
    found = rows(write_vllm(tmp_path, LIST_LOCAL), WRAPPED)
    verdict = Verdict.of(EngineId("vllm", "0.30.0", str(tmp_path)), found.values())
    value = json.loads(json.dumps(verdict.to_json()))
    assert list(value) == ["verdict", "engine", "checks"]
    assert value["verdict"] == "no"
    assert list(value["engine"]) == ["name", "version", "path"]
    assert list(value["checks"][0]) == ["id", "group", "status", "found", "evidence", "fix"]
    assert list(value["checks"][0]["evidence"][0]) == ["file", "line", "text"]
    assert verdict.exit_code == 1


def test_a_check_registers_runs_and_is_skipped_for_want_of_its_needs() -> None:
    @check("form", ids=("form.made_up",), needs=("drafter_config",))
    def made_up(ctx: Context) -> Any:
        yield CheckRow("form.made_up", "form", "warn", str(ctx.drafter_config))

    try:
        found = {
            r.id: r
            for r in run_checks(
                Context(target_config={}, drafter_config={"a": 1}, drafter_headers={}), groups=("form",)
            )
        }
        assert found["form.made_up"].found == "{'a': 1}"
        assert next(r for r in run_checks(Context(), groups=("form",)) if r.id == "form.made_up").status == "skip"
        with pytest.raises(TypeError, match="no lazy field"):
            Context(nonsense=1)
    finally:
        REGISTRY.pop(f"{made_up.__module__}.{made_up.__name__}")
