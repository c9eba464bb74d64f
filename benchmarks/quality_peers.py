"""Acceptance of drafters that the peers' own trainers made, beside ours: equal rows, steps, draft steps and shape.

    python benchmarks/quality_peers.py train specforge|speculators RUN --work W [--tries 1e-4:0,1e-3:0] [--steps 600]
    python benchmarks/quality_peers.py compare RUN --work W [--pack OUT]     offline walk → results/quality_peers.json
    python benchmarks/quality_peers.py serve --drafters W/chosen --target T --engine E --work DIR    → the same file

RUN: a run with vocab and extract (bf16; quality_states.py). Ours: `train_variants.py RUN --work W` first (variant bf16).

Every side reads the same packs (rows of at most 2,048 tokens, our order of that seed), takes the same number of optimizer
steps with the same number of draft steps on the same draft vocab, and starts its own way. SpecForge: TrainerCore, Eagle3
strategy, BF16Optimizer with its defaults (cosine, warmup 1.5 %, clip 0.5); a pack is a batch of its rows, padded, as its
collator makes. speculators: `speculators train` itself (its main), packs as its collator makes them, full attention. It
trains no lm_head and starts it from the target. A try is a learning rate and a seed; of several rates each peer is judged
by its best on the held-out rows. What they export with their own code is read by `draftsmith convert`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _figures import RESULTS, write
from train_variants import Data, K, per_step, summary, table, walked

from draftsmith.record import read_json, write_json
from train import versions as peers_versions

BATCH_TOKENS = 2048
ROWS, LENGTH = 12, 768
"""SpecForge's padded batch: one shape, so that it compiles once. Packs have at most 11 rows of at most 683 tokens."""
PART_BYTES = 15 << 20
DEFAULTS = {"specforge": "1e-4", "speculators": "muon/1e-3"}
SWEEPS = {
    "specforge": ("1e-4:0,1e-3:1", "1e-3:0,1e-3:2", "2e-3:0,5e-4:0"),
    "speculators": ("muon/1e-3:0,muon/1e-3:1", "adamw/1e-3:0,muon/1e-3:2"),
}
"""Tries (rate:seed) of processes that run side by side; what comes first matters most."""


