"""The self-check passes right states and names what is wrong with wrong ones."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.extract.checks import compare
from draftsmith.extract.self_check import (
    Reference,
    Report,
    agreement,
    collect_engine_tops,
    leave_references,
    load_references,
    require,
)
from draftsmith.extract.states import States
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.record import write_json
from draftsmith.target.config import target_facts
from draftsmith.ui import QuietUi

IDS = [1, 3, 5]
G = torch.Generator().manual_seed(0)
ROWS = [torch.randint(3, 96, (n,), generator=G).tolist() for n in (40, 25)]


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> TransformersStates:
    return TransformersStates(tiny_target, IDS)


@pytest.fixture
def references(model: TransformersStates) -> list[Reference]:
    return [Reference(f"r{i}", r, 5, [-1, *model.own_tops(r)[:-1]], "test") for i, r in enumerate(ROWS)]


def check(model: TransformersStates, made: list[States], references: list[Reference], folder: Path) -> Report:
    contract = Contract(target=target_facts(folder), aux_layer_ids=IDS, final_state="pre_norm")
    return compare(made, references, model, contract, 0.95)


def good(model: TransformersStates) -> list[States]:
    return model.states(ROWS, [5, 5])


def shifted(s: States, by: int) -> States:
    assert s.final is not None
    return replace(s, aux=s.aux.roll(by, 0), final=s.final.roll(by, 0))


def test_right_states_pass(model: TransformersStates, references: list[Reference], tiny_target: Path) -> None:
    report = check(model, good(model), references, tiny_target)
    assert report.problems == [] and report.agreement is not None and report.agreement >= 0.95
    assert report.positions == 35 + 20 and set(report.aux) == set(IDS)
    require(report, 0.95)


def test_an_aux_layer_off_by_one_is_named(
    model: TransformersStates, references: list[Reference], tiny_target: Path
) -> None:
    wrong = TransformersStates(tiny_target, [0, 2, 4]).states(ROWS, [5, 5])
    report = check(model, wrong, references, tiny_target)
    assert [p.split(": ", 1)[1] for p in report.problems if p.startswith("aux id 3")] == [
        "layer: it is the stream entering layer 2"
    ]
    with pytest.raises(UserError, match="self-check of the hidden states failed: aux id 1") as e:
        require(report, 0.95)
    assert e.value.code == 1


@pytest.mark.parametrize(("by", "word"), [(1, "too late"), (-1, "too early")])
def test_a_shifted_row_is_an_alignment_fault(
    model: TransformersStates, references: list[Reference], tiny_target: Path, by: int, word: str
) -> None:
    report = check(model, [shifted(s, by) for s in good(model)], references, tiny_target)
    text = "; ".join(report.problems)
    # aux rows roll by one, so all but the wrapped position fit one position off: reported for aux and final alike
    assert "alignment" in text and word in text
    assert report.agreement is not None and report.agreement < 0.5


def test_a_normed_final_state_is_a_norm_fault(
    model: TransformersStates, references: list[Reference], tiny_target: Path
) -> None:
    made = [replace(s, final=model.parts.norm(s.final.float()).bfloat16()) for s in good(model) if s.final is not None]
    report = check(model, made, references, tiny_target)
    assert len(report.problems) == 1 and "norm: the final norm is applied already" in report.problems[0]


def test_the_final_state_of_a_layer_too_early_is_a_layer_fault(
    model: TransformersStates, references: list[Reference], tiny_target: Path
) -> None:
    early = TransformersStates(tiny_target, [5]).states(ROWS, [5, 5])
    made = [replace(s, final=e.aux[4:, 0]) for s, e in zip(good(model), early, strict=True)]
    report = check(model, made, references, tiny_target)
    assert len(report.problems) == 1 and "layer: it is the stream entering layer 5" in report.problems[0]


def test_noise_is_said_to_be_inexplicable(
    model: TransformersStates, references: list[Reference], tiny_target: Path
) -> None:
    made = [
        replace(s, final=torch.randn(s.tokens - 4, 32).bfloat16(), aux=torch.randn_like(s.aux)) for s in good(model)
    ]
    report = check(model, made, references, tiny_target)
    assert "neither layer, norm nor alignment" in report.problems[-1]
    assert "neither a neighbouring layer nor a shift" in report.problems[0]


def test_the_engines_tops_are_collected_and_loaded(tmp_path: Path) -> None:
    class Client:
        async def model(self) -> str:
            return "m"

        async def prompt_logprobs(self, token_ids: Sequence[int], top: int = 1) -> list[list[tuple[int, float]]]:
            return [[], *([(t + 1, -0.1)] for t in token_ids[1:])]

    row = SimpleNamespace(row_id="a", token_ids=[7, 8, 9], boundary=1)
    found = asyncio.run(collect_engine_tops(Client(), [row]))
    write_json(tmp_path / "self_check.json", found)
    (reference,) = load_references(tmp_path)
    assert reference.top == [-1, 9, 10] and reference.source == "the engine's prompt logprobs"
    assert load_references(tmp_path / "none") == []


def test_a_tie_within_rounding_is_not_compared() -> None:
    """bf16 turns two equally likely tokens round; that says nothing about layer, norm or alignment."""

    class Client:
        async def model(self) -> str:
            return "m"

        async def prompt_logprobs(self, token_ids: Sequence[int], top: int = 1) -> list[list[tuple[int, float]]]:
            second = [-0.2, -0.5, -0.2]  # near, far, near
            return [[], *([(t, -0.1), (t + 50, b)] for t, b in zip(token_ids[1:], second, strict=True))]

    row = SimpleNamespace(row_id="a", token_ids=[7, 8, 9, 10], boundary=1)
    (found,) = asyncio.run(collect_engine_tops(Client(), [row]))["rows"]
    assert found["tied"] == [-1, 58, -1, 60]
    reference = Reference("a", row.token_ids, 1, found["top"], "test", found["tied"])
    assert agreement(torch.tensor([8, 9, 10]), 0, reference) == (3, 3)
    assert agreement(torch.tensor([58, 59, 60]), 0, reference) == (0, 1)  # the far one is a true difference
    assert agreement(torch.tensor([9, 10]), 0, reference) == (0, 2)  # one late: no tie
    assert reference.cut(2).tied == [-1, 58]


def test_a_server_without_prompt_logprobs_is_a_warning(tmp_path: Path) -> None:
    rows = [SimpleNamespace(row_id="a", token_ids=list(range(40)), boundary=10)]
    ui = QuietUi()
    leave_references(tmp_path, "http://127.0.0.1:9", "m", None, rows, 2, ui)  # port 9: nobody listens
    assert "no prompt logprobs" in ui.warnings[0] and load_references(tmp_path) == []
    leave_references(
        tmp_path, "http://127.0.0.1:9", "m", None, [SimpleNamespace(**vars(rows[0]) | {"boundary": 39})], 2, ui
    )
    assert len(ui.warnings) == 1  # no row with enough of an answer: nothing is asked
