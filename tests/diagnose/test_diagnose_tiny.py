"""A whole diagnosis on a tiny pair that was really trained (overfitted): faults are named first, the mended drafter drafts as
the good one did, and of the good one nothing is said. The large suite is benchmarks/diagnose_faults.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import overfitted

from draftsmith.contract import Contract
from draftsmith.diagnose import signals
from draftsmith.diagnose.rank import apply, diagnose
from draftsmith.diagnose.replay import Replayer, Score, acceptance
from draftsmith.diagnose.subject import Sampler, SampleRow, Subject
from draftsmith.diagnose.weak import past_its_positions, rope_unlike
from draftsmith.dialects import foreign, vllm
from draftsmith.dialects.checkpoint import Checkpoint
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.states import States
from draftsmith.extract.store import StateWriter
from draftsmith.target.config import target_facts
from draftsmith.target.tokenizer import TargetTokenizer
from draftsmith.target.weights import read_embedding
from draftsmith.ui import QuietUi

Put = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[SampleRow]]:
    """(target, drafter, rows it knows by heart)."""
    root = tmp_path_factory.mktemp("pair")
    target = overfitted.write_target(root / "target", "llama")
    rows = overfitted.answers(target, overfitted.prompts(8), 32)
    drafter = overfitted.overfit(target, rows, root / "drafter-eagle3", steps=90, K=2)
    return target, drafter, Sampler(target).rows(rows, 99, 999)


@pytest.fixture
def spoilt(pair: tuple[Path, Path, list[SampleRow]], tmp_path: Path) -> Callable[..., Subject]:
    """The good pair's files with a fault in them, no contract, as a subject."""
    target, drafter, rows = pair

    def of(put: Put | None = None) -> Subject:
        good = foreign.read(drafter, target_layers=6)
        folder = tmp_path / "drafter-eagle3"
        vllm.write(Checkpoint(good.config, dict(good.tensors)), folder, dtype="float32")
        if put is not None:
            from safetensors.torch import load_file, save_file

            config = json.loads((folder / "config.json").read_text())
            tensors = load_file(folder / "model.safetensors")
            put(config, tensors)
            (folder / "config.json").write_text(json.dumps(config))
            save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        read = foreign.read(folder, aux_meaning="entering", target_layers=6)
        return Subject(folder, target, read, rows, read_embedding(target).float(), 6, 2)

    return of


IDS = "eagle_aux_hidden_state_layer_ids"


