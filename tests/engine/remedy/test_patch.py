"""Source patches: exact, reversible, whole under kill, never through a link."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.engine import patch as p
from draftsmith.errors import UserError
from draftsmith.record import sha256_file

FILE = "vllm/config/speculative.py"
SHORT = 'class C:\n    def f(self):\n        allowed = ["llama", "qwen"]\n        return allowed\n'
LONG = """class C:
    def f(self):
        allowed = [
            'llama',
            'qwen',  # and its kin
        ]
        return allowed
"""
BARE = "allowed = [\n    'llama',\n    'qwen'\n]\nother = ['a', 'b']\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    return write(tmp_path / "site", SHORT)


def write(site: Path, text: str, newline: str = "\n") -> Path:
    (site / FILE).parent.mkdir(parents=True, exist_ok=True)
    (site / FILE).write_bytes(text.replace("\n", newline).encode())
    return site


def line(text: str) -> int:
    return next(n for n, row in enumerate(text.split("\n"), 1) if "allowed = [" in row)


def listed(source: bytes) -> list[str]:
    names: dict[str, object] = {}
    exec(source.decode().replace("\r", ""), names)
    made = names["C"]().f() if "C" in names else names["allowed"]  # type: ignore[operator]
    return list(made)  # type: ignore[call-overload]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("text", [SHORT, LONG, BARE])
def test_one_element_is_added_and_nothing_else(site: Path, text: str, newline: str) -> None:
    write(site, text, newline)
    made = p.widen_list(site, FILE, line(text), "kimi_k2")
    assert listed(made.new) == ["llama", "qwen", "kimi_k2"]
    assert made.new.count(b"\n") - made.old.count(b"\n") == (0 if text == SHORT else 1)
    assert made.new.count(b"\r") - made.old.count(b"\r") == (1 if newline == "\r\n" and text != SHORT else 0)


def test_the_diff_is_one_that_patch_takes(site: Path) -> None:
    write(site, LONG)
    made = p.widen_list(site, FILE, line(LONG), "kimi_k2")
    diff = made.diff()
    assert diff.startswith(f"--- a/{FILE}\n+++ b/{FILE}\n@@")
    assert [r for r in diff.splitlines() if r.startswith(("+", "-"))][2:] == ['+            "kimi_k2",']


def test_apply_and_revert_are_exact(site: Path) -> None:
    file = site / FILE
    file.chmod(0o640)
    os.utime(file, ns=(1_600_000_000_123_456_789, 1_600_000_000_987_654_321))
    before, stat = file.read_bytes(), file.stat()
    made = p.widen_list(site, FILE, line(SHORT), "kimi_k2")
    assert p.apply(made) == file.resolve()
    assert file.read_bytes() == made.new and file.stat().st_mode == stat.st_mode
    assert p.apply(made) == file.resolve(), "a second time is no error"
    assert p.revert(site) == [file.resolve()]
    after = file.stat()
    assert file.read_bytes() == before
    assert (after.st_mode, after.st_mtime_ns) == (stat.st_mode, stat.st_mtime_ns)
    assert p.applied(site) == [] and p.revert(site) == []


def test_a_second_patch_goes_back_to_the_first_original(site: Path) -> None:
    before = (site / FILE).read_bytes()
    for word in ("kimi_k2", "olmoe"):
        p.apply(p.widen_list(site, FILE, line(SHORT), word))
    assert listed((site / FILE).read_bytes()) == ["llama", "qwen", "kimi_k2", "olmoe"]
    p.revert(site)
    assert (site / FILE).read_bytes() == before


def test_a_file_that_changed_meanwhile_is_refused(site: Path) -> None:
    made = p.widen_list(site, FILE, line(SHORT), "kimi_k2")
    write(site, SHORT + "# newer\n")
    with pytest.raises(UserError, match="not the file that the patch was made from"):
        p.apply(made)
    assert (site / FILE).read_text() == SHORT + "# newer\n"


def test_a_file_changed_after_the_patch_is_not_put_back(site: Path) -> None:
    p.apply(p.widen_list(site, FILE, line(SHORT), "kimi_k2"))
    write(site, "# upgraded\n" + SHORT)
    with pytest.raises(UserError, match="changed since it was patched"):
        p.revert(site)
    assert (site / FILE).read_text() == "# upgraded\n" + SHORT


def test_a_damaged_original_is_not_written(site: Path, tmp_path: Path) -> None:
    made = p.widen_list(site, FILE, line(SHORT), "kimi_k2")
    p.apply(made)
    next((tmp_path / "home" / "patches").rglob("original")).write_text("x")
    with pytest.raises(UserError, match="damaged"):
        p.revert(site)
    assert (site / FILE).read_bytes() == made.new


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_out_of_the_installation_is_never_followed(site: Path, tmp_path: Path, what: str) -> None:
    shared = tmp_path / "cache"
    write(shared, SHORT)
    if what == "file":
        (site / FILE).unlink()
        (site / FILE).symlink_to(shared / FILE)
    else:
        (site / FILE).unlink()
        (site / "vllm/config").rmdir()
        (site / "vllm/config").symlink_to(shared / "vllm/config")
    with pytest.raises(UserError, match="is a link to"):
        p.widen_list(site, FILE, line(SHORT), "kimi_k2")
    good = p.Patch(site, FILE, SHORT.encode(), b"changed", "")
    with pytest.raises(UserError, match="is a link to"):
        p.apply(good)
    assert (shared / FILE).read_text() == SHORT


def test_a_hard_linked_copy_keeps_its_content(site: Path, tmp_path: Path) -> None:
    os.link(site / FILE, tmp_path / "cached.py")
    p.apply(p.widen_list(site, FILE, line(SHORT), "kimi_k2"))
    assert (tmp_path / "cached.py").read_text() == SHORT


@pytest.mark.parametrize("file", ["../x.py", "/etc/hostname", "", "vllm/none.py"])
def test_only_files_of_the_installation(site: Path, file: str) -> None:
    with pytest.raises(UserError):
        p.real_file(site, file)


@pytest.mark.parametrize("at", [1, 4, 99])
def test_where_there_is_no_list_nothing_is_made(site: Path, at: int) -> None:
    with pytest.raises(UserError, match="no list of model types"):
        p.widen_list(site, FILE, at, "kimi_k2")


def test_a_write_that_fails_leaves_the_old_file(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = p.widen_list(site, FILE, line(SHORT), "kimi_k2")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        p.apply(made)
    assert (site / FILE).read_text() == SHORT
    assert [f.name for f in (site / FILE).parent.iterdir()] == ["speculative.py"]


WORKER = """
import sys
from pathlib import Path
from draftsmith.engine import patch as p
site, file, line = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
while True:
    p.apply(p.widen_list(site, file, line, "kimi_k2"))
    p.revert(site)
"""


def test_killed_at_any_moment_the_file_is_the_old_or_the_new_and_revert_is_exact(site: Path) -> None:
    old = sha256_file(site / FILE)
    new = p.widen_list(site, FILE, line(SHORT), "kimi_k2").after
    rng = random.Random(1)
    for _ in range(8):
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(site), FILE, str(line(SHORT))], stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        found = sha256_file(site / FILE)
        assert found in (old, new)
        p.revert(site)
        assert sha256_file(site / FILE) == old
        assert len(list((site / FILE).parent.iterdir())) <= 2
    p.apply(p.widen_list(site, FILE, line(SHORT), "kimi_k2"))
    assert [f.name for f in (site / FILE).parent.iterdir()] == ["speculative.py"], "no parts of killed writes are left"