class Packs:
    """What each peer is fed: the packs of a seed, and a row's states."""

    def __init__(self, data: Data, seed: int, steps: int) -> None:
        from draftsmith.train.data import Order

        order = Order.of_run(data.split.train, BATCH_TOKENS, seed, steps, 1.0)
        self.packs = [order.pack(i) for i in range(steps)]
        self.store = data.states("bf16")

    def row(self, row_id: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """A row's states, its final states [T, G] (zeros in the prompt, where nothing is learnt), its answer mask."""
        _, s = next(self.store.read_many([row_id]))
        final = s.aux.new_zeros(s.tokens, s.aux.shape[2])
        final[s.final_start :] = s.final
        return s, final, torch.arange(s.tokens) >= s.boundary


def train_specforge(data: Data, packs: Packs, attempt: str, seed: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """SpecForge's step on every pack; its own export. Returns the exported folder and what its trainer was given."""
    for key, value in {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(key, value)
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.export.to_hf import export_to_hf
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.strategies.base import Eagle3TrainStrategy

    from draftsmith.target.config import load_config
    from draftsmith.target.weights import head_rule, read_final_norm, read_lm_head

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    torch.manual_seed(seed)
    cfg = load_config(data.target)
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
            "rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size", "initializer_range")  # fmt: skip
    draft_config = folder / "draft_config.json"
    fixed = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
             "tie_word_embeddings": False, "pretraining_tp": 1, "draft_vocab_size": len(data.vocab.d2t)}  # fmt: skip
    draft_config.write_text(json.dumps(fixed | {k: cfg[k] for k in kept if k in cfg}))
    config = AutoDraftModelConfig.from_file(str(draft_config))
    draft = AutoDraftModel.from_config(config, torch_dtype=torch.bfloat16, attention_backend=attention).to(device)
    draft.load_embedding(str(data.target))
    draft.freeze_embedding()
    draft.t2d.copy_(torch.as_tensor(data.vocab.t2d))
    draft.d2t.copy_(torch.as_tensor(data.vocab.d2t))
    model = OnlineEagle3Model(draft, length=K, attention_backend=attention).train()
    head = TargetHead.__new__(TargetHead)  # its constructor wants an untied lm_head with an index
    torch.nn.Module.__init__(head)
    head.config, head.hidden_size, head.vocab_size = config, cfg["hidden_size"], cfg["vocab_size"]
    head.fc = torch.nn.Linear(head.hidden_size, head.vocab_size, bias=False, device="meta")
    rows = read_lm_head(data.target).to(device, torch.bfloat16)
    head.fc.weight = torch.nn.Parameter(rows, requires_grad=False)
    steps, lr = len(packs.packs), float(attempt)
    backend = FSDPTrainingBackend(
        ParallelConfig.from_distributed(), optimizer_factory=lambda t: BF16Optimizer(t, lr=lr, total_steps=steps)
    )
    wrapped = backend.prepare_model(model, wrap=False, optimizer_target=draft)
    strategy = Eagle3TrainStrategy(wrapped, target_head=head.eval())
    core = TrainerCore(strategy, backend)
    norm, eps = read_final_norm(data.target).float(), head_rule(cfg).eps
    G = head.hidden_size

    def batch_of(ids: list[str]) -> TrainBatch:
        tensors: dict[str, torch.Tensor] = {
            "input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
            "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long),
            "loss_mask": torch.zeros(ROWS, LENGTH, dtype=torch.long),
            "hidden_state": torch.zeros(ROWS, LENGTH, 3 * G, dtype=torch.bfloat16),
            "target": torch.zeros(ROWS, LENGTH, G, dtype=torch.bfloat16),
        }
        for i, row_id in enumerate(ids):
            s, final, answer = packs.row(row_id)
            wide = final.float()
            # its stored target is the state after the final norm
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm
            T = s.tokens
            tensors["input_ids"][i, :T] = s.token_ids
            tensors["attention_mask"][i, T:] = 0
            tensors["loss_mask"][i, :T] = answer.long()
            tensors["hidden_state"][i, :T] = s.aux.flatten(1)
            tensors["target"][i, :T] = normed.to(torch.bfloat16)
        moved = {k: v.to(device, non_blocking=True) for k, v in tensors.items()}
        return TrainBatch(["0"], "eagle3", moved, {"target_repr": "hidden_state"})

    losses = []
    for n, ids in enumerate(packs.packs):
        result = core.train_step(batch_of(ids))
        if n % 50 == 0 or n == steps - 1:
            losses.append((n + 1, round(float(result.loss), 4)))
            print(f"specforge {attempt} seed {seed} step {n + 1}: loss {losses[-1][1]}", flush=True)
    state = strategy.checkpoint_state_filter({k: v.cpu() for k, v in model.state_dict().items()})
    torch.save({"draft_state_dict": state}, folder / "training_state.pt")
    out = folder / "exported"
    export_to_hf(str(folder), str(draft_config), str(out), embedding_source=str(data.target))
    return out, {"lr": lr, "optimizer": "BF16Optimizer, cosine, warmup 1.5 %, clip 0.5", "losses": losses}


def stand_in_for_datasets() -> None:
    """speculators imports `datasets` for its file reader, which is not used here; it need not be importable (pyarrow)."""
    try:
        import datasets  # noqa: F401
    except ImportError:
        from importlib.machinery import ModuleSpec
        from importlib.util import module_from_spec

        found = module_from_spec(ModuleSpec("datasets", None))
        for name in ("Dataset", "concatenate_datasets", "load_dataset", "load_from_disk"):
            setattr(found, name, type(name, (), {}))
        sys.modules["datasets"] = found


def train_speculators(data: Data, packs: Packs, attempt: str, seed: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """`speculators train` with its own loader replaced by one over the same packs. Returns the saved folder and options."""
    stand_in_for_datasets()
    import speculators.models.eagle3  # noqa: F401  (registers the model)
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import cli
    from speculators.train.config import TrainConfig
    from speculators.train.data import BaseDataset, CollateFn

    if torch.cuda.is_available():
        import speculators.losses.fused as fused

        for name, value in list(vars(fused.loss_backward_kernel).items()):
            if isinstance(value, list):  # Dynamo refuses one list under two kernels (train_peers.py)
                setattr(fused.loss_backward_kernel, name, list(value))
    ids = sorted({i for p in packs.packs for i in p})
    number = {row_id: n for n, row_id in enumerate(ids)}

    class Rows(BaseDataset):
        def _compute_approx_lengths(self) -> list[int]:
            return [packs.row(i)[0].tokens for i in ids]

        def __len__(self) -> int:
            return len(ids)

        def _get_raw_data(self, index: int) -> dict[str, torch.Tensor]:
            s, final, answer = packs.row(ids[index])
            return {"hidden_states": s.aux.flatten(1), "input_ids": s.token_ids, "loss_mask": answer,
                    "verifier_last_hidden_states": final}  # fmt: skip

    def loaders(**options: Any) -> tuple[Any, None]:
        size, layers = options["hidden_size"], options["num_target_layers"]
        collate = CollateFn(BATCH_TOKENS, size, layers, dtype=torch.bfloat16, preprocess=shift_batch)
        batches = [[number[i] for i in pack] for pack in packs.packs]
        return torch.utils.data.DataLoader(Rows(BATCH_TOKENS), batch_sampler=batches, collate_fn=collate), None

    cli.create_train_val_loaders = loaders
    np.save(folder / "d2t.npy", np.asarray(data.vocab.d2t))
    np.save(folder / "t2d.npy", np.asarray(data.vocab.t2d))
    optimizer, lr = attempt.split("/")
    argv = {
        "--verifier-name-or-path": data.target, "--data-path": folder, "--save-path": folder / "saved",
        "--draft-vocab-size": len(data.vocab.d2t), "--d2t-path": folder / "d2t.npy", "--t2d-path": folder / "t2d.npy",
        "--total-seq-len": BATCH_TOKENS, "--full-attention-indices": 0, "--ttt-steps": K, "--epochs": 1,
        "--seed": seed, "--optimizer": optimizer, "--lr": lr, "--log-freq": 100, "--log-dir": folder / "logs",
    }  # fmt: skip
    if not torch.cuda.is_available():
        argv |= {"--loss-implementation": "eager", "--draft-attn-impl": "eager"}
    words = [str(w) for pair in argv.items() for w in pair]
    cli.main(TrainConfig.resolve(words))
    return folder / "saved/0", {"lr": float(lr), "optimizer": optimizer, "options": [w for w in words if "/" not in w]}


TRAINERS = {"specforge": train_specforge, "speculators": train_speculators}


def judge(folder: Path, data: Data) -> list[tuple[int, int, list[int]]]:
    """The walk of an exported drafter (vLLM dialect) over the held-out rows."""
    from draftsmith.dialects import foreign
    from draftsmith.drafter.model import Drafter
    from draftsmith.target.weights import read_embedding

    found = foreign.read(folder, target_layers=data.contract.target.num_layers)
    model = Drafter(found.config)
    model.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in found.tensors.items()})
    if model.embed_tokens is None:
        model.attach_embedding(read_embedding(data.target).float())
    return walked(model.eval(), data, torch.ones(found.config.num_aux_layers * found.config.target_hidden_size))


