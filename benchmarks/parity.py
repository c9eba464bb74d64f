"""Claim: acceptance predicted by replay of the exported files is what real vLLM counts, per position, greedy, on the same
prompts; and the trainer's model agrees with the engine's own drafter class at every draft step.

    python benchmarks/parity.py --engine /opt/vllm --work out/parity [--target SMOLLM2 --drafters A B C --rows CAPTURE]

Tiny targets of Qwen and of latent-attention (MLA) form with overfitted drafters (tests/bench/overfitted.py) are measured
here; the SmolLM2 drafters' figures are those of results/demo_seeds.json, and with --drafters their class is compared; the
other families' are those of results/target_table.json, whose drafters were replayed on the engine's own states.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "bench")]

import _figures
import overfitted

from draftsmith.bench.parity import parity
from draftsmith.bench.parity_rows import cut
from draftsmith.diagnose.load import load_subject
from draftsmith.diagnose.subject import Sampler, Subject
from draftsmith.dialects import foreign
from draftsmith.engine.find import Engine, find_engine
from draftsmith.record import read_json, write_json
from draftsmith.target.weights import read_embedding
from draftsmith.ui import QuietUi

TINY = {"qwen3": "llama", "deepseek_v3": "mla"}
TOKENS, STEPS = 80, 3


def furthest(found: dict[str, Any]) -> dict[str, Any]:
    """The largest distance of all stages, and the share of proposals that differ."""
    rows = found["stages"]
    return {
        "class": found["class"],
        "agrees": found["first"] is None,
        "largest_relative_l2": max(r["distance"] for r in rows if r["stage"] != "proposals"),
        "proposals_that_differ": max(r["distance"] for r in rows if r["stage"] == "proposals"),
        "tokens": found["tokens"],
    }


def tiny(kind: str, engine: Engine, work: Path) -> dict[str, Any]:
    """A tiny pair, measured in the engine; kept in the work folder."""
    kept = work / kind / "row.json"
    if kept.exists():
        found: dict[str, Any] = read_json(kept)
        return found
    target = overfitted.write_target(work / kind / "target", kind)
    rows = overfitted.answers(target, overfitted.prompts())
    drafter = overfitted.overfit(target, rows, work / kind / "drafter-eagle3", form=TINY[kind])
    row = overfitted.predicted_and_measured(target, drafter, overfitted.prompts(), engine, work / kind / "bench")
    layers = foreign.read(drafter, target_layers=6)
    sampled = Sampler(target).rows(rows, 2, TOKENS)
    subject = Subject(drafter, target, layers, sampled, read_embedding(target).float(), 6, STEPS)
    row = {"drafter": f"tiny {kind}, {TINY[kind]} form"} | row | furthest(parity(subject, sampled, STEPS, engine))
    write_json(kept, row)
    return row


def smollm2(args: argparse.Namespace, engine: Engine) -> list[dict[str, Any]]:
    """Figures that demo_seeds.py measured; with the drafters at hand also the comparison of their class."""
    out = []
    for seed in read_json(_figures.RESULTS / "demo_seeds.json")["rows"]:
        row = {
            "drafter": f"SmolLM2 {seed['drafter']}",
            "predicted": seed["predicted"]["acceptance_per_position"],
            "measured": seed["acceptance_per_position"],
            "drafts": seed["drafts"],
            "measured_by": "demo_seeds.json",
        }
        drafter = next((d for d in args.drafters if d.name == seed["drafter"]), None)
        if drafter is not None:
            subject = load_subject(
                None,
                str(args.target),
                drafter,
                args.rows,
                None,
                2,
                512,
                STEPS,
                str(engine.site),
                QuietUi(),
                train_sample=0,
            )
            assert isinstance(subject, Subject)
            row |= furthest(parity(subject, [cut(r, TOKENS) for r in subject.rows], STEPS, engine))
        out.append(row)
    return out


def families() -> list[dict[str, Any]]:
    """Counts of target_table.py's overfitted drafters, as rates."""
    out = []
    for row in read_json(_figures.RESULTS / "target_table.json")["rows"]:
        if "engine_counts" in row:
            ours, theirs = row["replayed_counts"], row["engine_counts"]
            out.append(
                {
                    "drafter": f"tiny {row['family']}, {row['form']} form",
                    "predicted": [round(n / ours[0], 6) for n in ours[1:]],
                    "measured": [round(n / theirs[0], 6) for n in theirs[1:]],
                    "drafts": theirs[0],
                    "measured_by": "target_table.json",
                }
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafters", type=Path, nargs="*", default=[])
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--tiny", nargs="*", default=list(TINY), choices=list(TINY), help="tiny pairs measured here")
    args = parser.parse_args()
    engine = find_engine(args.engine)
    rows = [*smollm2(args, engine), *families()]
    write(rows, engine)
    for kind in args.tiny:
        rows.append(tiny(kind, engine, args.work.resolve()))
        write(rows, engine)
    print(json.dumps(rows, indent=1))


def write(rows: list[dict[str, Any]], engine: Engine) -> None:
    """The figure of what has been measured so far."""
    for row in rows:
        row["largest_gap"] = round(max(abs(a - b) for a, b in zip(row["predicted"], row["measured"], strict=True)), 4)
    _figures.write(
        "parity",
        claim=f"largest gap between predicted and measured acceptance at any position, {len(rows)} drafters with "
        f"position-0 acceptance of {min(r['measured'][0] for r in rows):.2f} or more",
        ours=max(r["largest_gap"] for r in rows),
        theirs=None,
        unit="absolute",
        rows=rows,
        engine_version=engine.version,
    )


if __name__ == "__main__":
    main()