def aux_one(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config[IDS] = [1, 4, 5]


def blocks(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    a, b, c = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([c, a, b], dim=1)


def residual(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["norm_before_residual"] = True


def map_off(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    ids = (torch.arange(len(tensors["d2t"])) + tensors["d2t"] + 1).clamp(max=config["vocab_size"] - 1)
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)


def halves(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    H = config["hidden_size"]
    for p in "qkv":
        t = tensors[f"midlayer.self_attn.{p}_proj.weight"]
        tensors[f"midlayer.self_attn.{p}_proj.weight"] = torch.cat([t[:, H:], t[:, :H]], 1)


FAULTS: dict[str, tuple[Put, str, str]] = {
    "an aux id": (aux_one, "aux.one", "[1, 3, 5]"),
    "fc's blocks": (blocks, "aux.order", "[1, 2, 0]"),
    "norm_before_residual": (residual, "norms.switch", "norm_before_residual"),
    "the map": (map_off, "map.shift", "target ids -1"),
    "the halves": (halves, "layout.halves", "[state; embedding]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_true_cause_comes_first_and_is_mended(spoilt: Callable[..., Subject], tmp_path: Path, fault: str) -> None:
    put, cause, words = FAULTS[fault]
    good = acceptance(spoilt().setup(), spoilt().rows, 2).length
    subject = spoilt(put)
    found = diagnose(subject, QuietUi())
    first = found["causes"][0]
    assert first["id"] == cause and words in first["cause"], found["causes"]
    assert first["acceptance_length_before"] < good
    assert first["acceptance_length_after"] == pytest.approx(good, abs=0.02)
    apply(found["_causes"][0], subject, tmp_path / "mended")
    mended = replace(subject, checkpoint=foreign.read(tmp_path / "mended", aux_meaning="entering", target_layers=6))
    assert acceptance(mended.setup(), subject.rows, 2).length == pytest.approx(good, abs=0.02)


def test_nothing_is_said_of_a_good_one(spoilt: Callable[..., Subject]) -> None:
    found = diagnose(spoilt(), QuietUi())
    assert found["causes"] == [] and found["verdict"] == "nothing wrong found"
    assert found["acceptance"]["acceptance_length"] > 2


def test_prompts_are_compared_with_the_template_at_both_ends(spoilt: Callable[..., Subject]) -> None:
    subject = spoilt()
    tokenizer = TargetTokenizer.load(subject.target)
    asked = [tokenizer.render([{"role": "user", "content": f"Name {i} birds."}]) for i in range(4)]
    think, begin = tokenizer.encode("<think>\n"), tokenizer.encode("x")
    for prompts, words in (
        (asked, []),
        ([*asked[:2], *([*ids, *think] for ids in asked[2:])], []),
        ([[*ids, *think] for ids in asked], ["end otherwise"]),
        ([[*begin, *ids] for ids in asked], ["begin otherwise"]),
    ):
        subject.prompts = prompts
        causes = [c.cause for c in signals.template(subject)]
        assert len(causes) == len(words) and all(w in c for w, c in zip(words, causes, strict=True))


def test_a_text_is_continued_as_the_target_would(pair: tuple[Path, Path, list[SampleRow]]) -> None:
    target, _, rows = pair
    row = rows[0]
    known = row.boundary + 12
    assert Sampler(target).continuation(row.token_ids[:known], 4) == row.token_ids[known : known + 4]


def test_a_rope_that_replay_cannot_judge_is_told_last(spoilt: Callable[..., Subject], tmp_path: Path) -> None:
    def barely(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 10001.0

    subject = spoilt(barely)
    found = diagnose(subject, QuietUi())
    assert [c["id"] for c in found["causes"]] == ["rope"] and found["verdict"] == "only weak signs found"
    assert "theta 10001 → theta 10000" in found["causes"][0]["cause"]
    apply(found["_causes"][0], subject, tmp_path / "mended")
    assert foreign.read(tmp_path / "mended", target_layers=6).config.rope["rope_theta"] == 10000.0


def test_a_rope_that_drafts_better_than_the_targets_was_trained(spoilt: Callable[..., Subject]) -> None:
    def other(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 500.0

    subject = spoilt(other)
    replay = Replayer(subject.rows)
    base = replay.score(subject.setup())
    told = list(rope_unlike(subject, replay, Score(base.nll - 5.0, base.row)))
    assert told == [], "with the target's rope it would draft far worse than it does"
    assert [c.id for c in rope_unlike(subject, replay, base)] == ["rope"]


@pytest.mark.parametrize(("positions", "trained", "told"), [(512, None, 0), (40, None, 1), (512, 40, 1), (78, None, 0)])
def test_answers_past_what_the_drafter_was_made_for(
    spoilt: Callable[..., Subject], positions: int, trained: int | None, told: int
) -> None:
    def shorter(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["max_position_embeddings"] = positions

    subject = spoilt(shorter)
    if trained:
        subject.contract = Contract(target=target_facts(subject.target), trained_length=trained)
    subject.answer_spans = [(20, 80)] * 9
    found = list(past_its_positions(subject))
    assert len(found) == told
    if told:
        assert found[0].cause.startswith("67% of the answers' tokens lie beyond the 40 tokens")


def test_states_of_another_layer_are_named(spoilt: Callable[..., Subject], tmp_path: Path) -> None:
    subject = spoilt()
    contract = Contract(target=target_facts(subject.target), aux_layer_ids=[1, 3, 5], final_state="pre_norm")
    with StateWriter(tmp_path / "states", contract, make_codec("bf16")) as writer:
        for row in subject.rows[:4]:
            held = torch.stack([row.streams[k] for k in (1, 4, 5)], 1).to(torch.bfloat16)
            b = row.boundary
            final = row.streams[6][b - 1 :].to(torch.bfloat16)
            ids = torch.as_tensor(row.token_ids)
            writer.add(row.row_id, States(ids, b, held, b - 1, final, row.argmax[b - 1 :]))
    subject.states_folder = tmp_path / "states"
    first = diagnose(subject, QuietUi())["causes"][0]
    assert first["id"] == "data.states" and "aux block 1 holds stream 4, not stream 3" in first["cause"]
