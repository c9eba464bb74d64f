"""Claim: `draftsmith diagnose` names the true cause of low acceptance. Faults of known cause are put into good trained
drafters and their data (_diagnose_table.py), sizes and places drawn at random; the contract is removed, or changed to
match the fault, so that no file tells. On good drafters it must say that nothing is wrong.

    python benchmarks/diagnose_faults.py --target MODEL --drafters A B C --capture RUN/capture --states RUN/extract \\
        --engine /opt/vllm --work out/faults [--seed 0] [--only NAME …]

All replay is on the CPU and of the trainer's model; the engine is only read. One line a fault goes to WORK/rows.jsonl, so
that a run that was stopped goes on, and several seeds stand side by side; then benchmarks/results/diagnose_faults.json is
written.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import OrderedDict
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import _diagnose_fit
import _figures
import torch
from _diagnose_table import FAULTS, IDS, Case, deep_copy
from safetensors.torch import load_file, save_file

from draftsmith.capture.rows import iter_rows, write_rows
from draftsmith.contract import Contract
from draftsmith.diagnose.load import load_subject
from draftsmith.diagnose.rank import apply, diagnose
from draftsmith.diagnose.replay import acceptance
from draftsmith.diagnose.subject import Sampler, SampleRow, Subject
from draftsmith.dialects.checkpoint import load_tensors
from draftsmith.drafter.norm import rms_norm
from draftsmith.engine.find import find_engine
from draftsmith.engine.reader import EngineFacts, read_engine
from draftsmith.extract.codecs import make_codec
from draftsmith.extract.store import StateStore, StateWriter
from draftsmith.extract.transformers_backend import TransformersStates
from draftsmith.record import content_hash, read_json, write_json
from draftsmith.target.config import load_config, target_facts
from draftsmith.target.tokenizer import TargetTokenizer
from draftsmith.target.weights import head_rule, read_embedding, read_final_norm
from draftsmith.train.data import split_rows
from draftsmith.ui import QuietUi
from draftsmith.vocab.map import VocabMap

SAMPLE, TRAIN_SAMPLE, MAX_TOKENS, STEPS, STORED, KEPT_ROWS = 8, 4, 112, 3, 3, 48
GOOD = "(good drafter)"


class Remembering(Sampler):
    """The target, loaded when it is needed, with the rows it has seen kept in memory and on disk: most faults look at the
    same ones, and a suite that goes on need not see them again."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.target, self.folder = target, folder
        self.seen: OrderedDict[str, SampleRow | None] = OrderedDict()

    @cached_property
    def backend(self) -> TransformersStates:  # type: ignore[override]
        return TransformersStates(self.target, [0])

    def row(self, row: Any, max_tokens: int = 1 << 20) -> SampleRow | None:
        ids = list(row.token_ids)[:max_tokens]
        if len(ids) < row.boundary + 4:
            return None
        key = content_hash([row.boundary, ids])[:24]
        if key not in self.seen:
            path = self.folder / f"{key}.safetensors"
            if not path.exists():
                found = super().row(row, max_tokens)
                assert found is not None
                self.folder.mkdir(parents=True, exist_ok=True)
                save_file({"streams": found.streams.contiguous(), "argmax": found.argmax}, path)
            t = load_file(path)
            self.seen[key] = SampleRow("", "", ids, row.boundary, t["streams"], t["argmax"])
            while len(self.seen) > KEPT_ROWS:
                self.seen.popitem(last=False)
        kept = self.seen[key]
        return None if kept is None else replace(kept, row_id=row.row_id, source=row.source)


