"""The vocab stage from captured rows: what it writes, says and warns of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.capture.rows import Row, row_id, rows_hash, write_rows
from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.recipe import parse_recipe
from draftsmith.record import write_record
from draftsmith.stage import Run, execute
from draftsmith.target.config import target_facts
from draftsmith.ui import QuietUi
from draftsmith.vocab.map import VocabMap
from draftsmith.vocab.stage import STAGE


def captured(tmp_path: Path, target: Path, size: int | None, **sections: Any) -> tuple[Run, QuietUi]:
    """A run whose capture is done: 200 rows of ten tokens."""
    (target / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 8,
                "num_hidden_layers": 8,
                "vocab_size": 320,
            }
        )
    )
    recipe = parse_recipe(
        {
            "out": str(tmp_path),
            "name": "r",
            "target": {"model": str(target)},
            "capture": {"prompts": ["x"]},
            "vocab": {"size": size},
            **sections,
        },
        "t",
    )
    ui = QuietUi()
    run = Run(recipe, recipe.folder, ui)
    folder = run.stage_dir("capture")
    rows = [
        Row(row_id(f"{i:016x}", 0, 0), f"{i:016x}", 0, 0, "s", [1, 7, *range(20 + i % 50, 28 + i % 50), 2], 2, "stop",
            "default", 0.7, 1.0, "m", "")
        for i in range(200)
    ]  # fmt: skip
    write_rows(folder / "rows", rows)
    Contract(target=target_facts(target)).save(folder)
    result = {"output_hash": rows_hash(folder)}
    write_record(folder, stage="capture", key="k", inputs={}, config={}, result=result, started=0.0)
    return run, ui


def test_the_stage_saves_map_and_contract_and_is_deterministic(
    tmp_path: Path, byte_tokenizer: Callable[..., Path]
) -> None:
    run, ui = captured(tmp_path, byte_tokenizer(), 64)
    record = execute(STAGE, run)
    first = (run.stage_dir("vocab") / "vocab.safetensors").read_bytes()
    made = VocabMap.load(run.stage_dir("vocab"))
    contract = Contract.load(run.stage_dir("vocab"))
    assert (contract.draft_vocab_size, contract.vocab_map_hash) == (64, made.hash())
    assert made.t2d[[0, 1, 2, 3, 4]].all()
    assert not made.t2d[7]  # only in prompts
    assert record["result"]["coverage"] == 1.0
    assert record["result"]["filler"] > 0
    assert any("filler" in n for n in ui.notes)
    execute(STAGE, run, force=True)
    assert (run.stage_dir("vocab") / "vocab.safetensors").read_bytes() == first


def test_low_coverage_warns(tmp_path: Path, byte_tokenizer: Callable[..., Path]) -> None:
    run, ui = captured(tmp_path, byte_tokenizer(), 20)
    record = execute(STAGE, run)
    assert record["result"]["coverage"] < 0.9
    assert any("coverage" in w for w in ui.warnings)


def write_start(folder: Path) -> list[int]:
    """A drafter that proposes every fifth token and reads layers 1, 3 and 4; its target ids."""
    import torch
    from tiny_drafters import tiny_config, tiny_drafter

    from draftsmith.dialects import vllm
    from draftsmith.dialects.checkpoint import Checkpoint

    model = tiny_drafter(tiny_config(vocab_size=320, draft_vocab_size=64, aux_layer_ids=[1, 3, 4]))
    ids = torch.arange(0, 320, 5)
    t2d = torch.zeros(320, dtype=torch.bool)
    t2d[ids] = True
    tensors = dict(model.state_dict()) | {"d2t": ids - torch.arange(64), "t2d": t2d}
    vllm.write(Checkpoint(model.config, tensors), folder)
    return ids.tolist()


def test_a_run_that_starts_from_a_drafter_keeps_its_draft_vocab_and_aux_layers(
    tmp_path: Path, byte_tokenizer: Callable[..., Path]
) -> None:
    from draftsmith.extract.stage import settle_contract

    ids = write_start(tmp_path / "start-eagle3")
    start = {"train": {"from": str(tmp_path / "start-eagle3")}}
    run, ui = captured(tmp_path, byte_tokenizer(), None, **start)
    record = execute(STAGE, run)
    made = VocabMap.load(run.stage_dir("vocab"))
    assert made.draft_to_target().tolist() == ids
    answers = [t for i in range(200) for t in (*range(20 + i % 50, 28 + i % 50), 2)]
    assert record["result"]["coverage"] == round(sum(t in ids for t in answers) / len(answers), 6)
    assert any("set vocab.size" in w for w in ui.warnings)  # a fifth of the answers' tokens is covered
    assert settle_contract(run).aux_layer_ids == [1, 3, 4]
    own, _ = captured(tmp_path / "own", byte_tokenizer(), 64, **start, extract={"aux_layers": [0, 2, 5]})
    execute(STAGE, own)
    assert VocabMap.load(own.stage_dir("vocab")).draft_to_target().tolist() != ids
    assert settle_contract(own).aux_layer_ids == [0, 2, 5]


def test_another_targets_drafter_is_refused_before_anything_is_extracted(
    tmp_path: Path, byte_tokenizer: Callable[..., Path]
) -> None:
    write_start(tmp_path / "start-eagle3")
    run, _ = captured(tmp_path, byte_tokenizer(), None, train={"from": str(tmp_path / "start-eagle3")})
    config = json.loads((tmp_path / "start-eagle3" / "config.json").read_text())
    (tmp_path / "start-eagle3" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(UserError, match="300"):
        execute(STAGE, run)
