"""Records of every form become prompts; what cannot is counted by reason, and an unknown role is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.capture.plan import plan_prompts, summary
from draftsmith.capture.prompts import Dropped, Prompt, Rules, load_prompts, read_record
from draftsmith.capture.sources import open_source, split_spec
from draftsmith.errors import UserError

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def read(record: Any, rules: Rules | None = None) -> Prompt | Dropped:
    return read_record(record, "s", rules or Rules(), "f.jsonl:1")


@pytest.mark.parametrize(
    "record",
    [
        "hi",
        {"prompt": "hi"},
        {"prompt": [U]},
        {"question": "hi", "answer": "no"},
        {"instruction": "hi", "input": "", "output": "x"},
        {"messages": [U]},
        {"messages": [{"role": "human", "content": [{"type": "text", "text": "hi"}]}]},
        {"conversations": [{"from": "human", "value": "hi"}]},
        {"turns": ["hi"]},
    ],
)
def test_every_form_gives_the_same_prompt(record: Any) -> None:
    found = read(record)
    assert isinstance(found, Prompt)
    assert found.messages == [U]
    assert found.prompt_id == read("hi").prompt_id  # type: ignore[union-attr]


def test_points_are_where_the_target_speaks() -> None:
    assert read({"turns": ["a", "b"]}).points == [1, 3]  # type: ignore[union-attr]
    assert read({"messages": [U, A]}).points == [1]  # type: ignore[union-attr]
    assert read({"messages": [U, A, U]}).points == [1, 3]  # type: ignore[union-attr]
    assert read({"messages": [U, A, U]}, Rules(first_turn=True)).points == [1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": [A, U]}, "starts with the assistant"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
        ({"messages": []}, "no user turn"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty first turn"),
        ({"messages": [{"role": "user", "content": None}]}, "empty first turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "has images"),
        ({"image": "a.png", "prompt": "hi"}, "has images"),
        ({"image": ["a.png"], "prompt": "hi"}, "has images"),
        ({"foo": 1}, "no messages and no prompt"),
        (7, "record is a int"),
    ],
)
def test_unusable_records_have_a_reason(record: Any, reason: str) -> None:
    assert read(record) == Dropped(reason)


def test_an_unknown_role_is_refused_by_name_unless_told() -> None:
    record = {"messages": [U, {"role": "laguna_s", "content": "x"}]}
    with pytest.raises(UserError, match="'laguna_s'") as e:
        read(record)
    assert "--assistant-role laguna_s" in e.value.fix
    found = read(record, Rules(assistant_role="laguna_s"))
    assert isinstance(found, Prompt)
    assert found.messages[1]["role"] == "assistant"


def test_files_of_every_kind(tmp_path: Path) -> None:
    records = [{"prompt": f"p{i}"} for i in range(700)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "b.json").write_text(json.dumps(records, indent=2))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_text("".join(f"p{i}\n" for i in range(700)))
    texts = [[p.messages for p in load_prompts(str(tmp_path / n))] for n in ("a.jsonl", "b.json", "c.parquet", "d.txt")]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert len(load_prompts(f"{tmp_path / 'b.json'}:10")) == 10


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "line 1"),
        ("a.json", b'[{"prompt": "a"}, {"prompt": "b"', "record 2"),
        ("a.json", b'[{"prompt": "a"}, 7x]', "record 3"),
        ("a.parquet", b"no parquet", "record 1"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, name: str, text: bytes, where: str) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(UserError, match=where):
        plan_prompts([str(tmp_path / name)], [], 0, Rules(), 0.5)


def test_specs(tmp_path: Path) -> None:
    assert split_spec("mt_bench:40") == ("mt_bench", 40)
    assert split_spec("C:/x/y.jsonl") == ("C:/x/y.jsonl", None)
    for bad in ("mt_bench:0", "mt_bench:x"):
        with pytest.raises(UserError, match="no count"):
            split_spec(bad)
    with pytest.raises(UserError) as e:
        open_source("mtbench")
    assert "'mt_bench'" in e.value.fix


def write(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return str(path)


def test_held_out_duplicates_and_count(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [f"q{i}" for i in range(50)] + ["q3", "  HELD\n Out "])
    b = write(tmp_path / "b.jsonl", ["q7", "b1", "b2"])
    held = write(tmp_path / "h.jsonl", ["held out"])
    plan = plan_prompts([f"{a}:20", b], [held], 1, Rules(), 0.5)
    assert plan.dropped == {"duplicate": 2, "not chosen (COUNT)": 30, "held out": 1}
    chosen = [p.messages[0]["content"] for p in plan]
    assert len(chosen) == plan.total == 22
    assert chosen[-2:] == ["b1", "b2"]
    assert [int(p.prompt_id, 16) for p in plan] == plan.hashes.tolist()
    again = plan_prompts([f"{a}:20", b], [held], 1, Rules(), 0.5)
    other = plan_prompts([f"{a}:20", b], [held], 2, Rules(), 0.5)
    assert [p.prompt_id for p in again] == [p.prompt_id for p in plan] != [p.prompt_id for p in other]


def test_too_many_losses_stop_with_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": [A, U]}) + "\n" for _ in range(6)) + json.dumps({"messages": [U]}))
    with pytest.raises(UserError, match="kept 1, dropped 6: 6 starts with the assistant"):
        plan_prompts([str(path)], [], 0, Rules(), 0.5)
    plan = plan_prompts([str(path)], [], 0, Rules(), 0.9)
    assert summary(plan.total, plan.dropped) == "kept 1, dropped 6: 6 starts with the assistant"
