"""From what the user typed to a source, an engine's name, its version and its platform; the engine is not run."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from urllib.parse import unquote, urlparse

from draftsmith.engine.reader.source import Below, FolderSource, Source, ZipSource
from draftsmith.errors import UserError

ENGINES = ("vllm", "sglang")
_MARK = {"vllm": "vllm/engine", "sglang": "sglang/srt"}
"""A folder that only the engine's real package has (an empty `vllm/` left behind is not one)."""
_DIST = re.compile(r"^(vllm|sglang)(?:_[a-z0-9]+)?-[^/]+\.(?:dist|egg)-info$", re.IGNORECASE)
_BELOW = ("python", "src", "Lib/site-packages")


@dataclass(frozen=True)
class Located:
    """An installation. `path` is what the user is shown; `site` whether it lies among what it needs (torch is beside
    it), so that what else is installed there can be asked for."""

    engine: str
    version: str | None
    platform: str
    path: str
    source: Source
    site: bool
    distribution: str | None = None


def locate(path: str | Path, engine: str | None = None) -> Located:
    """Find an engine in an interpreter's environment, a site-packages folder, a folder that holds the package, the
    package itself, an unpacked or packed wheel, an unpacked source distribution, a checkout, or `ssh://user@host/path`.

    engine: "vllm" or "sglang" where both may be there. UserError where there is none.
    """
    text = str(path)
    if text.startswith(("ssh://", "sftp://")):
        from draftsmith.engine.reader.ssh import SshSource

        source: Source = SshSource(text)
        return _within(source, text, engine)
    local = Path(text).expanduser()
    if not local.exists():
        raise UserError(
            f"{text} does not exist",
            fix="give an environment, its python, a site-packages folder, a folder that holds vllm/, a wheel, or ssh://user@host/path",
        )
    if local.is_file():
        if local.suffix in (".whl", ".zip"):
            return _within(ZipSource(local), text, engine)
        if local.name.endswith((".tar.gz", ".tgz")):
            raise UserError(f"{text} is packed", "a source archive must be unpacked to be read", f"tar xf {local.name}")
        return _within(FolderSource(_site_of_interpreter(local)), text, engine)
    return _within(FolderSource(local), text, engine)


def _site_of_interpreter(python: Path) -> Path:
    """The site-packages that an interpreter imports from, by its place: <prefix>/bin/python → <prefix>/lib/python3.x."""
    if not re.match(r"^(python|pypy)[\d.]*(\.exe)?$", python.name):
        raise UserError(
            f"{python} is neither a wheel nor a python", fix="give the environment's bin/python or its folder"
        )
    # The link is not followed: a virtual environment's python is a link to the one that made it.
    prefix = python.parent.parent
    sites = [*sorted(prefix.glob("lib/python3*/site-packages")), *sorted(prefix.glob("lib/python3*/dist-packages"))]
    sites += sorted(prefix.glob("local/lib/python3*/dist-packages")) + sorted(
        prefix.glob("lib64/python3*/site-packages")
    )
    exact = re.search(r"3\.\d+", python.name)
    if exact:
        sites = [s for s in sites if s.parent.name == f"python{exact.group()}"] or sites
    for site in sites:
        if any((site / mark).is_dir() for mark in _MARK.values()) or _dist_infos(FolderSource(site)):
            return site
    if sites:
        return sites[0]
    raise UserError(f"no site-packages found beside {python}", fix="give the site-packages folder itself")


def _within(source: Source, shown: str, engine: str | None) -> Located:
    wanted = (engine,) if engine else ENGINES
    for place in _places(source):
        for found in (place, _editable(place)):
            for name in wanted:
                if found is not None and found.exists(_MARK[name]):
                    return _identify(name, found, shown)
    raise UserError(
        f"no {' or '.join(wanted)} found in {shown}",
        "an engine's source is a folder vllm/ (or sglang/) with its files",
        "give an environment, its python, its site-packages, a folder that holds vllm/, or a wheel",
    )


