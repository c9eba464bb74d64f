"""The last rung: change one file of an installed engine, and take it back exactly.

A patch is made from the file as it lies there and holds only for those bytes. Order of writing, so that a kill at any
moment leaves the old file or the new one and a way back: original and record first, then the file by rename.
"""

from __future__ import annotations

import ast
import difflib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.engine.inject import home
from draftsmith.errors import UserError
from draftsmith.record import atomic_write, content_hash, read_json, sha256_bytes, write_json

RECORD = "patch.json"
ORIGINAL = "original"


@dataclass(frozen=True)
class Patch:
    """file: below `site`, e.g. "vllm/config/speculative.py". before, after: sha256 of the whole file."""

    site: Path
    file: str
    old: bytes
    new: bytes
    why: str

    @property
    def before(self) -> str:
        return sha256_bytes(self.old)

    @property
    def after(self) -> str:
        return sha256_bytes(self.new)

    def diff(self) -> str:
        """Unified diff, as `patch -p1` in `site` takes it."""
        old, new = (data.decode("utf-8").splitlines(keepends=True) for data in (self.old, self.new))
        return "".join(difflib.unified_diff(old, new, f"a/{self.file}", f"b/{self.file}"))


def real_file(site: Path, file: str) -> Path:
    """The file to change. UserError if it, or a folder on the way to it, is a link, or it lies outside `site`: what a
    link leads to may belong to other environments."""
    root = site.resolve(strict=True)
    path = root
    parts = Path(file).parts
    if not parts or Path(file).is_absolute() or ".." in parts:
        raise UserError(f"{file} is no file of {site}", "", "give a path below the engine's folder")
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise UserError(
                f"{path} is a link to {path.resolve()}",
                "what it leads to may be shared with other environments, which would be changed as well",
                "install the engine with copied files (uv: --link-mode copy), or use the runtime plugin",
            )
    if not path.is_file():
        raise UserError(f"{path} does not exist", "there is nothing to change", "check the engine's path")
    return path


def _folder(path: Path) -> Path:
    return home() / "patches" / content_hash(str(path))[:20]


def _clean(path: Path) -> None:
    """Take away what a killed write left beside the file."""
    for left in path.parent.glob(f".{path.name}.*.part"):
        left.unlink(missing_ok=True)


def _write_over(path: Path, data: bytes, mode: int, times: tuple[int, int] | None = None) -> None:
    """Replace a file by rename, with its mode (and times) kept; a hard-linked copy elsewhere is not touched."""
    _clean(path)
    fd, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        Path(part).chmod(mode)
        if times is not None:
            os.utime(part, ns=times)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def apply(patch: Patch) -> Path:
    """Write the new file; returns its path. Done already: nothing happens. UserError if the file is not the one that the
    patch was made from."""
    path = real_file(patch.site, patch.file)
    now = path.read_bytes()
    if sha256_bytes(now) == patch.after:
        return path
    if sha256_bytes(now) != patch.before:
        raise UserError(
            f"{path} is not the file that the patch was made from",
            "it was changed in between, so the patch could do something else than it says",
            "make the patch again: draftsmith remedy TARGET DRAFTER --rung patch",
        )
    folder = _folder(path)
    known = _record(folder)
    if known is not None and known["after"] == patch.before:
        # A patch upon a patch: the way back leads to the first original.
        original, first = (folder / ORIGINAL).read_bytes(), known["before"]
        mode, times = known["mode"], known["times"]
    else:
        seen = path.stat()
        original, first = now, patch.before
        mode, times = stat.S_IMODE(seen.st_mode), [seen.st_atime_ns, seen.st_mtime_ns]
    atomic_write(folder / ORIGINAL, original)
    write_json(
        folder / RECORD,
        {
            "path": str(path),
            "file": patch.file,
            "before": first,
            "after": patch.after,
            "mode": mode,
            "times": times,
            "why": patch.why,
        },
    )
    _write_over(path, patch.new, mode)
    return path


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        found = read_json(folder / RECORD)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def applied(site: Path) -> list[dict[str, Any]]:
    """Records of patches of files below `site`, in effect or prepared."""
    root = str(site.resolve()) + os.sep
    folders = sorted((home() / "patches").glob("*"))
    return [r for f in folders if (r := _record(f)) is not None and str(r["path"]).startswith(root)]


