"""The header reader: hub-style folders, what is refused, and values read back."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pair as tp

from draftsmith.check.headers import MAX_HEADER, read_array, read_blocks, read_headers, read_weights
from draftsmith.errors import UserError


def write_header(path: Path, header: Any, data: bytes = b"\0" * 64, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def problem(folder: Path) -> str:
    weights = read_weights(folder)
    assert len(weights.problems) == 1, weights.problems
    return weights.problems[0]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ([1, 2], "not an object"),
        (b"{", "not JSON"),
        (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
        ({"a": 3}, "not an object"),
        ({"a": entry("F7")}, "unknown dtype"),
        ({"a": entry(shape=(3,))}, "F32 [3] in 8 bytes"),
        ({"a": entry(offsets=(0, 800))}, "cut or still loading"),
        ({"a": entry(offsets=(8, 0))}, "cut or still loading"),
        ({"a": entry() | {"shape": ["x", 2]}}, "no shape"),
        ({"a": entry() | {"shape": [-1, -2]}}, "no shape"),
        ({"a": entry() | {"data_offsets": [0]}}, "no pair"),
        ({"a": entry() | {"data_offsets": [0.0, 8.0]}}, "no pair"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "overlaps"),
        ({"b": entry(offsets=(4, 12)), "a": entry()}, "overlaps"),
        (b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "a": {"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
         "twice"),
    ],
)  # fmt: skip
def test_unsound_headers_are_refused_in_words(tmp_path: Path, header: Any, says: str) -> None:
    write_header(tmp_path / "model.safetensors", header)
    assert says in problem(tmp_path)
    with pytest.raises(UserError):
        read_headers(tmp_path)


@pytest.mark.parametrize("length", [MAX_HEADER + 1, 2**63, 2**64 - 1])
def test_a_declared_length_is_never_trusted(tmp_path: Path, length: int) -> None:
    write_header(tmp_path / "model.safetensors", {"a": entry()}, length=length)
    assert "declares a header" in problem(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"\1", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"])
def test_stubs_are_no_weights(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    assert problem(tmp_path)


def test_metadata_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": entry(), "none": entry(shape=(0, 4), offsets=(8, 8))}
    write_header(tmp_path / "model.safetensors", header)
    weights = read_weights(tmp_path)
    assert weights.problems == [] and set(weights.tensors) == {"a", "none"} and weights.nbytes == 8


def shards(folder: Path, table: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def test_shards_by_index(tmp_path: Path) -> None:
    tp.write_safetensors(tmp_path / "model-1.safetensors", {"a": np.zeros(2, "<f4")})
    tp.write_safetensors(tmp_path / "model-2.safetensors", {"b": np.zeros((2, 3), "<f4")})
    shards(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    weights = read_weights(tmp_path)
    assert weights.problems == [] and weights.tensors["b"].shape == (2, 3) and weights.nbytes == 32


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"a": "../../secret.safetensors"}, "not a file of this folder"),
        ({"a": "/etc/passwd"}, "not a file of this folder"),
        ({"a": "gone.safetensors"}, "missing"),
        ({"a": "model-1.safetensors", "c": "model-1.safetensors"}, "not in their file"),
        ({"a": 3}, "not a table of names"),
    ],
)
def test_an_index_is_not_trusted_either(tmp_path: Path, table: dict[str, Any], says: str) -> None:
    tp.write_safetensors(tmp_path / "model-1.safetensors", {"a": np.zeros(2, "<f4")})
    shards(tmp_path, table)
    assert says in problem(tmp_path)


def test_an_index_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "not readable" in problem(tmp_path)


def test_shards_without_index_are_counted(tmp_path: Path) -> None:
    tp.write_safetensors(tmp_path / "model-00001-of-00003.safetensors", {"a": np.zeros(2, "<f4")})
    assert "1 of 3 shards" in problem(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for n in ("x.safetensors", "y.safetensors"):
        tp.write_safetensors(tmp_path / n, {"a": np.zeros(2, "<f4")})
    assert "both in x.safetensors and in y.safetensors" in problem(tmp_path)


def test_links_may_lead_into_the_hub_caches_blobs_and_nowhere_else(tmp_path: Path) -> None:
    entry_folder = tmp_path / "models--a--b"
    snapshot, blobs = entry_folder / "snapshots" / "rev", entry_folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    tp.write_safetensors(blobs / "hash", {"a": np.zeros(2, "<f4")})
    (snapshot / "model.safetensors").symlink_to(blobs / "hash")
    assert read_weights(snapshot).problems == []
    outside = tmp_path / "outside.safetensors"
    tp.write_safetensors(outside, {"a": np.zeros(2, "<f4")})
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(outside)
    assert "leaves the folder" in problem(snapshot)


def test_pickles_are_seen_and_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    (tmp_path / "training_args.bin").write_bytes(b"")
    weights = read_weights(tmp_path)
    assert [p.name for p in weights.pickles] == ["pytorch_model.bin"] and not weights.tensors and not weights.problems


def test_values_come_back(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 12).astype("<f4").reshape(3, 4)
    tensors = {"f": values, "b": tp.bf16(values), "i": np.arange(5, dtype="<i8"), "t": np.array([True, False])}
    tp.write_safetensors(tmp_path / "model.safetensors", tensors)
    read = read_weights(tmp_path).tensors
    assert np.array_equal(read_array(read["f"], 10**6), values)
    assert np.array_equal(read_array(read["b"], 10**6), tp.as_f32(tensors["b"]))
    assert np.array_equal(read_array(read["i"], 10**6), np.arange(5))
    assert np.array_equal(read_array(read["t"], 10**6) != 0, tensors["t"])
    blocks = list(read_blocks(read["f"], 20, 10**6))
    assert [len(b) for b in blocks] == [5, 5, 2] and np.array_equal(np.concatenate(blocks), values.ravel())
    with pytest.raises(UserError):
        read_array(read["f"], 10)


def sharded(root: Path, **entries: list[tuple[str, int]]) -> dict[str, str]:
    """Files of F32 tensors, one behind the other, as {file stem: [(name, size)]}; returns the index's table."""
    table = {}
    for stem, tensors in entries.items():
        header, at = {}, 0
        for name, n in tensors:
            header[name] = entry(shape=(n,), offsets=(at, at + 4 * n))
            table[name] = f"{stem}.safetensors"
            at += 4 * n
        write_header(root / f"{stem}.safetensors", header, b"\0" * at)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return table