class Suite:
    """What all faults share: target, engine, rows and states, read once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, args.work.resolve()
        self.target, self.capture = args.target.resolve(), args.capture.resolve()
        self.sampler = Remembering(self.target, self.work / "rows")
        self.facts: EngineFacts = read_engine(str(find_engine(args.engine).site))
        self.rows = list(iter_rows(self.capture))
        self.store = StateStore.open(args.states)
        self.tokenizer = TargetTokenizer.load(self.target)
        self.table = read_embedding(self.target)
        self.norm = read_final_norm(self.target).float()
        self.eps = head_rule(load_config(self.target)).eps
        self.layers = target_facts(self.target).num_layers
        self.good: dict[Path, tuple[float, float]] = {}
        subject = self.subject(args.drafters[0], self.capture, None, None)
        self.stored = [r.row_id for r in subject.train_rows][:STORED]
        positions = sum(r.tokens - r.boundary for r in subject.rows)
        print(f"{len(subject.rows)} rows, {positions} answer positions", flush=True)

    def subject(self, drafter: Path, rows: Path, states: Path | None, bench: dict[str, Any] | None) -> Any:
        return load_subject(
            None, str(self.target), drafter, rows, states, SAMPLE, MAX_TOKENS, STEPS, None, QuietUi(), self.facts, bench,
            self.sampler, TRAIN_SAMPLE,
        )  # fmt: skip

    def case(self, drafter: Path, rng: random.Random) -> Case:
        if drafter not in self.good:
            subject = self.subject(drafter, self.capture, None, None)
            found = acceptance(subject.setup(), subject.rows, STEPS)
            self.good[drafter] = (found.length, found.per_position[0])
        config = read_json(drafter / "config.json")
        served = {
            "norm": lambda x: rms_norm(x.float(), self.norm, self.eps).to(x.dtype),
            "streams": self.streams,
            "encode": self.tokenizer.encode,
            "decode": self.tokenizer.decode,
            "rows": rng.sample(self.rows, k=min(80, len(self.rows))),
        }
        return Case(
            rng, config, deep_copy(load_tensors(drafter / "model.safetensors")),
            {i: self.store.read(i) for i in self.stored}, list(config[IDS]), self.layers, self.table,
            *self.good[drafter], served=served,
        )  # fmt: skip

    def streams(self, states: Any) -> Any:
        """All streams of a stored row, as the target makes them."""
        ids = states.token_ids.tolist()
        row = next(r for r in self.rows if r.token_ids[: len(ids)] == ids)
        found = self.sampler.row(row)
        assert found is not None
        return found.streams

    def lend(self, case: Case, drafter: Path) -> None:
        """What a fault needs beyond files: states of a spoilt target, or a drafter trained on wrongly."""
        if (spoil := case.served.get("spoil")) is not None:
            other = TransformersStates(self.target, [0])
            other.aux_ids = sorted(case.ids)
            with torch.no_grad():
                for name, p in other.model.named_parameters():
                    if p.dim() == 2 and "embed" not in name:
                        p.copy_(spoil(p))
            case.states = {i: other.states([s.token_ids.tolist()], [s.boundary])[0] for i, s in case.states.items()}
        if (fit := case.served.get("fit")) is not None:
            seed = case.rng.randrange(1 << 30)
            case.tensors, trained = _diagnose_fit.fit(drafter, self.store, self.rows, self.target, seed=seed, **fit)
            if fit["rows"] is not None:
                # The capture of somebody who had no more rows: what was trained on, and the few that were held out.
                prompt_of = {r.row_id: r.prompt_id for r in self.rows}
                held = split_rows(self.store.index, 0.004, prompt_of.__getitem__).held_out
                keep = trained | {e.row_id for e in held}
                case.rows = [r for r in self.rows if r.row_id in keep]

    def write(self, case: Case, folder: Path, drafter: Path) -> tuple[Path, Path, Path]:
        """The case as folders: drafter, rows, states."""
        home = folder / "drafter-eagle3"
        home.mkdir(parents=True)
        save_file({n: t.contiguous() for n, t in case.tensors.items()}, home / "model.safetensors")
        write_json(home / "config.json", case.config)
        contract = matching(case, Contract.load(drafter)) if case.rng.random() < 0.5 else None
        if contract is not None:
            contract.save(home)
        rows = self.capture
        if case.rows is not None:
            write_rows(folder / "rows", case.rows)
            rows = folder / "rows"
        kept = self.store.contract.with_(final_state=case.final_state)
        with StateWriter(folder / "states", kept, make_codec("bf16")) as writer:
            for row_id, states in case.states.items():
                writer.add(row_id, replace(states, topk=None))
        return home, rows, folder / "states"

    def run(self, name: str, drafter: Path, seed: int) -> dict[str, Any]:
        rng = random.Random(f"{seed}:{name}:{drafter.name}")
        started = time.monotonic()
        case = self.case(drafter, rng)
        words = FAULTS[name].put(case) if name != GOOD else []
        self.lend(case, drafter)
        folder = self.work / "case"
        shutil.rmtree(folder, ignore_errors=True)
        home, rows, states = self.write(case, folder, drafter)
        subject = self.subject(home, rows, states, case.bench)
        found = subject if isinstance(subject, dict) else diagnose(subject, QuietUi())
        causes = found.pop("_causes", [])
        row: dict[str, Any] = {
            "fault": name,
            "seed": seed,
            "drafter": drafter.name,
            "contract": "matches the fault" if (home / "contract.json").exists() else "removed",
            "expected": list(FAULTS[name].expect) if name != GOOD else [],
            "words": words,
            "rank": rank_of(name, words, found["causes"]),
            "acceptance_length": (found["acceptance"] or {}).get("acceptance_length"),
            "good_acceptance_length": round(case.good_length, 3),
            "causes": [{k: c[k] for k in ("id", "cause", "score", "evidence")} for c in found["causes"]],
        }
        if row["rank"] == 1 and causes and causes[0].setup is not None:
            row |= self.mended(subject, causes[0], folder)
        return row | {"seconds": round(time.monotonic() - started, 1)}

    def mended(self, subject: Subject, cause: Any, folder: Path) -> dict[str, Any]:
        """What `--apply` writes, read back and replayed on the same rows."""
        apply(cause, subject, folder / "mended")
        again = self.subject(folder / "mended", self.capture, None, None)
        return {"applied_acceptance_length": round(acceptance(again.setup(), again.rows, STEPS).length, 3)}


def matching(case: Case, contract: Contract) -> Contract:
    """The good contract, changed to say what the spoilt files say."""
    c = case.config
    nested = (c.get("eagle_config") or {}).get(IDS)
    rope = c.get("rope_parameters")
    changes: dict[str, Any] = {
        "aux_layer_ids": c.get(IDS) or nested,
        "norms": {k: bool(c.get(k)) for k in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")},
        "rope": rope,
        "draft_vocab_size": c["draft_vocab_size"],
        "vocab_map_hash": None,
        "trained_length": min(contract.trained_length or 1 << 20, c["max_position_embeddings"]),
    }
    if "d2t" in case.tensors and "t2d" in case.tensors:
        changes["vocab_map_hash"] = VocabMap(case.tensors["d2t"].numpy(), case.tensors["t2d"].numpy()).hash()
    return contract.with_(**changes)


def rank_of(name: str, words: list[str], causes: list[dict[str, Any]]) -> int | None:
    """Place of the true cause, 1 = first: of an expected id, and its text or evidence holds all the words. None = not
    named. Of a good drafter: 1 where there is no cause at all."""
    if name == GOOD:
        return 1 if not causes else None
    for i, c in enumerate(causes, 1):
        text = " ".join([c["cause"], *c["evidence"]])
        if c["id"] in FAULTS[name].expect and all(w in text for w in words):
            return i
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option in ("--target", "--capture", "--states", "--work"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--drafters", type=Path, nargs="+", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--no-fit", action="store_true", help="leave out the faults that train (minutes each)")
    parser.add_argument("--figure", action="store_true", help="measure nothing: the figure of what WORK holds")
    parser.add_argument("--note", default="", help="a sentence to add to the figure's claim")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    log = args.work / "rows.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {(r["fault"], r["drafter"], r["seed"]) for r in rows}
    drafters = [d.resolve() for d in args.drafters]
    args.drafters = drafters
    jobs = [(GOOD, d) for d in drafters]
    jobs += [(name, drafters[random.Random(f"{args.seed}:{name}").randrange(len(drafters))]) for name in FAULTS]
    suite: Suite | None = None
    for name, drafter in jobs:
        if (name, drafter.name, args.seed) in known or (args.only and name not in args.only) or args.figure:
            continue
        if args.no_fit and name != GOOD and FAULTS[name].needs == "fit":
            continue
        suite = suite or Suite(args)
        row = suite.run(name, drafter, args.seed)
        first = row["causes"][0]["id"] if row["causes"] else "-"
        print(
            f"{row['rank'] or '-'!s:>2} {row['seconds']:5.0f} s  {name} ({row['acceptance_length']}): {first}",
            flush=True,
        )
        with log.open("a") as f:
            f.write(json.dumps(row) + "\n")
        rows.append(row)
    if not args.only:
        write_figure(rows, args)


def write_figure(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    faults = [r for r in rows if r["fault"] != GOOD]
    good = [r for r in rows if r["fault"] == GOOD]
    kinds = len({r["fault"] for r in faults})
    first = sum(r["rank"] == 1 for r in faults)
    three = sum(r["rank"] is not None and r["rank"] <= 3 for r in faults)
    _figures.write(
        "diagnose_faults",
        claim=f"faults whose true cause diagnose puts first, of {len(faults)}; among the first three: {three}; on "
        f"{len(good)} looks at good drafters it finds nothing wrong in {sum(r['rank'] == 1 for r in good)}; {kinds} of the "
        f"table's {len(FAULTS)} kinds, {len({r['seed'] for r in rows})} draws of sizes and places"
        + (f"; {args.note}" if args.note else ""),
        ours=first,
        theirs=len(faults),
        unit="faults",
        rows=rows,
        engine_version=find_engine(args.engine).version,
    )


if __name__ == "__main__":
    main()
