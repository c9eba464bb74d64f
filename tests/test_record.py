"""Records: atomic, hashed by content, and a stage counts as done only with its own key."""

import os

import pytest

from draftsmith import record


def test_atomic_write_leaves_old_file_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "f.json"
    record.atomic_write(path, "old")

    def broken(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space"):
        record.atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_content_hash_ignores_key_order():
    assert record.content_hash({"a": 1, "b": [2]}) == record.content_hash({"b": [2], "a": 1})
    assert record.content_hash({"a": 1}) != record.content_hash({"a": 2})


def test_folder_hash_changes_with_bytes_and_names_but_not_with_the_record(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    first = record.folder_hash(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    assert record.folder_hash(tmp_path) == first
    (tmp_path / "a").rename(tmp_path / "b")
    assert record.folder_hash(tmp_path) != first


def test_done_needs_the_same_key(tmp_path):
    record.write_record(tmp_path, stage="s", key="k", inputs={}, config={}, result={"n": 1}, started=0)
    assert record.is_done(tmp_path, "k") and not record.is_done(tmp_path, "other")
    (tmp_path / "run.json").write_text('{"status": "do')
    assert not record.is_done(tmp_path, "k")