def _places(source: Source) -> list[Source]:
    """Folders of `source` where the package may lie, likeliest first."""
    places: list[Source] = [source]
    names = source.names("")
    if isinstance(source, FolderSource) and (source.root / "__init__.py").exists():
        places.append(FolderSource(source.root.resolve().parent))
    for lib in ("lib", "lib64", "local/lib"):
        if lib.split("/")[0] in names:
            for python in source.names(lib):
                if python.startswith("python3"):
                    places += [Below(source, f"{lib}/{python}/{p}") for p in ("site-packages", "dist-packages")]
    places += [Below(source, folder) for folder in _BELOW if source.exists(folder)]
    for name in names:
        # An unpacked archive has one folder inside; SGLang's checkout has its package in python/.
        if re.match(r"^(vllm|sglang)[-_]", name) and not name.endswith("-info"):
            places += [Below(source, name), Below(source, f"{name}/python")]
    return places


def _dist_infos(source: Source) -> list[str]:
    return [name for name in source.names("") if _DIST.match(name)]


def _editable(place: Source) -> Source | None:
    """The checkout behind an editable install (PEP 610: direct_url.json in its dist-info)."""
    for info in _dist_infos(place):
        try:
            value = json.loads(place.read(f"{info}/direct_url.json"))
            url, directory = value["url"], value.get("dir_info", {})
        except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):
            continue
        if isinstance(directory, dict) and directory.get("editable") and str(url).startswith("file://"):
            folder = _on_the_same_machine(place, unquote(urlparse(str(url)).path))
            if folder is not None:
                return Below(folder, "python") if folder.exists("python/sglang") else folder
    return None


def _on_the_same_machine(place: Source, path: str) -> Source | None:
    """Another folder of the machine that `place` lies on; None inside an archive."""
    while isinstance(place, Below):
        place = place.source
    if isinstance(place, FolderSource):
        return FolderSource(Path(path))
    beside = getattr(place, "beside", None)
    return None if beside is None else beside(path)


def _identify(engine: str, source: Source, shown: str) -> Located:
    distribution, version = _metadata(engine, source)
    version = _version_file(engine, source) or version
    if distribution is None:
        distribution, from_project = _project(source)
        version = version or from_project
    site = source.exists("torch")
    return Located(engine, version, _platform(engine, source, version, distribution), shown, source, site, distribution)


def _metadata(engine: str, source: Source) -> tuple[str | None, str | None]:
    """(distribution, version) from the dist-info, or from a source distribution's PKG-INFO."""
    infos = [f"{n}/{'METADATA' if n.endswith('.dist-info') else 'PKG-INFO'}" for n in _dist_infos(source)]
    for rel in [*infos, "PKG-INFO", f"{engine}.egg-info/PKG-INFO", "../PKG-INFO"]:
        try:
            header = HeaderParser().parsestr(source.read(rel).split("\n\n", 1)[0])
        except FileNotFoundError:
            continue
        name, version = header.get("Name"), header.get("Version")
        if name and version and re.split(r"[-_]", name.lower())[0] == engine:
            return name, version
    return None, None


def _version_file(engine: str, source: Source) -> str | None:
    """The literal that `__version__` is given in _version.py (setuptools-scm) or version.py."""
    for rel in (f"{engine}/_version.py", f"{engine}/version.py"):
        try:
            tree = ast.parse(source.read(rel))
        except (FileNotFoundError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
                if (
                    "__version__" in names
                    and re.match(r"^\d+\.\d+", node.value.value)
                    and node.value.value != "0.0.0.dev0"
                ):
                    return node.value.value
    return None


def _project(source: Source) -> tuple[str | None, str | None]:
    """(name, version) of a checkout's pyproject.toml; a dynamic version is None."""
    import tomllib

    for rel in ("pyproject.toml", "../pyproject.toml"):
        try:
            project = tomllib.loads(source.read(rel)).get("project", {})
        except (FileNotFoundError, ValueError):
            continue
        name, version = project.get("name"), project.get("version")
        return (name if isinstance(name, str) else None), (version if isinstance(version, str) else None)
    return None, None


def _platform(engine: str, source: Source, version: str | None, distribution: str | None) -> str:
    """What the build is for: the distribution's name or the version's local part says so; otherwise CUDA."""
    words = f"{distribution or ''} {(version or '').partition('+')[2]}".lower()
    for one in ("cpu", "rocm", "xpu", "tpu"):
        if re.search(rf"\b{one}", words.replace("-", " ").replace("_", " ")):
            return one
    if engine == "vllm" and any(name.startswith("_rocm_C") for name in source.names("vllm")):
        return "rocm"
    return "cuda"