def attempt(peer: str, data: Data, lr: str, seed: int, steps: int, work: Path) -> dict[str, Any]:
    """Train, export, convert and walk one try; kept in the work folder."""
    from draftsmith.dialects.convert import convert_folder

    name = f"{peer}-{lr.replace('/', '-')}-{seed}-{steps}"
    kept, folder = work / f"{name}.json", work / name
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    packs = Packs(data, seed, steps)
    exported, given = TRAINERS[peer](data, packs, lr, seed, folder)
    seconds = time.monotonic() - began
    out = folder / f"{peer}-eagle3"
    aux = data.contract.aux_layer_ids
    told = convert_folder(exported, out, "vllm", target=data.target, aux_layers=aux, dtype="bfloat16")
    rows = judge(out, data)
    found = {"variant": peer, "try": lr, "seed": seed, "steps": steps, "K": K, "seconds": round(seconds, 1),
             "notes": told["notes"], "folder": str(out), "walk": rows, "losses": [], **given}  # fmt: skip
    kept.write_text(json.dumps(found))
    print(json.dumps({k: v for k, v in summary(found).items() if k not in ("losses", "options", "notes")}), flush=True)
    return found


def ready(peer: str, run: Path) -> None:
    """The peer's slow imports while the states are being made (WAIT in the environment: until this file is there)."""
    if peer == "specforge":
        import specforge.algorithms.eagle3.model
        import specforge.training.controller  # noqa: F401
    else:
        stand_in_for_datasets()
        import speculators.train.cli  # noqa: F401
    while "WAIT" in os.environ and not Path(os.environ["WAIT"]).exists():
        time.sleep(0.3)