def test_shards_that_hold_nothing_wanted_are_counted_and_looked_at_for_being_whole(tmp_path: Path) -> None:
    sharded(tmp_path, a=[("embed.weight", 4), ("x", 3)], b=[("y", 5), ("z", 2)], c=[("w", 9)])
    some, every = read_weights(tmp_path, ("embed.weight",)), read_weights(tmp_path)
    assert some.problems == every.problems == []
    assert some.nbytes == every.nbytes == 92 and list(some.tensors) == ["embed.weight"]
    path = tmp_path / "b.safetensors"
    whole = path.read_bytes()
    for broken, says in ((whole[:-4], "cut"), (whole[:20], "declares a header"), (b"version https://", "git-lfs")):
        path.write_bytes(broken)
        assert says in read_weights(tmp_path, ("embed.weight",)).problems[0]
    path.unlink()
    assert "missing" in read_weights(tmp_path, ("embed.weight",)).problems[0]


def test_a_header_in_another_order_is_parsed_whole(tmp_path: Path) -> None:
    sharded(tmp_path, a=[("embed.weight", 4)], b=[("y", 5), ("z", 2)])
    late = {"z": entry(shape=(2,), offsets=(20, 28)), "y": entry(shape=(5,), offsets=(0, 20))}
    write_header(tmp_path / "b.safetensors", late, b"\0" * 28)
    assert read_weights(tmp_path, ("embed.weight",)).nbytes == 44
    late["y"]["data_offsets"] = [4, 24]
    write_header(tmp_path / "b.safetensors", late, b"\0" * 28)
    assert "overlaps" in read_weights(tmp_path, ("embed.weight",)).problems[0]