def revert(site: Path) -> list[Path]:
    """Put every patched file of the installation back, byte for byte, with its mode and times; returns the files.

    UserError, and nothing changed, if a file has been changed since (an upgrade, another hand)."""
    records = applied(site)
    work: list[tuple[Path, bytes, dict[str, Any]]] = []
    done: list[Path] = []
    for record in records:
        path = real_file(site, record["file"])
        original = (_folder(path) / ORIGINAL).read_bytes()
        now = sha256_bytes(path.read_bytes())
        if sha256_bytes(original) != record["before"]:
            raise UserError(
                f"the original kept for {path} is damaged", "", "install the engine's package again; it holds the file"
            )
        if now not in (record["before"], record["after"]):
            raise UserError(
                f"{path} has been changed since it was patched",
                "putting the old file back would undo that change as well",
                "an upgraded engine needs no revert; else compare with "
                f"{_folder(path) / ORIGINAL} and copy it back by hand",
            )
        if now == record["after"]:
            work.append((path, original, record))
    for path, original, record in work:
        _write_over(path, original, record["mode"], (record["times"][0], record["times"][1]))
        done.append(path)
    for record in records:
        _clean(Path(record["path"]))
        folder = _folder(Path(record["path"]))
        # The record goes first: an original without one is rubbish, a record without an original is a broken promise.
        (folder / RECORD).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return done


def widen_list(site: Path, file: str, line: int, model_type: str) -> Patch:
    """A patch that adds `model_type` to the list of strings assigned at `line` (1-based) of `file`.

    Only an element is inserted; that the rest means what it meant is checked on the syntax tree. UserError if there is
    no such list."""
    path = real_file(site, file)
    old = path.read_bytes()
    text = old.decode("utf-8")
    tree = ast.parse(text)
    found = _list_at(tree, line)
    if found is None:
        raise UserError(
            f"{file}:{line} holds no list of model types that could be widened",
            "this release tests the model type in another way",
            "install a release that takes the target (draftsmith releases TARGET)",
        )
    last = found.elts[-1]
    assert last.end_lineno is not None and last.end_col_offset is not None
    lines = old.split(b"\n")
    literal = b'"' + model_type.encode() + b'"'
    row = lines[last.end_lineno - 1]
    head, tail = row[: last.end_col_offset], row[last.end_col_offset :]
    if found.end_lineno == last.end_lineno:
        lines[last.end_lineno - 1] = head + b", " + literal + tail
    else:
        indent = row[: len(row) - len(row.lstrip())]
        ending = b"\r" if row.endswith(b"\r") else b""
        if not tail.lstrip().startswith(b","):
            lines[last.end_lineno - 1] = head + b"," + tail
        lines.insert(last.end_lineno, indent + literal + b"," + ending)
    new = b"\n".join(lines)
    after = ast.parse(new.decode("utf-8"))
    changed = _list_at(after, line)
    if changed is None or not isinstance(changed.elts[-1], ast.Constant) or changed.elts[-1].value != model_type:
        raise UserError(f"{file}:{line} cannot be widened safely", "", "report this engine's layout to draftsmith")
    changed.elts.pop()
    if ast.dump(after) != ast.dump(tree):
        raise UserError(f"{file}:{line} cannot be widened safely", "", "report this engine's layout to draftsmith")
    return Patch(site, file, old, new, f"the EAGLE-3 list takes {model_type}")


def _list_at(tree: ast.Module, line: int) -> ast.List | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            end = node.end_lineno or node.lineno
            strings = all(isinstance(e, ast.Constant) and isinstance(e.value, str) for e in node.value.elts)
            if node.lineno <= line <= end and node.value.elts and strings:
                return node.value
    return None
