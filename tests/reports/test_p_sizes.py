"""P12–P15: widths and vocabularies that pass config creation and fail, or accept nothing, later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_pair as tp
from asked import ask
from mutant_case import Case
from mutants_form import wider_without_embedding, wider_without_target_hidden_size
from tiny_pair import bf16


def test_p12_a_narrower_or_wider_drafter_needs_two_things(tmp_path: Path) -> None:
    """vllm#17957, #19174: target_hidden_size and a table of its own; with both it works."""
    rows = ask(tmp_path / "a", wider_without_target_hidden_size)
    assert rows["pair.hidden"].status == "fail" and "target_hidden_size: 128" in rows["pair.hidden"].fix
    assert "target_hidden_size: 128" in rows["form.fc"].fix
    assert ask(tmp_path / "b", wider_without_embedding)["pair.embedding"].status == "fail"

    def both(case: Case) -> None:
        wider_without_embedding(case)
        case.t["embed_tokens.weight"] = bf16(np.ones((tp.VOCAB, 192)))

    rows = ask(tmp_path / "c", both)
    assert {rows[i].status for i in ("pair.hidden", "pair.embedding", "form.fc", "form.sizes")} == {"pass"}


@pytest.mark.parametrize("size", [500, 600])
def test_p13_vocab_size_must_be_the_targets(tmp_path: Path, size: int) -> None:
    """speculators#188; 500 dies with IndexError, 600 runs and accepts nothing."""
    row = ask(tmp_path, lambda c: c.c.update(vocab_size=size))["pair.vocab"]
    assert row.status == "fail" and f"{size:,}" in row.found and "512" in row.found


def test_p13_the_usual_slip_is_named(tmp_path: Path) -> None:
    row = ask(tmp_path, lambda c: c.c.update(vocab_size=tp.DRAFT_VOCAB, draft_vocab_size=None))["pair.vocab"]
    assert "vocab_size: 512 and draft_vocab_size: 96" in row.fix


@pytest.mark.parametrize("size", [0, -1, 4096])
def test_p14_draft_vocab_size_is_positive_and_not_larger_than_the_targets(tmp_path: Path, size: int) -> None:
    """SpecForge#76, Automodel#2260 (0 and -1 accepted, silently trained)."""
    row = ask(tmp_path, lambda c: c.c.update(draft_vocab_size=size))["form.draft_vocab"]
    assert row.status == "fail"


def test_p15_a_reduced_vocabulary_needs_a_real_map(tmp_path: Path) -> None:
    """verl-SpeCo#66: the default "ids 0..N-1" trains and looks normal."""
    row = ask(tmp_path / "a", lambda c: (c.t.pop("d2t"), c.t.pop("t2d")))["form.map"]
    assert row.status == "fail" and "silently" in row.found

    def no_eos(case: Case) -> None:
        case.pair.target_config["eos_token_id"] = [509, 510]

    row = ask(tmp_path / "b", no_eos)["pair.eos"]
    assert row.status == "warn" and "509, 510" in row.found
