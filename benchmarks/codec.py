"""Claim: at the story's shape (three aux streams and a final state, 7,168 wide) the fp8-topk codec takes at most 22,500
bytes a token instead of 57,344; and what it costs in accuracy and time.

    python benchmarks/codec.py [--states RUN/extract --model TARGET --vocab RUN/vocab]

The bytes are those of written files, indexes and headers included. Accuracy is measured on real states where a store is
given: relative L2 of the aux streams, top-1 agreement and KL divergence (draft vocab, nats) of the teacher against bf16.
Times are CPU seconds of one process, random states of the story's shape: encode + write, and read + decode from a warm
file cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import _figures
import torch

from draftsmith.contract import Contract, TargetFacts
from draftsmith.extract.codecs import make_codec, topk_of_logits
from draftsmith.extract.states import States, TopK
from draftsmith.extract.store import StateStore, StateWriter

HIDDEN, AUX, DRAFT, K = 7168, 3, 32000, 128
ROWS, TOKENS = 8, 256


def contract() -> Contract:
    facts = TargetFacts(
        name="story",
        config_hash="-",
        architecture="KimiK25ForConditionalGeneration",
        model_type="kimi_k2",
        outer_model_type="kimi_k25",
        hidden_size=HIDDEN,
        num_layers=61,
        vocab_size=163840,
    )
    return Contract(target=facts, aux_layer_ids=[2, 30, 58], final_state="pre_norm")


def story_row(seed: int) -> States:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, DRAFT, generator=g) * 3
    return States(
        token_ids=torch.randint(0, 163840, (TOKENS,), generator=g),
        boundary=1,
        aux=torch.randn(TOKENS, AUX, HIDDEN, generator=g).bfloat16(),
        final_start=0,
        final=torch.randn(TOKENS, HIDDEN, generator=g).bfloat16(),
        argmax=torch.randint(0, 163840, (TOKENS,), generator=g),
        topk=topk_of_logits(logits, K),
    )


def size_and_speed(name: str, rows: list[States]) -> dict[str, Any]:
    tokens = sum(r.tokens for r in rows)
    params = {"k": K, "draft_vocab_size": DRAFT} if name == "fp8-topk" else None
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        started = time.process_time()
        with StateWriter(folder, contract(), make_codec(name, params)) as writer:
            for i, r in enumerate(rows):
                writer.add(f"r{i}", r)
        write = time.process_time() - started
        size = sum(p.stat().st_size for p in folder.iterdir())
        store = StateStore.open(folder)
        started = time.process_time()
        for i in range(len(rows)):
            s = store.read(f"r{i}")
            float(s.aux.sum(dtype=torch.float32))  # touch every byte
        read = time.process_time() - started
    # The header's room (1 MiB a shard of about 1 GB) is spread over a full shard, not over this small one.
    header = (1 << 20) * (size / 1e9)
    return {
        "codec": name,
        "bytes_per_token": round((size - (1 << 20) + header) / tokens, 1),
        "write_tokens_per_cpu_second": round(tokens / write),
        "read_tokens_per_cpu_second": round(tokens / read),
    }


def accuracy(states: Path, model: Path, vocab: Path, count: int) -> list[dict[str, Any]]:
    """fp8 and fp8-topk against the bf16 store's own rows."""
    from dataclasses import replace

    from draftsmith.extract.head import WeightsHead
    from draftsmith.vocab.map import VocabMap

    store, ids = StateStore.open(states), torch.as_tensor(VocabMap.load(vocab).draft_to_target())
    head = WeightsHead(model, ids)
    out = []
    for name in ("fp8", "fp8-topk"):
        codec = make_codec(name, {"k": K, "draft_vocab_size": len(ids)})
        squares = [0.0, 0.0]
        same = positions = 0
        kl = 0.0
        for entry in store.index[:count]:
            s = store.read_entry(entry)
            assert s.final is not None
            whole = head.topk(s.final, len(ids))
            full = torch.zeros(len(whole.ids), len(ids)).scatter(1, whole.ids, whole.logits)
            given = replace(s, topk=topk_of_logits(full, K))
            got = codec.decode(codec.encode(given), s.boundary, s.final_start)
            diff = got.aux.float() - s.aux.float()
            squares[0] += float(diff.square().sum())
            squares[1] += float(s.aux.float().square().sum())
            log_p = torch.log_softmax(full, -1)
            if isinstance(got.topk, TopK):
                # all that the trainer has: k probabilities, and the rest's mass spread as one class
                kept = got.topk.logits - got.topk.log_total().unsqueeze(1)
                mine, theirs = log_p.gather(1, got.topk.ids), kept
                rest_p = (1 - mine.exp().sum(1)).clamp(min=1e-12)
                rest_q = (got.topk.rest - got.topk.log_total()).exp().clamp(min=1e-12)
                kl += float((mine.exp() * (mine - theirs)).sum() + (rest_p * (rest_p / rest_q).log()).sum())
                top = got.topk.ids[:, 0]
            else:
                assert got.final is not None
                again = head.topk(got.final, len(ids))
                log_q = torch.log_softmax(torch.zeros_like(full).scatter(1, again.ids, again.logits), -1)
                kl += float((log_p.exp() * (log_p - log_q)).sum())
                top = again.ids[:, 0]
            same += int((top == whole.ids[:, 0]).sum())
            positions += len(top)
        out.append(
            {
                "codec": name,
                "target": store.contract.target.name,
                "positions": positions,
                "aux_relative_l2": round((squares[0] / squares[1]) ** 0.5, 5),
                "teacher_top1": round(same / positions, 5),
                "teacher_kl": round(kl / positions, 6),
            }
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=Path, help="a bf16 store of real states")
    parser.add_argument("--model", type=Path, help="its target's folder")
    parser.add_argument("--vocab", type=Path, help="the run's vocab folder")
    parser.add_argument("--rows", type=int, default=40, help="rows of the store to measure")
    args = parser.parse_args()
    rows = [story_row(i) for i in range(ROWS)]
    measured = [size_and_speed(name, rows) for name in ("bf16", "fp8", "fp8-topk")]
    if args.states:
        measured += accuracy(args.states, args.model, args.vocab, args.rows)
    path = _figures.write(
        "codec",
        claim="bytes per token at the story's shape, fp8-topk (ours) against bf16 (theirs)",
        ours=measured[2]["bytes_per_token"],
        theirs=57344,
        unit="bytes per token",
        rows=measured,
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