def train(peer: str, data: Data, tries: str, steps: int, work: Path) -> None:
    """The tries in their order, while time lasts (DEADLINE in the environment)."""
    deadline = float(os.environ.get("DEADLINE", "inf"))
    needed = 0.0
    for n, (rate, seed) in enumerate(t.split(":") for t in tries.split(",")):
        if time.time() + needed > deadline:
            print(f"left out for want of time: {peer} {rate} seed {seed}", flush=True)
            continue
        began = time.time()
        attempt(peer, data, rate, int(seed), steps, work)
        needed = (time.time() - began) * (0.6 if n == 0 else 1.0)  # the first one compiles


def paired(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratio of tokens per target step, mean over each side's seeds, 95 % interval over paired held-out rows."""
    a, b = [table(f) for f in mine], [table(f) for f in theirs]
    rng = np.random.default_rng(0)
    n = len(a[0])

    def ratio(at: Any) -> float:
        return float(np.mean([per_step(x[at]) for x in a]) / np.mean([per_step(x[at]) for x in b]))

    draws = [ratio(rng.integers(0, n, n)) for _ in range(2000)]
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"ours": round(float(np.mean([per_step(x) for x in a])), 4), "theirs": round(float(np.mean([per_step(x) for x in b])), 4),
            "ratio": round(ratio(np.arange(n)), 4), "interval": [round(float(low), 4), round(float(high), 4)],
            "rows": n, "seeds": [len(a), len(b)]}  # fmt: skip


def export_ours(data: Data, trained: Path, work: Path) -> Path:
    """A drafter of ours as the export stage writes it."""
    from draftsmith.dialects import native, vllm

    out = work / "ours-eagle3"
    shutil.rmtree(out, ignore_errors=True)
    raw = json.loads((data.target / "config.json").read_text(encoding="utf-8"))
    tokens = {k: raw[k] for k in ("bos_token_id", "eos_token_id") if raw.get(k) is not None}
    vllm.write(native.read(trained), out, "bfloat16", tokens)
    return out


