"""Claims about training, on the same rows and seeds, by paired walks over held-out rows.

codec_quality: a drafter trained from fp8 + top-k states reaches tokens per target step within 1 % of the one trained
from bf16 states. start_layer: what copying a decoder layer of the target into the drafter gains at equal steps.
cpu_products (variant "rounded"): what products in bfloat16 on a CPU that has them (train/precision.py) cost in quality,
and how much faster the training is, against the variant "bf16", whose products there are float32.

For each seed the variants train on the same packs in the same order; then every drafter walks the same held-out rows as
the engine would (train/validate.py; on texts of the engine's own this forecast was within .0012 of the engine at each
position, results/demo_seeds.json), on bf16 states whatever it was trained from. Rows are paired: the interval is of
the ratio of tokens per target step over rows drawn again and again, all seeds together. Answers were sampled, so the
walk counts the target's first choice, as greedy decoding would.

    python benchmarks/train_variants.py RUN --work FOLDER [--seeds 3] [--steps 100] [--variants bf16,fp8-topk,layer]

RUN: a run's folder with vocab and extract (bf16), its own or of quality_states.py. Trains where `draftsmith train` does: on
a GPU in bfloat16, else on the CPU. Finished (variant, seed) pairs in --work are not trained again, so variants may be
trained by processes side by side and be compared by a last call.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _figures import write

from draftsmith.contract import Contract
from draftsmith.drafter.model import Drafter
from draftsmith.extract.convert import convert_store
from draftsmith.extract.store import StateStore
from draftsmith.recipe import TrainSection, load_recipe
from draftsmith.stage import Run
from draftsmith.target.config import load_config
from draftsmith.target.resolve import resolve_target
from draftsmith.target.weights import layer_weights, read_embedding
from draftsmith.train.checkpoint import write_native
from draftsmith.train.core import build
from draftsmith.train.data import channel_rms, read_pack, split_rows
from draftsmith.train.init import drafter_config, first_weights, start_layer, target_head
from draftsmith.train.loop import Training
from draftsmith.train.objective import TargetHead
from draftsmith.train.precision import has_bf16_products
from draftsmith.train.stage import finish_contract, pick_device
from draftsmith.train.validate import agreement, proposals, walk
from draftsmith.ui import QuietUi
from draftsmith.vocab.map import VocabMap

K = 3
HELD_OUT = 0.2


class Kept:
    """A store whose rows are decoded once and kept in memory, for all epochs and seeds."""

    def __init__(self, store: StateStore) -> None:
        self.store, self.contract, self.index = store, store.contract, store.index
        self.rows: dict[str, Any] = {}

    def read_many(self, row_ids: Iterable[str]) -> Iterator[tuple[str, Any]]:
        for row_id in row_ids:
            if row_id not in self.rows:
                self.rows[row_id] = self.store.read(row_id)
            yield row_id, self.rows[row_id]


class Unjudged(Training):
    """The loop without its validations: the walk over the held-out rows at the end is the only judge."""

    def _validate(self) -> None:
        pass


class Data:
    """A run's states, split once; the short codec's are made when they are first wanted."""

    def __init__(self, folder: Path, work: Path) -> None:
        recipe = load_recipe(folder / "recipe.json")
        self.run, self.folder, self.work = Run(recipe, folder, QuietUi()), folder, work
        self.target = resolve_target(recipe.target)
        self.vocab = VocabMap.load(folder / "vocab")
        bf16 = StateStore.open(folder / "extract")
        if bf16.codec.name != "bf16":
            raise SystemExit(f"the run's states are {bf16.codec.name}; both codecs are made from bf16 ones")
        self.stores = {"bf16": Kept(bf16)}
        self.split = split_rows(bf16.index, HELD_OUT)
        ids = len(self.vocab.d2t)
        self.contract: Contract = bf16.contract.with_(draft_vocab_size=ids, vocab_map_hash=self.vocab.hash())

    def states(self, codec: str) -> Kept:
        if codec not in self.stores:
            short, vocab = self.work / codec, self.folder / "vocab"
            convert_store(self.folder / "extract", short, codec, QuietUi(), vocab=vocab, model=self.target)
            self.stores[codec] = Kept(StateStore.open(short))
        return self.stores[codec]


def start(data: Data, seed: int, layer: int | None) -> tuple[Drafter, TargetHead, list[str]]:
    head = target_head(data.target, data.vocab.draft_to_target().tolist())
    embedding = read_embedding(data.target).float()
    model = Drafter(drafter_config(data.run.recipe.drafter, load_config(data.target), data.contract))
    model.set_vocab(torch.as_tensor(data.vocab.d2t), torch.as_tensor(data.vocab.t2d))
    model.attach_embedding(embedding)
    taken = first_weights(model, data.target, head, "target", seed, embedding)
    if layer is not None:
        taken += start_layer(model, {k: v.float() for k, v in layer_weights(data.target, layer).items()})
    return model, head, taken


def walked(model: Drafter, data: Data, inverse_rms: torch.Tensor) -> list[tuple[int, int, list[int]]]:
    """Per held-out row: tokens, drafts, accepted per position. The drafter in float32 on the CPU."""
    out = []
    store = data.states("bf16")
    for e in data.split.held_out:
        batch = read_pack(store, [e.row_id], e.tokens, inverse_rms, torch.float32, pad=False)
        counts = agreement(batch, proposals(model, batch, K)).tolist()
        found = walk(counts, e.boundary, e.tokens, K)
        out.append((found.tokens, found.drafts, found.accepted))
    return out


def section_of(steps: int, seed: int, lr: float, warm: float, more: dict[str, Any] | None = None) -> TrainSection:
    return TrainSection.model_validate(
        {"steps": steps, "ttt_steps": K, "warm_fraction": warm, "lr": lr, "seed": seed, "batch_tokens": 2048,
         "eval_every": 10**6} | (more or {})
    )  # fmt: skip


def train(data: Data, variant: str, seed: int, section: TrainSection, work: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    store = data.states("fp8-topk" if variant == "fp8-topk" else "bf16")
    # "layer" is the last decoder layer, "layer15" the one of that number
    number = variant.removeprefix("layer")
    layer = (int(number) if number else data.contract.target.num_layers - 1) if variant.startswith("layer") else None
    model, head, taken = start(data, seed, layer)
    rms = channel_rms(store, data.split.train)
    device, dtype = pick_device(section)
    model = model.to(device, dtype)
    core = build(model, head.to(device, dtype), section)
    longest = min(max(e.tokens for e in data.split.train), section.batch_tokens)
    contract = finish_contract(data.contract, model.config, longest, K)
    began = time.monotonic()
    training = Unjudged(
        core=core, source=store, split=data.split, section=section, contract=contract,
        folder=work / f"{variant}-{seed}", ui=QuietUi(), rms=rms, device=device, dtype=dtype,
        bf16_products=variant == "rounded",
    )  # fmt: skip
    result = training.run()
    seconds = time.monotonic() - began
    model = model.to("cpu").eval()
    write_native(work / f"{variant}-{seed}/last", model, rms, contract)
    model = model.float()
    rows = walked(model, data, 1.0 / rms)
    lines = (work / f"{variant}-{seed}/metrics.jsonl").read_text().splitlines()
    losses = [(m["step"], m["loss"]) for m in map(json.loads, lines) if "loss" in m]
    return {
        "variant": variant, "seed": seed, "steps": result["steps"], "tokens": result["tokens"], "K": K,
        "lr": section.lr, "warm_fraction": section.warm_fraction, "seconds": round(seconds, 1), "device": device.type,
        "taken": taken, "losses": losses, "walk": rows,
    }  # fmt: skip


def per_step(rows: np.ndarray) -> float:
    """tokens / (tokens - accepted) of rows [N, (tokens, accepted)]."""
    tokens, accepted = rows.sum(0)
    return float(tokens / (tokens - accepted))


def table(found: dict[str, Any]) -> np.ndarray:
    return np.array([[t, sum(a)] for t, _, a in found["walk"]], dtype=float)


def compare(found: dict[tuple[str, int], dict[str, Any]], ours: str, theirs: str, seeds: int) -> dict[str, Any]:
    """Ratio of tokens per target step, mean over seeds, with a 95 % interval over paired held-out rows."""
    pairs = [(table(found[ours, s]), table(found[theirs, s])) for s in range(seeds)]
    rng = np.random.default_rng(0)
    n = len(pairs[0][0])
    draws = []
    for _ in range(2000):
        at = rng.integers(0, n, n)
        draws.append(np.mean([per_step(a[at]) for a, _ in pairs]) / np.mean([per_step(b[at]) for _, b in pairs]))
    mine, other = (float(np.mean([per_step(p[i]) for p in pairs])) for i in (0, 1))
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"ours": round(mine, 4), "theirs": round(other, 4), "ratio": round(mine / other, 4),
            "interval": [round(float(low), 4), round(float(high), 4)], "rows": n}  # fmt: skip


def summary(found: dict[str, Any]) -> dict[str, Any]:
    drafts = sum(d for _, d, _ in found["walk"])
    accepted = np.array([a for _, _, a in found["walk"]]).sum(0)
    keep = {k: v for k, v in found.items() if k not in ("walk", "losses")}
    return keep | {
        "tokens_per_target_step": round(per_step(table(found)), 4),
        "acceptance_per_position": [round(float(a) / drafts, 4) for a in accepted],
        "held_out_tokens": sum(t for t, _, _ in found["walk"]),
        "losses": found["losses"][:: max(1, len(found["losses"]) // 6)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.0015)
    parser.add_argument("--warm", type=float, default=0.75, help="share of the steps with one draft step alone")
    parser.add_argument(
        "--set",
        nargs="*",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="other keys of the recipe's train section",
    )
    parser.add_argument("--variants", default="bf16,fp8-topk,layer")
    parser.add_argument("--train-only", action="store_true", help="write no figure: other processes train the rest")
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    data = Data(given.run.resolve(), given.work)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    variants = given.variants.split(",")
    if "rounded" in variants and not has_bf16_products():
        raise SystemExit("this CPU has no bfloat16 products")
    for seed in range(given.seeds):
        for variant in variants:
            path = given.work / f"{variant}-{seed}-{given.steps}.json"
            if not path.is_file():
                more = dict(pair.split("=", 1) for pair in given.set)
                section = section_of(given.steps, seed, given.lr, given.warm, more)
                path.write_text(json.dumps(train(data, variant, seed, section, given.work) | {"set": given.set}))
            found[variant, seed] = json.loads(path.read_text())
            print(json.dumps({k: v for k, v in summary(found[variant, seed]).items() if k != "losses"}), flush=True)
    if given.train_only:
        return
    rows = [summary(f) for f in found.values()]
    trained = f"{given.seeds} seed{'s' * (given.seeds > 1)} of {given.steps} steps"

    def claim(name: str, variant: str, text: str, rates: bool = False) -> None:
        """One variant's figure against "bf16"."""
        result = compare(found, variant, "bf16", given.seeds)
        chosen = [r for r in rows if r["variant"] in ("bf16", variant)]
        if rates:
            of = {v: [r for r in chosen if r["variant"] == v] for v in (variant, "bf16")}
            result["tokens_per_second"] = {
                v: round(sum(r["tokens"] for r in o) / sum(r["seconds"] for r in o)) for v, o in of.items()
            }
        write(
            name, claim=f"{text} ({trained})", ours=result["ours"], theirs=result["theirs"],
            unit="tokens per target step (walk over held-out rows)", rows=[result, *chosen],
        )  # fmt: skip
        print(json.dumps({name: result}), flush=True)

    if "fp8-topk" in variants:
        claim(
            "codec_quality",
            "fp8-topk",
            "a drafter trained from fp8 + top-k states is within 1 % of the one trained from bf16 states",
        )
    if "rounded" in variants:
        claim(
            "cpu_products",
            "rounded",
            "a drafter trained with bfloat16 products on a CPU beside one trained with float32's",
            True,
        )
    for variant in (v for v in variants if v.startswith("layer")):
        claim(
            f"start_{variant}",
            variant,
            "starting from a decoder layer of the target against starting without it, at equal steps",
        )


if __name__ == "__main__":
    main()
