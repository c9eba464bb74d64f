"""Capture with the target in this process, where no vLLM exists: the same rows whatever is batched with whom."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from capture_support import make_run, write_prompts

from draftsmith.capture.local import LocalTarget, Wanted, choose_tokens
from draftsmith.capture.rows import iter_rows
from draftsmith.capture.stage import STAGE
from draftsmith.stage import execute


@pytest.fixture
def target(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama(vocab_size=320)


def wanted(ids: list[int], temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> Wanted:
    return Wanted(ids, 12, temperature, top_p, seed)


def test_padding_changes_nothing(target: Path) -> None:
    local = LocalTarget(target)
    local.model.float()
    asked = [wanted([1, 40, 41]), wanted([1, *range(50, 90)]), wanted([7], 0.8, seed=3)]
    together = local.answer(asked)
    assert together == [local.answer([w])[0] for w in asked]
    assert all(0 < len(a) <= 12 for a in together)


def test_a_batch_tells_how_far_it_is(target: Path) -> None:
    told: list[str] = []
    answers = LocalTarget(target).answer([wanted([1, 40, 41]), wanted([7])], told.append)
    assert told[0] == "2 tokens of 2 answers in the making"
    assert len(told) == max(map(len, answers)) - 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes the files' own type")
@pytest.mark.parametrize(("asked", "has_bf16", "got"), [
    ("auto", False, torch.float32), ("auto", True, torch.bfloat16), ("float32", True, torch.float32),
])  # fmt: skip
def test_a_cpu_computes_in_the_type_that_it_multiplies(
    target: Path, monkeypatch: pytest.MonkeyPatch, asked: str, has_bf16: bool, got: torch.dtype
) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    monkeypatch.setattr("draftsmith.engine.server.multiplies_bf16", lambda: has_bf16)
    assert LocalTarget(target, dtype=asked).model.dtype == got


def test_greedy_is_what_transformers_says(target: Path) -> None:
    local = LocalTarget(target)
    prompt = [1, 40, 41]
    out = local.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=[0, 2])
    assert local.answer([wanted(prompt)])[0] == out[0, 3:].tolist()


def test_sampling_follows_the_distribution_and_its_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    generator = torch.Generator().manual_seed(0)
    n = 4000
    drawn = torch.tensor([int(choose_tokens(logits, [wanted([], 1.0)], [generator])) for _ in range(n)])
    assert (drawn.bincount(minlength=3) / n).tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
    kept = {int(choose_tokens(logits, [wanted([], 1.0, 0.7)], [generator])) for _ in range(300)}
    assert kept == {0, 1}
    assert int(choose_tokens(logits, [wanted([])], [generator])) == 0


def test_the_stage_runs_without_an_engine(tmp_path: Path, target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [f"n{i}" * (i + 1) for i in range(9)])
    run = make_run(tmp_path, target, [str(prompts)], [], max_tokens=6, concurrency=4)
    run.recipe.engine.path = "reference"
    result = execute(STAGE, run)["result"]
    rows = list(iter_rows(run.stage_dir("capture")))
    assert len(rows) + sum(result["answers_given_up"].values()) == 9
    assert len(rows) >= 5
    assert {r.server_model for r in rows} == {"transformers"}
    assert all(len(r.token_ids) - r.boundary <= 6 for r in rows)
