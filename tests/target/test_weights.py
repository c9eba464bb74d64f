"""The few needed weights: right rows, right table, tied or not, quantised or not, from disk and over HTTP ranges."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.errors import UserError
from draftsmith.target.tensors import Checkpoint
from draftsmith.target.weights import head_rule, layer_weights, read_embedding, read_final_norm, read_lm_head

V, G = 96, 32


def folder(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    base = {"model_type": "llama", "architectures": ["X"], "hidden_size": G, "num_hidden_layers": 8, "vocab_size": V}
    (path / "config.json").write_text(json.dumps(base | {"tie_word_embeddings": False} | config))
    return path


def table(seed: int, rows: int = V, width: int = G) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


PLAIN = {
    "model.embed_tokens.weight": table(0),
    "model.norm.weight": torch.ones(G),
    "lm_head.weight": table(1),
    "model.layers.3.self_attn.q_proj.weight": table(2, G),
    "model.layers.3.mlp.experts.0.up_proj.weight": table(3, G),
    "model.layers.30.self_attn.q_proj.weight": table(4, G),
}


def test_whole_tables_and_rows_in_any_order(tmp_path: Path) -> None:
    f = folder(tmp_path, PLAIN)
    assert torch.equal(read_embedding(f), PLAIN["model.embed_tokens.weight"])
    rows = [95, 0, 40, 41, 0]
    assert torch.equal(read_lm_head(f, rows), PLAIN["lm_head.weight"][rows])
    assert read_lm_head(f, []).shape == (0, G)
    assert set(layer_weights(f, 3)) == {"self_attn.q_proj.weight"}
    with pytest.raises(UserError, match="row 96"):
        read_lm_head(f, [96])
    with pytest.raises(UserError, match=r"layers\.4\."):
        layer_weights(f, 4)


def test_rows_are_read_by_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.target import tensors

    big = {**PLAIN, "lm_head.weight": table(9, 4096)}
    f = folder(tmp_path, big, vocab_size=4096)
    read: list[int] = []
    real = tensors.LocalBytes.read
    monkeypatch.setattr(tensors.LocalBytes, "read", lambda s, a, n: (read.append(n), real(s, a, n))[1])
    got = read_lm_head(f, [1, 2000, 4000])
    assert torch.equal(got, big["lm_head.weight"][[1, 2000, 4000]])
    assert sum(read) < 8192


def test_tied_heads_follow_the_config(tmp_path: Path) -> None:
    tensors = {k: v for k, v in PLAIN.items() if k != "lm_head.weight"}
    tied = folder(tmp_path / "a", tensors, tie_word_embeddings=True)
    assert torch.equal(read_lm_head(tied, [3]), tensors["model.embed_tokens.weight"][[3]])
    with pytest.raises(UserError, match="tie_word_embeddings false"):
        read_lm_head(folder(tmp_path / "b", tensors))
    wrapped = folder(
        tmp_path / "c",
        tensors,
        tie_word_embeddings=True,
        text_config={"model_type": "x", "vocab_size": V, "hidden_size": G, "num_hidden_layers": 8},
    )
    assert read_lm_head(wrapped).shape == (V, G)


def test_padded_tables_are_cut_and_short_ones_refused(tmp_path: Path) -> None:
    padded = {**PLAIN, "model.embed_tokens.weight": table(5, 128)}
    assert torch.equal(read_embedding(folder(tmp_path / "a", padded)), padded["model.embed_tokens.weight"][:V])
    with pytest.raises(UserError, match="has 64 rows"):
        read_embedding(folder(tmp_path / "b", {**PLAIN, "model.embed_tokens.weight": table(5, 64)}))


def test_gemma_stores_its_norm_minus_one(tmp_path: Path) -> None:
    f = folder(tmp_path, {**PLAIN, "model.norm.weight": torch.full((G,), 0.25)}, model_type="gemma3_text")
    assert torch.equal(read_final_norm(f), torch.full((G,), 1.25))


def test_head_rules() -> None:
    rule = head_rule({"rms_norm_eps": 1e-5, "final_logit_softcapping": 30.0, "logits_scaling": 4.0})
    assert (rule.eps, rule.softcap, rule.scale) == (1e-5, 30.0, 0.25)


def quantised(kind: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
    """`full` [N, M] as the tensors of a quantised lm_head, exactly representable in `kind`."""
    n, m = full.shape
    if kind == "fp8 tensor":
        return {"weight": (full / 0.5).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.5)}
    if kind == "fp8 row":
        scale = 2.0 ** torch.arange(n).remainder(3).float()
        return {"weight": (full / scale[:, None]).to(torch.float8_e4m3fn), "weight_scale": scale[:, None]}
    if kind == "fp8 block":
        scale = torch.tensor([[1.0, 2.0], [4.0, 0.5]])
        whole = scale.repeat_interleave(64, 0)[:n].repeat_interleave(16, 1)[:, :m]
        return {"weight": (full / whole).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    codes = full.long()  # whole numbers −8..7
    if kind == "packed":
        nibbles = (codes + 8).reshape(n, m // 8, 8)
        packed = (nibbles << (4 * torch.arange(8))).sum(-1)
        return {
            "weight_packed": packed.to(torch.int32),
            "weight_scale": torch.ones(n, m // 16),
            "weight_shape": torch.tensor([n, m]),
        }
    if kind == "gptq":
        nibbles = (codes.T + 8).reshape(m // 8, 8, n)
        zeros = torch.full((m // 16, n // 8), 0x77777777, dtype=torch.int64)
        return {
            "qweight": (nibbles << (4 * torch.arange(8))[:, None]).sum(1).to(torch.int32),
            "qzeros": zeros.to(torch.int32),
            "scales": torch.ones(m // 16, n, dtype=torch.float16),
        }
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # AWQ
    nibbles = (codes.T + 8).reshape(m, n // 8, 8)
    put = torch.zeros_like(nibbles)
    put[..., order] = nibbles
    zeros = torch.full((m // 16, n // 8), 0x88888888 - (1 << 32), dtype=torch.int64)
    return {
        "qweight": (put << (4 * torch.arange(8))).sum(-1).to(torch.int32),
        "qzeros": zeros.to(torch.int32),
        "scales": torch.ones(m // 16, n, dtype=torch.float16),
    }


@pytest.mark.parametrize("kind", ["fp8 tensor", "fp8 row", "fp8 block", "packed", "gptq", "awq"])
def test_a_quantised_head_is_undone_where_it_must_be(tmp_path: Path, kind: str) -> None:
    full = torch.randint(-8, 8, (V, G), generator=torch.Generator().manual_seed(3)).float()
    tensors = {k: v for k, v in PLAIN.items() if k != "lm_head.weight"}
    tensors |= {f"lm_head.{k}": v for k, v in quantised(kind, full).items()}
    f = folder(tmp_path, tensors)
    assert torch.equal(read_lm_head(f), full)
    assert torch.equal(read_lm_head(f, [90, 3]), full[[90, 3]])


def test_nvfp4_head_both_spellings(tmp_path: Path) -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.randint(0, 8, (V, G), generator=torch.Generator().manual_seed(4))
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scale = torch.full((V, G // 16), 2.0).to(torch.float8_e4m3fn)
    rest = {k: v for k, v in PLAIN.items() if k != "lm_head.weight"}
    modelopt = {"lm_head.weight": packed, "lm_head.weight_scale": scale, "lm_head.weight_scale_2": torch.tensor(0.25)}
    compressed = {
        "lm_head.weight_packed": packed,
        "lm_head.weight_scale": scale,
        "lm_head.weight_global_scale": torch.tensor([4.0]),
    }
    for name, tensors in (("a", modelopt), ("b", compressed)):
        assert torch.equal(read_lm_head(folder(tmp_path / name, rest | tensors), [5, 1]), 0.5 * values[codes[[5, 1]]])


def test_unknown_packing_is_refused_by_name(tmp_path: Path) -> None:
    rest = {k: v for k, v in PLAIN.items() if k != "lm_head.weight"}
    f = folder(tmp_path, rest | {"lm_head.weight": torch.zeros(V, G, dtype=torch.int8)})
    with pytest.raises(UserError, match=r"lm_head\.weight cannot be read"):
        read_lm_head(f)


def test_cut_off_and_pickled_checkpoints_are_refused(tmp_path: Path) -> None:
    f = folder(tmp_path / "a", PLAIN)
    raw = (f / "model.safetensors").read_bytes()
    (f / "model.safetensors").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(UserError, match="no whole safetensors"):
        read_embedding(f)
    (f / "model.safetensors").unlink()
    (f / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no safetensors.*pytorch_model\.bin"):
        read_embedding(f)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[int]]]:
    """A stand-in for the model hub that knows ranges; serves tmp_path/<owner>/<name>, counts the bytes it sent."""
    sent: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path.startswith("/api/models/"):
                found = tmp_path / path.removeprefix("/api/models/")
                names = [{"rfilename": p.name} for p in found.iterdir()] if found.is_dir() else None
                raw = json.dumps({"siblings": names}).encode()
                status = 200 if names else 404
            else:
                owner, name, _, _, file = path.strip("/").split("/", 4)
                target = tmp_path / owner / name / file
                status, raw = (200, target.read_bytes()) if target.is_file() else (404, b"")
            whole = len(raw)
            if status == 200 and (ranged := self.headers.get("Range")):
                a, b = ranged.removeprefix("bytes=").split("-")
                raw, status = raw[int(a) : int(b) + 1], 206
            sent.append(len(raw))
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            if status == 206:
                self.send_header("Content-Range", f"bytes 0-0/{whole}")
            self.end_headers()
            self.wfile.write(raw)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield tmp_path, sent
    server.shutdown()


def test_rows_come_from_the_hub_by_ranges(hub: tuple[Path, list[int]]) -> None:
    from draftsmith.target.ranges import hub_entries

    root, sent = hub
    big = {**PLAIN, "lm_head.weight": table(9, 60_000)}
    f = folder(root / "owner" / "big", big, vocab_size=60_000)
    point = Checkpoint(hub_entries("owner/big"), json.loads((f / "config.json").read_text()), "owner/big")
    rows = [5, 30_000, 59_999]
    assert torch.equal(read_lm_head(point, rows), big["lm_head.weight"][rows])
    assert sum(sent) < (f / "model.safetensors").stat().st_size / 3
    with pytest.raises(UserError, match="no such model"):
        hub_entries("owner/none")
