"""P08–P10: the method, given or made of a path, and the drafter's architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
from asked import ask
from mutant_case import Case, rename

from draftsmith.check.form_config import method_of_path


def test_p08_method_eagle_for_an_eagle3_drafter(tmp_path: Path) -> None:
    """AngelSlim#15: "Model architectures ['EagleLlamaForCausalLMEagle3'] are not supported"."""
    row = ask(tmp_path, lambda c: c.options.update(method="eagle"))["form.method"]
    assert row.status == "fail" and "d2t" in row.found and "eagle3" in row.fix


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/x/my-eagle3", "eagle3"),
        ("/x/final", "draft_model"),
        ("/x/qwen-eagle-v3", "eagle"),
        ("/models/eagle-heads/my-eagle3", "eagle"),
        ("/x/My-EAGLE3", "eagle3"),
    ],
)
def test_p09_the_path_decides_where_no_method_is_given(path: str, method: str) -> None:
    assert method_of_path(path) == method


def test_p09_a_folder_that_says_nothing_is_flagged(tmp_path: Path) -> None:
    row = ask(tmp_path, lambda c: setattr(c, "folder", "final"))["form.method"]
    assert row.status == "warn" and "draft_model" in row.found and '"method": "eagle3"' in row.fix


@pytest.mark.parametrize("name", ["MiniCPMForCausalLMEagle3", "DeepSeekForCausalLMEagle3", "Eagle3Phi3ForCausalLM"])
def test_p10_unregistered_names_are_answered_with_the_one_that_fits_the_tensors(tmp_path: Path, name: str) -> None:
    """TorchSpec#61, vllm#30987."""
    row = ask(tmp_path, lambda c: c.c.update(architectures=[name]))["form.architecture"]
    assert row.status == "fail" and name in row.found and "LlamaForCausalLMEagle3" in row.fix


def test_p10_no_architecture_at_all(tmp_path: Path) -> None:
    row = ask(tmp_path, lambda c: c.c.pop("architectures"))["form.architecture"]
    assert row.status == "fail" and "Eagle3LlamaModel" in row.found


def test_p10_an_mla_layout_is_named_by_its_tensors(tmp_path: Path) -> None:
    def change(case: Case) -> None:
        case.c["architectures"] = ["DeepSeekForCausalLMEagle3"]
        rename(case, lambda n: n.replace("q_proj", "kv_a_proj_with_mqa"))

    assert "Eagle3DeepseekV2ForCausalLM" in ask(tmp_path, change)["form.architecture"].fix
