"""P16–P19: aux layers that collapse, lie outside, count something else, or stand where the runner does not look."""

from __future__ import annotations

from pathlib import Path

import pytest
from asked import ask
from mutant_case import Case

from draftsmith.check.dialect import TABLE, Dialect, meaning

SGLANG = next(d for _, d in TABLE if d.name == "sglang")
VLLM = next(d for _, d in TABLE if d.name == "vllm")


def ids(case: Case, top: list[int] | None, nested: list[int] | None = None) -> None:
    case.c.pop("eagle_aux_hidden_state_layer_ids")
    if top is not None:
        case.c["eagle_aux_hidden_state_layer_ids"] = top
    if nested is not None:
        case.c["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": nested}


@pytest.mark.parametrize(("layers", "fine"), [(3, False), (4, False), (5, False), (6, False), (7, True), (8, True)])
def test_p16_the_default_needs_seven_layers(tmp_path: Path, layers: int, fine: bool) -> None:
    """6 layers: (2, 3, 3) is two states for three. (With 3 layers the ids 2, 1, 0 are distinct but not ascending.)"""

    def change(case: Case) -> None:
        ids(case, None)
        case.pair.target_config["num_hidden_layers"] = layers

    row = ask(tmp_path, change)["form.aux_ids"]
    assert row.status == ("pass" if fine or layers == 3 else "fail")


@pytest.mark.parametrize(
    ("top", "status"),
    [([2, 4, 99], "fail"), ([2, 4, 8], "pass"), ([0, 4, 8], "pass"), ([2, 2, 6], "fail"), ([6, 4, 2], "fail"),
     ([-1, 2, 4], "fail")],
)  # fmt: skip
def test_p17_ids_are_within_range_distinct_and_ascending(tmp_path: Path, top: list[int], status: str) -> None:
    assert ask(tmp_path, lambda c: ids(c, top))["form.aux_ids"].status == status


def test_p17_the_last_boundary_on_an_old_decoder_loop(tmp_path: Path) -> None:
    """vllm#46788: DeepSeek and Kimi captured before each layer, so id n captured nothing."""

    def change(case: Case) -> None:
        ids(case, [2, 4, 8])
        case.pair.target_config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}

    row = ask(tmp_path / "a", change, "middle")["runner.last_layer"]
    assert row.status == "fail" and row.evidence
    assert ask(tmp_path / "b", change, "modern-v1")["runner.last_layer"].status == "pass"


@pytest.mark.parametrize(
    ("written", "layers", "family", "says"),
    [
        ([1, 29, 57], 61, SGLANG, "output"),  # SpecForge deepseek-v3, TorchSpec kimi
        ([1, 17, 33], 36, SGLANG, "output"),  # SpecForge gpt-oss-120b
        ([1, 11, 21], 24, SGLANG, "output"),  # SpecForge gpt-oss-20b
        ([1, 46, 90], 94, SGLANG, "output"),  # SpecForge qwen3-235b
        ([1, 23, 44], 48, SGLANG, "output"),  # ModelOpt Llama-4-Maverick
        ([2, 30, 58], 61, SGLANG, "entering"),  # Kimi drafters in the engine's meaning, nested
        ([24, 30, 36], 36, SGLANG, "entering"),  # gpt-oss v3: 36 exists only as the last boundary
        ([2, 30, 58], 61, VLLM, "entering"),
        ([1, 4, 6], 9, VLLM, "entering"),  # a choice of one's own at top level
        ([1, 3, 5], 9, VLLM, "output"),  # the other producers' default, copied unshifted (vllm#43671)
    ],
)
def test_p18_what_a_number_counts(written: list[int], layers: int, family: Dialect, says: str) -> None:
    """sglang#25454: 1, n/2-1, n-4 are outputs; 2, n/2, n-3 are entering streams."""
    assert meaning(written, layers, family) == says


def test_p18_the_meaning_is_said(tmp_path: Path) -> None:
    row = ask(tmp_path)["runner.aux_ids"]
    assert "2 = stream entering layer 2 = output of layer 1" in row.found


def test_p18_the_other_default_at_top_level_is_suspicious(tmp_path: Path) -> None:
    row = ask(tmp_path, lambda c: ids(c, [1, 3, 4]))["runner.aux_ids"]
    assert row.status == "warn" and "[2, 4, 5]" in row.fix


def test_p19_nested_ids_are_read_by_one_runner_only(tmp_path: Path) -> None:
    """The same file: one layer too early on V1, ignored (and right by luck) on V2, ignored by old releases."""

    def specforge(case: Case) -> None:
        ids(case, None, [1, 3, 4])  # 8 layers: 1, n/2-1, n-4
        case.pair.target_config["num_hidden_layers"] = 8

    v1 = ask(tmp_path / "a", specforge, "modern-v1")["runner.aux_ids"]
    assert v1.status == "fail" and "one layer too early" in v1.found and "[2, 4, 5]" in v1.fix
    v2 = ask(tmp_path / "b", specforge, "modern-v2")["runner.aux_ids"]
    assert v2.status == "pass" and "[2, 4, 5]" in v2.found
    assert ask(tmp_path / "c", specforge, "old")["runner.aux_ids"].status == "pass"


def test_p19_nested_ids_of_a_choice_are_lost_on_v2(tmp_path: Path) -> None:
    """nvidia's gpt-oss v3 form: right on V1, wrong on V2."""

    def chosen(case: Case) -> None:
        ids(case, None, [4, 6, 8])

    assert ask(tmp_path / "a", chosen, "modern-v1")["runner.aux_ids"].status == "pass"
    row = ask(tmp_path / "b", chosen, "modern-v2")["runner.aux_ids"]
    assert row.status == "fail" and "ignored" in row.found and "top level" in row.fix
