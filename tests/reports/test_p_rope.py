"""P20–P25: positions, rope in four spellings, mrope, nulls, norm switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pair as tp
from asked import ask
from mutant_case import Case, to_speculators
from tiny_pair import bf16

from draftsmith.check.rope import Rope, read_rope


@pytest.mark.parametrize(("engine", "status"), [("old", "fail"), ("middle", "fail"), ("modern-v1", "warn")])
def test_p20_too_few_positions(tmp_path: Path, engine: str, status: str) -> None:
    """vllm#48894: before the fix an index error or garbage past 2048; after it, nothing past 2048 was trained."""
    row = ask(tmp_path, lambda c: c.c.update(max_position_embeddings=128), engine)["pair.positions"]
    assert row.status == status and "128" in row.found and "512" in row.found


def test_p20_a_shorter_serving_length_is_fine(tmp_path: Path) -> None:
    def change(case: Case) -> None:
        case.c["max_position_embeddings"] = 128
        case.options["max_model_len"] = 128

    assert ask(tmp_path, change, "old")["pair.positions"].status == "pass"


def test_p21_another_rope_than_the_targets_is_a_warning(tmp_path: Path) -> None:
    """TorchSpec#54 (null and 1e6 for yarn 64 and 5e4), speculators#555: legal, and never compared by an engine."""

    def change(case: Case) -> None:
        case.pair.target_config |= {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 64.0}}
        case.c["rope_theta"], case.c["rope_scaling"] = 1e6, None
        del case.c["rope_parameters"]

    row = ask(tmp_path, change)["pair.rope"]
    assert row.status == "warn" and "yarn" in row.found and "1e+06" in row.found


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 64}},
        {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", "factor": 64.0}},
        {"rope_parameters": {"rope_theta": 5e4, "rope_type": "yarn", "factor": 64.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 64.0}, "rope_theta": 50000},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e4, "rope_type": "yarn", "factor": 64.0}}},
    ],
)
def test_p22_one_reader_for_all_spellings(config: dict[str, Any]) -> None:
    """SpecForge#702, #502, speculators#649."""
    rope = read_rope(config)
    assert isinstance(rope, Rope)
    assert (rope.theta, rope.kind, dict(rope.extra)) == (5e4, "yarn", {"factor": 64.0})


def test_p22_nothing_written_is_ten_thousand_and_says_so() -> None:
    rope = read_rope({})
    assert isinstance(rope, Rope) and rope.theta == 1e4 and not rope.written and "by default" in str(rope)
    assert isinstance(read_rope({"rope_scaling": None, "rope_theta": 1e4, "rope_parameters": None}), Rope)


def test_p22_one_rope_per_layer_type_cannot_be_a_drafters(tmp_path: Path) -> None:
    def change(case: Case) -> None:
        case.c["rope_parameters"] = {
            "full_attention": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 64.0},
            "sliding_attention": {"rope_theta": 1e4},
        }

    assert ask(tmp_path, change)["form.rope"].status == "fail"


def test_p23_mrope_keys_on_a_text_only_target(tmp_path: Path) -> None:
    """speculators#598, sglang#34152."""
    row = ask(tmp_path, lambda c: c.c.update(rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]}))["form.mrope"]
    assert row.status == "warn" and "mrope_section" in row.fix


@pytest.mark.parametrize("key", ["use_cache", "tie_word_embeddings", "attention_bias"])
def test_p24_a_null_where_a_bool_is_expected(tmp_path: Path, key: str) -> None:
    """ModelOpt#1417, the last step of a whole pipeline."""
    row = ask(tmp_path, lambda c: c.c.update({key: None}))["form.config"]
    assert row.status == "fail" and key in row.found


def test_p24_nulls_that_mean_absent_are_fine(tmp_path: Path) -> None:
    row = ask(tmp_path, lambda c: c.c.update(rope_scaling=None, pad_token_id=None, fc_norm=None))["form.config"]
    assert row.status == "pass"


def test_p25_switches_are_tied_to_tensors(tmp_path: Path) -> None:
    """vllm#38111, #46488: input_norm without its switch is dropped, fc_norm without its switch raises."""
    norm = bf16(np.full(3 * tp.HIDDEN, 0.5))
    rows = ask(tmp_path / "a", lambda c: c.t.update({"input_norm.weight": norm}))
    assert rows["silence.input_norm"].status == "fail"
    rows = ask(tmp_path / "b", lambda c: c.t.update({"fc_norm.0.weight": norm[: tp.HIDDEN]}))
    assert rows["form.norms"].status == "fail"

    def both(case: Case) -> None:
        case.t["input_norm.weight"] = norm
        case.c["norm_before_fc"] = True

    rows = ask(tmp_path / "c", both)
    assert rows["form.norms"].status == rows["silence.input_norm"].status == rows["silence.switches"].status == "pass"
    assert ask(tmp_path / "d", both, "old")["silence.switches"].status == "fail"


def test_p25_a_default_that_differs_by_format(tmp_path: Path) -> None:
    """speculators#297: absent means True for the engine, False for speculators, False in every other format."""
    assert ask(tmp_path / "a", lambda c: c.c.pop("norm_before_residual"))["silence.residual"].status == "pass"

    def spec(case: Case) -> None:
        to_speculators(case)
        del case.c["norm_before_residual"]

    assert ask(tmp_path / "b", spec)["silence.residual"].status == "warn"
