"""The extract stage on a tiny target: stored, checked, resumed, refused."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from extract_support import make_run, some_rows

from draftsmith.capture.rows import Row
from draftsmith.errors import UserError
from draftsmith.extract.source import LiveStates, open_states
from draftsmith.extract.stage import STAGE
from draftsmith.extract.store import Prepared, StateStore, StateWriter
from draftsmith.record import read_json, write_json
from draftsmith.stage import execute


def test_states_are_stored_checked_and_reported(tmp_path: Path, tiny_target: Path) -> None:
    rows = some_rows(20)
    run = make_run(tmp_path, tiny_target, rows)
    result = execute(STAGE, run)["result"]
    store = open_states(run)
    assert isinstance(store, StateStore) and store.verify() == []
    assert {e.row_id for e in store.index} == {r.row_id for r in rows}
    assert result["tokens"] == sum(len(r.token_ids) for r in rows) == store.tokens
    assert store.contract.aux_layer_ids == [1, 3, 5] and store.contract.final_state == "pre_norm"
    check = result["self_check"]
    assert check["final_agreement"] == 1.0 and check["problems"] == []
    assert "transformers' own logits" in check["reference"]
    assert execute(STAGE, run)["skipped"]
    row = rows[3]
    assert store.read(row.row_id).token_ids.tolist() == row.token_ids


def test_the_engines_tokens_are_the_reference_where_capture_left_them(tmp_path: Path, tiny_target: Path) -> None:
    run = make_run(tmp_path, tiny_target, rows := some_rows(5))
    wrong = [{"row_id": r.row_id, "boundary": 4, "token_ids": r.token_ids, "top": [1] * len(r.token_ids)} for r in rows]
    write_json(tmp_path / "capture" / "self_check.json", {"model": "m", "rows": wrong})
    with pytest.raises(
        UserError, match=r"final state gives the most likely token at .*% of positions only: neither"
    ) as e:
        execute(STAGE, run)
    assert e.value.code == 1 and not list((tmp_path / "extract").glob("shard*"))


def test_long_rows_are_cut_and_hopeless_ones_left_out(tmp_path: Path, tiny_target: Path) -> None:
    rows = some_rows(6)
    rows.append(Row("empty-0-0", "empty", 0, 0, "t", [3, 4, 5], 3, "stop", "default", 0.7, 1.0, "m", ""))
    rows.append(Row("long-0-0", "long", 0, 0, "t", [5] * 40, 30, "stop", "default", 0.7, 1.0, "m", ""))
    run = make_run(tmp_path, tiny_target, rows, max_length=20)
    result = execute(STAGE, run)["result"]
    cut = sum(len(r.token_ids) > 20 for r in rows[:6])
    assert result["left_out"] == {"cut": cut, "no answer tokens": 1, "prompt longer than max_length": 1}
    assert max(e.tokens for e in StateStore.open(tmp_path / "extract").index) == 20
    with pytest.raises(UserError, match="no row is left"):
        execute(STAGE, make_run(tmp_path, tiny_target, rows, max_length=3))


def test_a_full_disk_is_foreseen(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.extract.stage.free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"states will take .* GB .*, the disk under") as e:
        execute(STAGE, make_run(tmp_path, tiny_target, some_rows(5)))
    assert "fp8" in e.value.fix


def test_killed_and_started_again_the_bytes_are_the_same(tmp_path: Path, tiny_target: Path) -> None:
    rows = some_rows(30)
    whole = make_run(tmp_path / "whole", tiny_target, rows)
    execute(STAGE, whole)
    cut = make_run(tmp_path / "cut", tiny_target, rows)
    torch.set_num_threads(1)  # a forked child must not wait for threads that it does not have
    if (child := os.fork()) == 0:
        put, seen = StateWriter.put, []

        def die_in_the_middle_of_a_batch(writer: StateWriter, row: Prepared) -> None:
            seen.append(1)
            if len(seen) == 17:
                os.kill(os.getpid(), signal.SIGKILL)
            put(writer, row)

        StateWriter.put = die_in_the_middle_of_a_batch  # type: ignore[method-assign]
        execute(STAGE, cut)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert (tmp_path / "cut" / "extract" / ".shard-00000.part").stat().st_size > 0
    record = execute(STAGE, cut)
    want = read_json(tmp_path / "whole" / "extract" / "run.json")
    assert record["result"]["output_hash"] == want["result"]["output_hash"]
    name = "shard-00000.safetensors"
    assert (tmp_path / "cut/extract" / name).read_bytes() == (tmp_path / "whole/extract" / name).read_bytes()


def test_never_stored_states_read_like_stored_ones(tmp_path: Path, tiny_target: Path) -> None:
    rows = some_rows(12)
    stored, live = (make_run(tmp_path / k, tiny_target, rows, keep=k) for k in ("keep", "never"))
    execute(STAGE, stored)
    assert execute(STAGE, live)["result"]["bytes"] == 0
    a, b = open_states(stored), open_states(live)
    assert isinstance(b, LiveStates) and not list((tmp_path / "never/extract").glob("*.safetensors"))
    assert {e.row_id: (e.tokens, e.boundary, e.final_start) for e in a.index} == {
        e.row_id: (e.tokens, e.boundary, e.final_start) for e in b.index
    }
    order = [r.row_id for r in reversed(rows)]
    got = list(b.read_many(order))
    assert [i for i, _ in got] == order
    for (row_id, x), (_, y) in zip(got, a.read_many(order), strict=True):
        torch.testing.assert_close(x.aux.float(), y.aux.float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(b.read(row_id).final, y.final, rtol=2e-2, atol=2e-2)
        assert torch.equal(x.token_ids, y.token_ids)


def test_aux_layers_that_the_target_lacks_are_refused(tmp_path: Path, tiny_target: Path) -> None:
    run = make_run(tmp_path, tiny_target, some_rows(3), aux_layers=[1, 3, 99])
    with pytest.raises(UserError, match=r"aux layers .* for a target of 6 layers"):
        execute(STAGE, run)


def test_greedy_answers_that_this_target_would_not_give_stop_it(
    tmp_path: Path, build_target: Callable[..., Path]
) -> None:
    target = build_target(tmp_path / "qwen3", "qwen3")
    run = make_run(tmp_path, target, some_rows(4, temperature=0.0))
    with pytest.raises(UserError, match="self-check") as e:
        execute(STAGE, run)
    assert "neither layer, norm nor alignment" in e.value.what
