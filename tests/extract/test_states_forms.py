"""Other forms of a store: speculators' folders (bit for bit both ways), other codecs, the command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.contract import Contract
from draftsmith.errors import UserError
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.convert import convert_store
from draftsmith.extract.head import WeightsHead
from draftsmith.extract.speculators import loss_mask, read_speculators, write_speculators
from draftsmith.extract.states import States, TopK
from draftsmith.extract.store import StateStore, StateWriter
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.target.config import target_facts
from draftsmith.ui import QuietUi
from draftsmith.vocab.map import VocabMap

IDS = [1, 3, 5]


def contract(target: Path) -> Contract:
    return Contract(target=target_facts(target), aux_layer_ids=IDS, final_state="pre_norm")


def row(seed: int, tokens: int = 12, boundary: int = 4) -> States:
    g = torch.Generator().manual_seed(seed)
    return States(
        token_ids=torch.randint(0, 96, (tokens,), generator=g),
        boundary=boundary,
        aux=torch.randn(tokens, 3, 32, generator=g).bfloat16(),
        final_start=0,
        final=torch.randn(tokens, 32, generator=g).bfloat16(),
    )


@pytest.fixture
def store(tmp_path: Path, tiny_target: Path) -> Path:
    holes = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    with StateWriter(tmp_path / "store", contract(tiny_target), make_codec("bf16")) as w:
        w.add("a", row(0))
        w.add("several-turns", replace(row(1), boundary=2, answer=holes))
        w.add("b", row(2, tokens=7))
    return tmp_path / "store"


def test_speculators_folder_goes_round_bit_for_bit(tmp_path: Path, store: Path, tiny_target: Path) -> None:
    write_speculators(StateStore.open(store), tmp_path / "spec")
    read_speculators(tmp_path / "spec", tmp_path / "back", contract(tiny_target))
    write_speculators(StateStore.open(tmp_path / "back"), tmp_path / "again")
    for name in ("data-00000-of-00001.arrow", *(f"hidden_states/hs_{i}.safetensors" for i in range(3))):
        assert (tmp_path / "spec" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    for e, f in zip(StateStore.open(store).index, StateStore.open(tmp_path / "back").index, strict=True):
        a, b = StateStore.open(store).read_entry(e), StateStore.open(tmp_path / "back").read_entry(f)
        assert torch.equal(a.aux, b.aux) and torch.equal(a.token_ids, b.token_ids) and a.boundary == b.boundary
        assert a.final is not None and b.final is not None and torch.equal(a.final, b.final)
        assert torch.equal(loss_mask(a), loss_mask(b))


def test_speculators_files_are_in_its_layout(tmp_path: Path, store: Path) -> None:
    write_speculators(StateStore.open(store), tmp_path)
    made, want = load_file(tmp_path / "hidden_states" / "hs_0.safetensors"), row(0)
    assert made["hidden_states"].shape == (12, 4, 32) and made["token_ids"].dtype == torch.int64
    assert torch.equal(made["hidden_states"][:, :-1], want.aux)
    assert want.final is not None and torch.equal(made["hidden_states"][:, -1], want.final)
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["_data_files"] == [{"filename": "data-00000-of-00001.arrow"}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_states": torch.zeros(12, 3, 32, dtype=torch.bfloat16)}, r"shape \[12, 3, 32\], want \[12, 4, 32\]"),
        ({"hidden_states": torch.zeros(12, 4, 32)}, "holds float32"),
        ({"token_ids": torch.zeros(12, dtype=torch.int64)}, "token ids are not those"),
    ],
)
def test_speculators_files_that_would_be_misread_are_refused(
    tmp_path: Path, store: Path, tiny_target: Path, change: dict[str, torch.Tensor], words: str
) -> None:
    write_speculators(StateStore.open(store), tmp_path / "spec")
    path = tmp_path / "spec" / "hidden_states" / "hs_0.safetensors"
    save_file({**load_file(path), **change}, path)
    with pytest.raises(UserError, match=words):
        read_speculators(tmp_path / "spec", tmp_path / "back", contract(tiny_target))


def test_missing_files_are_counted(tmp_path: Path, store: Path, tiny_target: Path) -> None:
    write_speculators(StateStore.open(store), tmp_path / "spec")
    (tmp_path / "spec" / "hidden_states" / "hs_1.safetensors").unlink()
    done = read_speculators(tmp_path / "spec", tmp_path / "back", contract(tiny_target))
    assert done == {"rows": 2, "tokens": 19, "left_out": {"no states were made for the row": 1}}


def test_weights_head_is_the_models_own(tiny_target: Path) -> None:
    model = TransformersStates(tiny_target, IDS)
    (s,) = model.states([list(range(3, 60))], [1])
    assert s.final is not None
    assert torch.equal(WeightsHead(tiny_target).tops(s.final), model.tops(s.final))
    assert torch.equal(WeightsHead(tiny_target).tops(s.final, 0), model.tops(s.final, 0))


def test_converted_to_topk_the_teacher_is_the_targets(tmp_path: Path, store: Path, tiny_target: Path) -> None:
    ids = torch.tensor([0, 2, 3, 50, 95])
    t2d = torch.zeros(96, dtype=torch.bool)
    t2d[ids] = True
    VocabMap((ids - torch.arange(5)).numpy(), t2d.numpy()).save(tmp_path / "vocab")
    done = convert_store(
        store, tmp_path / "small", "fp8-topk", QuietUi(), vocab=tmp_path / "vocab", model=tiny_target, topk=2
    )
    assert done["rows"] == 3 and done["bytes"] < done["bytes_before"]
    small = StateStore.open(tmp_path / "small")
    assert small.verify() == [] and small.contract.draft_vocab_size == 5
    teacher, want = small.read("a").teacher(), row(0)
    assert isinstance(teacher, TopK) and want.final is not None
    logits = WeightsHead(tiny_target, ids).topk(want.final, 5)
    full = torch.log_softmax(torch.zeros(12, 5).scatter(1, logits.ids, logits.logits), -1)
    got = teacher.logits - teacher.log_total().unsqueeze(1)
    torch.testing.assert_close(got, full.gather(1, teacher.ids), rtol=1e-2, atol=1e-2)
    assert torch.equal(small.read("several-turns").answer, StateStore.open(store).read("several-turns").answer)
    with pytest.raises(UserError, match="needs the draft vocab"):
        convert_store(store, tmp_path / "x", "fp8-topk", QuietUi())


def test_the_commands(tmp_path: Path, store: Path, tiny_target: Path) -> None:
    run = CliRunner()

    def go(*args: object) -> tuple[int, str]:
        result = run.invoke(app, ["states", *map(str, args)])
        return result.exit_code, result.stdout

    code, text = go("verify", store, "--json")
    assert code == 0 and json.loads(text) == {"ok": True, "rows": 3, "tokens": 31, "problems": []}
    assert json.loads(go("show", store, "--json")[1])["bytes_per_token"] == round(StateStore.open(store).bytes / 31)
    assert json.loads(go("show", store, "--row", "b", "--json")[1])["aux_shape"] == [7, 3, 32]
    assert go("convert", store, tmp_path / "fp8", "--codec", "fp8")[0] == 0
    assert go("export", store, tmp_path / "spec")[0] == 0
    imported = go("import", tmp_path / "spec", tmp_path / "in", "--model", tiny_target, "--aux-layers", "1,3,5")
    assert imported[0] == 0 and "3 rows" in imported[1]
    shard = tmp_path / "fp8" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    code, text = go("verify", tmp_path / "fp8")
    assert code == 1 and "damaged" in text


def test_an_exported_folder_says_its_layers_itself(tmp_path: Path, store: Path, tiny_target: Path) -> None:
    """Without --aux-layers the default would be taken for the layers that are there."""

    def go(*words: object) -> Any:
        return CliRunner().invoke(app, ["states", *map(str, words)])

    assert go("export", store, tmp_path / "spec").exit_code == 0
    assert go("import", tmp_path / "spec", tmp_path / "in", "--model", tiny_target).exit_code == 0
    assert Contract.load(tmp_path / "in").aux_layer_ids == IDS
    other = go("import", tmp_path / "spec", tmp_path / "x", "--model", tiny_target, "--aux-layers", "2,4,5")
    assert isinstance(other.exception, UserError) and "aux_layer_ids" in other.exception.what
    assert not (tmp_path / "x").exists()
