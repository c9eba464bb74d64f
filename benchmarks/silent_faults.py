"""Claim: every fault of tests/mutants/table.json is caught by the check that the table promises; beside it, what the real
engine does with each (refuses, crashes where, or runs without a word, with the drafts it accepted).

    python benchmarks/silent_faults.py --engine /opt/vllm --work out/faults [--seconds 200]

Runs as many mutants as fit into the time (each in a forked child of one engine process) and can be called again until all
are done; then writes benchmarks/results/silent_faults.json. Good pair and mutants are made by tests/mutants.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MUTANTS_FOLDER = HERE.parent / "tests" / "mutants"
sys.path[:0] = [str(HERE), str(MUTANTS_FOLDER)]

import _figures
import mutants_form
import mutants_pair
import tiny_pair as tp
from mutant_case import MUTANTS, Case, good_case

from draftsmith.engine.find import find_engine
from draftsmith.engine.reader import EngineFacts, read_engine

TABLE = json.loads((MUTANTS_FOLDER / "table.json").read_text())
GOOD = "(good pair)"
NO_METHOD = ("folder_named_final", "folder_named_eagle_dash")
FOREIGN = (
    "last_layer_on_an_old_loop", "multimodal_without_image_token", "pipeline_on_a_class_without_it",
    "target_without_the_interface", "two_kinds_of_cache_on_the_cpu",
)  # fmt: skip
"""Their target's config names a class that its tiny weights are not of: faults to be read; where the engine stops says
nothing of them (gate_observed loads such classes)."""
assert mutants_form and mutants_pair


def make_case(name: str, work: Path) -> Case:
    case = good_case(work / "scratch")
    if name != GOOD:
        MUTANTS[name](case)
    return case


def job_of(name: str, case: Case, target: Path, drafter: Path) -> dict[str, Any]:
    o = case.make_options()
    speculative: dict[str, Any] = {"model": str(drafter), "num_speculative_tokens": 3}
    if o.num_speculative_tokens is not None:
        speculative["num_speculative_tokens"] = o.num_speculative_tokens
    if name not in NO_METHOD:
        speculative["method"] = o.method or "eagle3"
    args: dict[str, Any] = {"max_model_len": o.max_model_len or 512}
    if o.tensor_parallel > 1:
        args["tensor_parallel_size"] = o.tensor_parallel
    if o.pipeline_parallel > 1:
        args["pipeline_parallel_size"] = o.pipeline_parallel
    return {"name": name, "model": str(target), "speculative": speculative, "args": args, "prompt": tp.PROMPT,
            "max_tokens": 32}  # fmt: skip


def prepare(work: Path) -> Path:
    """Write every pair once, and the list of jobs; a table that has grown since is caught up with."""
    jobs = work / "jobs.jsonl"
    lines = jobs.read_text().splitlines() if jobs.exists() else []
    there = {json.loads(line)["name"] for line in lines}
    for name in [n for n in [GOOD, *TABLE] if n not in there]:
        case = make_case(name, work)
        target, drafter = case.write(work / "pairs" / (name if name != GOOD else "good"))
        lines.append(json.dumps(job_of(name, case, target, drafter)))
    jobs.write_text("\n".join(lines) + "\n")
    return jobs


def speaks(name: str, work: Path, facts: EngineFacts | None = None) -> dict[str, str]:
    """Id → status of every row that warns or fails: of the mutant's own kind of engine, or of `facts`."""
    from test_mutants import trouble, verdict_of

    case = make_case(name, work)
    return trouble(verdict_of(case, work / "verdicts" / (name if name != GOOD else "good"), facts))


def works(result: dict[str, Any], good: dict[str, Any]) -> bool:
    """Whether the engine served the pair, and accepted as much of the drafter as of the good one."""
    return bool(result["reached"] == "done" and result.get("per_position") == good["per_position"])


def result_rows(work: Path, results: dict[str, Any], real: EngineFacts) -> list[dict[str, Any]]:
    """caught: the promised check spoke with the promised status. here: what `check` says of this pair when it reads the
    engine that was run; hidden: that engine refused it or accepted less, and `check` had said nothing (only of mutants
    that are faults on this kind of engine)."""
    rows = []
    for name in [GOOD, *TABLE]:
        found, here = speaks(name, work), speaks(name, work, real)
        here.pop("engine.faults", None)  # of the engine, whatever the pair
        promise = TABLE.get(name, {})
        caught = found.get(promise["check"]) == promise["status"] if promise else not found
        engine = {k: x for k, x in results[name].items() if k not in ("name", "tokens", "seconds") and x is not None}
        if engine.get("error"):
            engine["error"] = scrub(engine["error"], work)
        fine = works(results[name], results[GOOD])
        here_too = make_case(name, work).engine == "modern-v1"
        rows.append({"mutant": name, "check": promise.get("check"), "status": promise.get("status"),
                     "needs": promise.get("needs"), "caught": caught, "engine": engine, "engine_content": fine,
                     "here": here, "hidden": here_too and not fine and not here,
                     "for_reading_only": name in FOREIGN})  # fmt: skip
    return rows


def scrub(text: str, work: Path) -> str:
    return text.replace(str(work.resolve()), "WORK")[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True, help="environment of the engine that is run")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument(
        "--lock", nargs=1, default=[], help="take turns of SECONDS under this file's lock until all is done"
    )
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    engine = find_engine(args.engine)
    jobs, results_file = prepare(work), work / "results.jsonl"
    if args.seconds > 0:
        command = [
            str(engine.python),
            str(HERE / "engine_probe.py"),
            str(jobs),
            str(results_file),
            str(args.seconds),
            *args.lock,
        ]
        subprocess.run(command, check=True)
    results = {}
    if results_file.exists():
        results = {r["name"]: r for r in map(json.loads, results_file.read_text().splitlines())}
    left = [n for n in [GOOD, *TABLE] if n not in results]
    if left:
        print(f"{len(results)} done, {len(left)} left: call again")
        return
    rows = result_rows(work, results, read_engine(args.engine, platform="cpu"))
    mutants = [r for r in rows if r["mutant"] != GOOD]
    run = [r for r in mutants if not r["for_reading_only"]]
    counts = Counter(r["engine"]["reached"] for r in run)
    lost = sum(r["engine"]["reached"] == "done" and not r["engine_content"] for r in run)
    hidden = [r["mutant"] for r in rows if r["hidden"]]
    _figures.write(
        "silent_faults",
        claim=f"{len(mutants)} faults of drafter and pair: caught by the promised check. The engine itself, with {len(run)}: "
        + ", ".join(f"{n} end in {k}" if k != "done" else f"{n} run without a word" for k, n in counts.most_common())
        + f" ({lost} of these accept less than the good drafter); {len(hidden)} that it refuses or serves worse were "
        "called sound by check when it read this engine",
        ours=sum(r["caught"] for r in mutants),
        theirs=len(mutants),
        unit="mutants",
        rows=rows,
        engine_version=engine.version,
    )
    caught = sum(r["caught"] for r in mutants)
    print(counts, "caught", caught, "of", len(mutants), "hidden", hidden)
    sys.exit(0 if caught == len(mutants) and not hidden and rows[0]["caught"] else 1)


if __name__ == "__main__":
    main()
