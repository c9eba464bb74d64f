"""Claim: a drafter can be made, exported, checked and served for a target of each of these families in vLLM on the CPU.

    python benchmarks/target_table.py --engine /opt/vllm --work out/targets [--seconds 240] [--only Llama,OLMoE]

For every family a tiny random target (see _families.py: its answers are made learnable), then: greedy answers and their
aux states from the plain engine; a drafter of each form overfitted to them; its export in the vLLM dialect; `check` with
the plugin; the engine with that drafter over the same prompts, one at a time, with its own counters; the tokens compared
with the plain engine's; and parity: our own drafter, read from the exported files, replayed on the captured states, must
have as many tokens accepted at each position as the engine counted. The engine runs in its own process through its
Python interface (no HTTP). Every step leaves a file: call again until all is done.
Acceptance here is of an overfitted drafter on the prompts it was fitted to: it proves the road and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import _families
import _figures
import _torchvision

HERE = Path(__file__).parent
LAYERS = [2, 4, 5]
PROMPTS, PROMPT_TOKENS, ANSWER, K = 8, 10, 40, 3
SERVED = ANSWER - K - 2
"""Tokens asked of the engine with the drafter: the last proposals are then judged by captured tokens too."""
DRAFT_VOCAB, STEPS, UNROLLED = 160, 90, 1
LEAST, FAR = 0.2, 0.02
"""Position-0 acceptance at least; accepted tokens of our drafter's replay may differ by this share of the drafted ones
(its states were rounded to bfloat16 on the way)."""
PAGE = HERE.parent / "docs" / "reference" / "targets.md"


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def prompts() -> list[list[int]]:
    import random

    r = random.Random(5)
    return [[1, *(r.randrange(5, 261) for _ in range(PROMPT_TOKENS))] for _ in range(PROMPTS)]


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def engine_args(f: _families.Family) -> dict[str, Any]:
    return {word.removeprefix("--").replace("-", "_"): True for word in f.args}


def rows_of(home: Path) -> list[dict[str, Any]]:
    """Captured rows: token_ids int64 [T], aux float32 [T, A·G] (the last token has no states and is left out)."""
    import torch
    from safetensors.torch import load_file

    tokens = (read(home / "capture.json") or {})["tokens"]
    rows = []
    for i, (prompt, answer) in enumerate(zip(prompts(), tokens, strict=True)):
        found = load_file(home / "states" / f"row{i}.safetensors")
        states = torch.cat([found["streams"], found["last"][:, None]], dim=1)
        n = states.shape[0]
        rows.append({"ids": torch.tensor((prompt + answer)[: n + 1]), "aux": states.float().flatten(1)})
    return rows


def drafter_config(form: str, target: Path, hidden: int) -> Any:
    from draftsmith.drafter.config import DrafterConfig

    sizes: dict[str, Any] = {
        "form": form, "hidden_size": hidden, "target_hidden_size": hidden, "aux_layer_ids": LAYERS,
        "vocab_size": _families.VOCAB, "draft_vocab_size": DRAFT_VOCAB, "num_attention_heads": 4,
        "num_key_value_heads": 4 if form == "mla" else 2, "head_dim": 64, "intermediate_size": 256,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    if form == "mla":
        keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes |= {"mla": {k: _families.DEEPSEEK[k] for k in keys}, "rope": _families.YARN}
    return DrafterConfig.model_validate(sizes)


def fit(f: _families.Family, form: str, home: Path, place: Path) -> dict[str, Any]:
    """Overfit a drafter to the captured rows and export it; returns the loss at the end."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    from draftsmith.dialects import vllm
    from draftsmith.dialects.checkpoint import Checkpoint
    from draftsmith.drafter.model import Drafter, Steps
    from draftsmith.target.weights import read_embedding

    torch.manual_seed(0)
    rows = rows_of(home)
    hidden = rows[0]["aux"].shape[1] // len(LAYERS)
    model = Drafter(drafter_config(form, home / "target", hidden))
    model.attach_embedding(read_embedding(home / "target").float())
    counts = torch.bincount(torch.cat([r["ids"] for r in rows]), minlength=_families.VOCAB)
    chosen = counts.argsort(descending=True, stable=True)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(_families.VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    model.set_vocab(chosen - torch.arange(DRAFT_VOCAB), t2d)
    index = torch.full((_families.VOCAB,), -100)
    index[chosen] = torch.arange(DRAFT_VOCAB)
    spans, start, ids, aux, position = [], 0, [], [], []
    for r in rows:  # row t: states of position t and token t + 1
        n = len(r["ids"]) - 1
        spans.append((start, start + n))
        ids.append(torch.cat([r["ids"][1:], torch.full((K + 1,), -1)]))
        aux.append(r["aux"][:n])
        position.append(torch.arange(n))
        start += n
    joined, where = torch.cat(aux), torch.cat(position)

    def shifted(by: int) -> Any:
        return torch.cat([x[by : by + b - a] for x, (a, b) in zip(ids, spans, strict=True)])

    adam = torch.optim.AdamW([p for _, p in model.trained()], lr=3e-3, weight_decay=0.0)
    sched = torch.optim.lr_scheduler.OneCycleLR(adam, 4e-3, total_steps=STEPS)
    loss = torch.zeros(())
    for _ in range(STEPS):
        steps, state, loss = Steps(spans=spans), model.fuse(joined), torch.zeros(())
        for s in range(UNROLLED):
            embedding = model.embed(shifted(s).clamp(min=0))
            normed, state = model.step(state, embedding, where + s, steps)
            label = shifted(s + 1)
            wanted = torch.where(label >= 0, index[label.clamp(min=0)], -100)
            loss = loss + 0.7**s * F.cross_entropy(model.lm_head(normed), wanted, ignore_index=-100)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        sched.step()
    tensors = {n: t.detach() for n, t in model.state_dict().items()}
    vllm.write(Checkpoint(model.config, tensors), place / "drafter-eagle3", dtype="float32")
    return {"loss": round(loss.item(), 4), "rows": len(rows), "tokens": start}


def replay(home: Path, place: Path) -> dict[str, Any]:
    """What our own drafter, read from the exported files, would have had accepted on the same answers: the target's
    captured states in, three proposals from every position, then the engine's walk along the answer. Counts as vLLM's."""
    import torch

    from draftsmith.dialects.foreign import read as read_drafter
    from draftsmith.drafter.model import Drafter, Steps
    from draftsmith.target.weights import read_embedding

    found = read_drafter(place / "drafter-eagle3")
    model = Drafter(found.config)
    model.load_state_dict(found.tensors)
    model.attach_embedding(read_embedding(home / "target").float())
    counts: dict[str, Any] = {"drafts": 0, "accepted": 0, "per_position": [0] * K}
    for row in rows_of(home):
        ids, n = row["ids"].tolist(), len(row["ids"]) - 1
        steps, following, proposals = Steps(spans=((0, n),)), row["ids"][1:], []
        with torch.no_grad():
            state = model.fuse(row["aux"][:n])
            for s in range(K):
                normed, state = model.step(state, model.embed(following), torch.arange(n) + s, steps)
                following = model.draft_to_target(model.lm_head(normed).argmax(-1))
                proposals.append(following.tolist())
        start = PROMPT_TOKENS + 1
        known = start + 1  # the prompt and the token that its prefill gives
        while known - start < SERVED:
            t, accepted = known - 2, 0  # row t: states up to t, the newest token is t + 1
            while accepted < K and proposals[accepted][t] == ids[known + accepted]:
                counts["per_position"][accepted] += 1
                accepted += 1
            counts["drafts"] += 1
            counts["accepted"] += accepted
            known += accepted + 1
    return counts


def check_words(home: Path, place: Path, engine: str, dtype: str) -> tuple[str, list[str]]:
    from draftsmith.check.run import check_pair
    from draftsmith.check.types import Options

    options = Options(
        method="eagle3",
        plugin=True,
        num_speculative_tokens=K,
        max_model_len=256,
        dtype=dtype,
        platform="cpu" if dtype == "float32" else "cuda",
    )
    verdict = check_pair(str(home / "target"), str(place / "drafter-eagle3"), engine, options)
    return verdict.verdict, [f"{r.id}: {r.found}"[:200] for r in verdict.checks if r.status == "fail"]


def run_side(engine: Any, jobs: list[dict[str, Any]], work: Path, seconds: float, lock: str = "") -> None:
    from draftsmith.engine.inject import plugin_env

    left = [j for j in jobs if not Path(j["out"]).is_file()]
    if not left:
        return
    (work / "jobs.jsonl").write_text("".join(json.dumps(j) + "\n" for j in left))
    env = os.environ | plugin_env(engine.package.parent, base={})
    if any(j["vision"] for j in left):
        env["PYTHONPATH"] += f"{os.pathsep}{_torchvision.beside(engine.torch, work)}"
    side = [str(engine.python), str(HERE / "target_side.py"), str(work / "jobs.jsonl"), str(seconds)]
    subprocess.run(["flock", lock, *side] if lock else side, check=True, env=env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240, help="no new engine process of a step after so long")
    parser.add_argument("--lock", default="", help="hold this file's lock while the engine runs")
    parser.add_argument("--dtype", default="float32", help="of the engine; another one means a GPU, and bare rows")
    parser.add_argument("--only", default="", help="families, comma separated; none = all")
    args = parser.parse_args()
    from draftsmith.engine.find import find_engine

    engine, work = find_engine(args.engine), args.work.resolve()
    named = [n.strip() for n in args.only.split(",") if n.strip()]
    families = [f for f in _families.FAMILIES if (f.name in named if named else f.table)]
    homes = {f.name: work / slug(f.name) for f in families}
    pairs = [(f, form, homes[f.name] / form) for f in families for form in f.forms]
    for f in families:
        if not (homes[f.name] / "target" / "generation_config.json").is_file():
            _families.write_target(f, homes[f.name] / "target")
    captures = [capture_job(f, homes[f.name], args.dtype) for f in families]
    for vision in (False, True):
        run_side(engine, [j for j in captures if j["vision"] is vision], work, args.seconds, args.lock)
    for f, form, place in pairs:
        captured = read(homes[f.name] / "capture.json")
        if captured is None or "error" in captured or (place / "fit.json").is_file():
            continue
        place.mkdir(exist_ok=True)
        fitted = fit(f, form, homes[f.name], place)
        fitted["verdict"], fitted["failed"] = check_words(homes[f.name], place, str(engine.site), args.dtype)
        (place / "fit.json").write_text(json.dumps(fitted))
        print("fitted", f.name, form, fitted["loss"], fitted["verdict"], flush=True)
    ready = [(f, form, place) for f, form, place in pairs if (place / "fit.json").is_file()]
    serves = [serve_job(f, homes[f.name], place, args.dtype) for f, _, place in ready]
    for vision in (False, True):
        run_side(engine, [j for j in serves if j["vision"] is vision], work, args.seconds, args.lock)
    rows = [row_of(f, form, homes[f.name], place) for f, form, place in pairs]
    for r in rows:
        print(r["family"], r["form"], r["result"], r.get("acceptance_position_0"), r.get("parity"), r.get("error", ""))
    if named:
        return
    if left := [r for r in rows if r["result"] == "not run"]:
        print(f"{len(left)} left: call again")
        return
    write(rows, engine.version)


def capture_job(f: _families.Family, home: Path, dtype: str) -> dict[str, Any]:
    return {"kind": "capture", "target": str(home / "target"), "args": engine_args(f), "layers": LAYERS,
            "states": str(home / "states"), "prompts": prompts(), "max_tokens": ANSWER, "dtype": dtype,
            "vision": f.wrap == "qwen3_vl_moe", "out": str(home / "capture.json")}  # fmt: skip


def serve_job(f: _families.Family, home: Path, place: Path, dtype: str) -> dict[str, Any]:
    spec = {"method": "eagle3", "model": str(place / "drafter-eagle3"), "num_speculative_tokens": K}
    return {"kind": "serve", "target": str(home / "target"), "args": engine_args(f), "speculative": spec,
            "prompts": prompts(), "max_tokens": SERVED, "dtype": dtype, "vision": f.wrap == "qwen3_vl_moe",
            "out": str(place / "serve.json")}  # fmt: skip


def row_of(f: _families.Family, form: str, home: Path, place: Path) -> dict[str, Any]:
    """One line of the table. result: "works", "not run", or at which step it ended."""
    row: dict[str, Any] = {"family": f.name, "architecture": f.architecture, "form": form, "result": "not run"}
    captured, fitted = read(home / "capture.json"), read(place / "fit.json")
    served = read(place / "serve.json")
    for step, found in (("capture", captured), ("serve", served)):
        if found and "error" in found:
            said = fitted is not None and fitted["verdict"] == "no"
            return row | {
                "result": "the engine stops, as check says" if said and step == "serve" else f"{step} failed",
                "check": fitted["verdict"] if fitted else None,
                "error": found["error"],
                "at": found["at"],
                "line": found.get("line"),
            }
    if not (captured and fitted and served):
        return row
    per_position = [n / served["drafts"] for n in served["per_position"]] if served["drafts"] else [0.0]
    same = sum(a == b[: len(a)] for a, b in zip(served["tokens"], captured["tokens"], strict=True))
    ours = replay(home, place)
    held = abs(ours["accepted"] - served["accepted"]) <= FAR * served["drafted"]
    row |= {
        "class": served["class"], "interface": served["interface"], "check": fitted["verdict"],
        "drafts": served["drafts"], "acceptance_position_0": round(per_position[0], 3),
        "acceptance_length": round(1 + served["accepted"] / served["drafts"], 3) if served["drafts"] else None,
        "distinct_answer_tokens": len({t for a in captured["tokens"] for t in a}),
        "answers_equal": f"{same} of {len(captured['tokens'])}", "parity": "held" if held else "not held",
        "engine_counts": [served["drafts"], *served["per_position"]],
        "replayed_counts": [ours["drafts"], *ours["per_position"]],
    }  # fmt: skip
    faults = [
        *(["check says no"] if fitted["verdict"] != "yes" else []),
        *(["position 0 under 0.2"] if per_position[0] < LEAST else []),
        *(["parity not held"] if not held else []),
        *(["answers differ"] if same < len(captured["tokens"]) else []),
    ]
    return row | {"result": "works" if not faults else "; ".join(faults)}


def write(rows: list[dict[str, Any]], version: str | None) -> None:
    names = list(dict.fromkeys(r["family"] for r in rows))
    working = [n for n in names if any(r["result"] == "works" for r in rows if r["family"] == n)]
    _figures.write(
        "target_table",
        claim="tiny targets of so many families go the road in vLLM on the CPU: answers and states from the engine, a "
        "drafter overfitted to them, check, counters with at least 0.2 at position 0, equal answers, parity of the counts; "
        "a second form of drafter that the engine refuses stands among the rows with the reason",
        ours=len(working),
        theirs=len(names),
        unit="families",
        rows=rows,
        engine_version=version,
    )
    PAGE.write_text(page(rows, version), encoding="utf-8")
    print(f"{len(working)} of {len(names)} families; {[n for n in names if n not in working]}")


def page(rows: list[dict[str, Any]], version: str | None) -> str:
    """The table for docs/reference."""
    lines = [
        "# Targets",
        "",
        f"Tiny random targets in vLLM {version} on the CPU, written by `benchmarks/target_table.py` from its run: a drafter",
        "overfitted to the target's own answers, with the engine's counters on the same prompts. Acceptance therefore proves",
        "the road, not a drafter. *interface*: the class's own, or the one that draftsmith's plugin gives. *parity*: our drafter,",
        "replayed on the captured states, has as many tokens accepted as the engine counted.",
        "",
        "Without draftsmith's plugin this engine stops at six of them on the CPU: Gemma-3, GLM-4.5, OLMoE and Mixtral have no",
        "interface; MiniMax-M2's routing and Kimi-K2.5's processor meet faults of the CPU build that the plugin mends",
        "(`draftsmith check` names them). Qwen3-VL-MoE is asked for text alone; its class imports torchvision, whose Python part",
        "was put beside the engine. A target with latent attention takes a Llama drafter on a GPU only.",
        "",
        "| family | class in the engine | interface | drafter | position 0 | answers equal | parity | result |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        why = r["result"] + (f": {r['error']} ({r['at']})" if r.get("error") else "")
        cells = [r["family"], r.get("class", r["architecture"]), r.get("interface", ""), r["form"],
                 r.get("acceptance_position_0", ""), r.get("answers_equal", ""), r.get("parity", ""), why]  # fmt: skip
        lines.append("| " + " | ".join(str(c).replace("|", "/") for c in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
