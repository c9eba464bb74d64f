"""Configs that no library could read, or would read as something else: refused in words, or undecided, never a yes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asked import ask, ask_verdict
from mutant_case import Case

from draftsmith.errors import UserError


def rewritten(change: Callable[[str], bytes]) -> Callable[[Case], None]:
    def later(target: Path, drafter: Path) -> None:
        path = drafter / "config.json"
        path.write_bytes(change(path.read_text()))

    return lambda case: case.after.append(later)


@pytest.mark.parametrize("change", [
    lambda text: b"\xef\xbb\xbf" + text.encode(),
    lambda text: text.encode("utf-16"),
    lambda text: text.encode().replace(b"llama", b"ll\xe4ma"),
    lambda text: b"[]",
    lambda text: b"",
    lambda text: text.encode()[:-3],
])  # fmt: skip
def test_a_config_that_transformers_cannot_read_is_bad_input(tmp_path: Path, change: Callable[[str], bytes]) -> None:
    with pytest.raises(UserError, match=r"not JSON|object"):
        ask(tmp_path, rewritten(change))


@pytest.mark.parametrize(("key", "value", "check"), [
    ("torch_dtype", "float17", "form.config"),
    ("dtype", 16, "form.config"),
    ("hidden_act", None, "form.activation"),
    ("hidden_act", ["silu"], "form.activation"),
    ("model_type", 3, "form.model_type"),
    ("model_type", "", "form.model_type"),
    ("layer_types", ["sliding_attention"], "silence.window"),
    ("eagle_aux_hidden_state_layer_ids", [-1, 4, 6], "form.aux_ids"),
])  # fmt: skip
def test_a_value_of_no_use_is_named(tmp_path: Path, key: str, value: Any, check: str) -> None:
    row = ask(tmp_path, lambda c: c.c.update({key: value}))[check]
    assert row.status == "fail" and row.fix
    shown = "-1" if key.startswith("eagle") else "sliding_window" if key == "layer_types" else repr(value)
    assert shown in row.found


@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16", "auto", None])
def test_types_that_torch_has_pass(tmp_path: Path, value: str | None) -> None:
    assert ask(tmp_path, lambda c: c.c.update(torch_dtype=value))["form.config"].status == "pass"


def test_a_target_without_its_number_of_layers_is_undecided(tmp_path: Path) -> None:
    verdict = ask_verdict(tmp_path, lambda c: c.pair.target_config.pop("num_hidden_layers"))
    assert verdict.verdict == "unknown"
    row = next(r for r in verdict.checks if r.id == "form.aux_ids")
    assert row.status == "skip" and "number of layers" in row.found


def test_a_mixture_of_two_spellings_names_both(tmp_path: Path) -> None:
    row = ask(tmp_path, lambda c: c.t.update({"midlayer.hidden_norm.weight": c.t["layers.0.hidden_norm.weight"]}))
    assert row["form.names"].status == "fail"
    for name in ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"):
        assert name in row["form.names"].found


def test_an_engine_without_its_transformers_does_not_guess_at_types(tmp_path: Path) -> None:
    from engine_tree import write_engine
    from mutant_case import good_case

    from draftsmith.check.run import check_pair

    site = write_engine(tmp_path / "engine", "modern-v1")
    table = site / "transformers/models/auto/configuration_auto.py"
    case = good_case(tmp_path / "scratch", with_contract=False)
    case.c["model_type"] = "something_new"
    target, drafter = case.write(tmp_path / "pair")

    def row() -> Any:
        return next(r for r in check_pair(str(target), str(drafter), str(site)).checks if r.id == "form.model_type")

    assert row().status == "fail"
    table.write_text(json.dumps({"something_new": "X"}) + "\nCONFIG_MAPPING_NAMES = 1\n")
    assert row().status == "pass"
    table.unlink()
    assert row().status == "pass" and "not looked up" in row().found