def best_of(tries: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The seeds of the setting with the highest mean, on the held-out rows; each side is chosen so."""
    return max(tries, key=lambda some: float(np.mean([per_step(table(f)) for f in some])))


def setting(found: dict[str, Any]) -> tuple[Any, ...]:
    """What a try of ours was trained with."""
    return found["lr"], found["warm_fraction"], *found.get("set", [])


def means(one: tuple[Any, ...], found: list[dict[str, Any]]) -> dict[str, Any]:
    """A setting's figure over its seeds."""
    lr, warm, *more = one
    value = float(np.mean([per_step(table(f)) for f in found]))
    return {"what": "ours, offline walk, mean over seeds", "lr": lr, "warm_fraction": warm, "set": more, "seeds": len(found),
            "tokens_per_target_step": round(value, 4)}  # fmt: skip


def compare(data: Data, work: Path, pack: Path | None) -> None:
    """The offline figures of everything found in the work folder, and the drafters to serve in work/chosen."""
    tries = [*sorted(work.glob("bf16-*-*.json")), *sorted(work.glob("*/bf16-*-*.json"))]
    mine = [json.loads(p.read_text()) for p in tries]
    settings = {setting(f): f for f in mine}
    ours = best_of([[g for g in mine if setting(g) == s] for s in settings])
    chosen = work / "chosen"
    shutil.rmtree(chosen, ignore_errors=True)
    chosen.mkdir()
    first = tries[mine.index(ours[0])]  # seed 0 of the best setting
    shutil.copytree(export_ours(data, first.parent / f"bf16-{ours[0]['seed']}/last", work), chosen / "ours-eagle3")
    rows: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {}
    for peer in TRAINERS:
        found = [json.loads(p.read_text()) for p in sorted(work.glob(f"{peer}-*-*.json"))]
        if not found:
            print(f"no drafter of {peer}", flush=True)
            continue
        rates = {f["try"]: [g for g in found if g["try"] == f["try"]] for f in found}
        same = best_of(list(rates.values()))
        best = same[0]
        default = [f for f in found if f["try"] == DEFAULTS[peer]]
        shutil.copytree(best["folder"], chosen / f"{peer}-eagle3")
        results[peer] = paired(ours, same)
        rows.append({"what": f"offline walk, ours against {peer}, its best rate ({best['try']})", **results[peer]})
        if default and default[0]["try"] != best["try"]:
            rows.append({"what": f"offline walk, ours against {peer}, its default rate", **paired(ours, default)})
        rows += [{k: v for k, v in summary(f).items() if k not in ("notes", "folder", "options")} for f in found]
    rows += [means(s, [f for f in mine if setting(f) == s]) for s in settings]
    rows += [summary(f) for f in mine]
    strongest = max(results.values(), key=lambda r: r["theirs"]) if results else {"ours": None, "theirs": None}
    if results:
        path = write(
            "quality_peers",
            claim=CLAIM, ours=strongest["ours"], theirs=strongest["theirs"],
            unit="tokens per target step (walk over held-out rows)", rows=rows,
        )  # fmt: skip
        record = read_json(path)
        record["versions"] |= peers_versions()
        write_json(path, record)
        print(json.dumps(results), flush=True)
    if pack is not None:
        carry(chosen, pack)


CLAIM = (
    "at equal rows, steps, draft steps and shape our drafter's acceptance is at least that of the drafters that "
    "SpecForge 0.2.0's and speculators 0.9.0's own trainers make (ours and SpecForge's at the best setting of those tried; "
    "speculators' at its documented one, Muon at 1e-3)"
)


def carry(folder: Path, out: Path) -> None:
    """The folder as drafters.tar.xz in parts of 15 MiB (join: cat drafters.* | tar xJf -)."""
    whole = folder.with_suffix(".tar.xz")
    with tarfile.open(whole, "w:xz", preset=1) as tar:
        tar.add(folder, arcname=folder.name)
    data = whole.read_bytes()
    for n, at in enumerate(range(0, len(data), PART_BYTES)):
        (out / f"drafters.{n:02d}").write_bytes(data[at : at + PART_BYTES])
    print(f"{len(data):,} bytes of drafters in {-(-len(data) // PART_BYTES)} parts", flush=True)


def serve(drafters: Path, target: Path, engine: Path | None, work: Path) -> None:
    """Each drafter in the same real engine on the same prompts; the figures join results/quality_peers.json."""
    from demo_seeds import measure

    keys = ("tokens_per_target_step", "acceptance_length", "acceptance_per_position", "drafts")
    rows: list[dict[str, Any]] = []
    version = None
    for drafter in sorted(drafters.iterdir()):
        bench = measure(target, engine, drafter, work / drafter.name, "drafter")
        version = bench["engine"]["version"]
        sets = {s: v["acceptance_length"] for s, v in bench["sets"].items()}
        rows.append(
            {"what": "served", "drafter": drafter.name.removesuffix("-eagle3")}
            | {k: bench[k] for k in keys}
            | {"sets": sets}
        )
        print(json.dumps(rows[-1]), flush=True)
    path = RESULTS / "quality_peers.json"
    record = read_json(path)
    length = {r["drafter"]: r["acceptance_length"] for r in rows}
    best = max(v for k, v in length.items() if k != "ours")
    record["rows"] = rows + [r for r in record["rows"] if r.get("what") != "served"]
    record |= {"ours": length["ours"], "theirs": best, "ratio": round(length["ours"] / best, 4)}
    record |= {"unit": "acceptance length (served, 80 prompts, greedy, 3 draft tokens)"}
    record["versions"]["vllm"] = version
    write_json(path, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    t, c, s = ways.add_parser("train"), ways.add_parser("compare"), ways.add_parser("serve")
    t.add_argument("peer", choices=TRAINERS)
    t.add_argument(
        "--tries", help="rates, comma-separated (speculators: optimizer/rate); then the best with seeds 1, 2"
    )
    t.add_argument("--steps", type=int, default=600)
    for p in (t, c):
        p.add_argument("run", type=Path)
    c.add_argument("--pack", type=Path, help="also write the chosen drafters there, in parts")
    for p in (t, c, s):
        p.add_argument("--work", type=Path, required=True)
    s.add_argument("--drafters", type=Path, required=True)
    s.add_argument("--target", type=Path, required=True)
    s.add_argument("--engine", type=Path)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.way == "serve":
        serve(given.drafters, given.target, given.engine, given.work)
        return
    if given.way == "train":
        ready(given.peer, given.run)
    data = Data(given.run.resolve(), given.work)
    if given.way == "compare":
        compare(data, given.work, given.pack)
        return
    train(given.peer, data, given.tries or ",".join(SWEEPS[given.peer]), given.steps, given.work)
    sys.stdout.flush()
    os._exit(0)  # the peers' background threads keep the interpreter alive otherwise


if __name__ == "__main__":
    main()
