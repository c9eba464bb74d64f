"""Never a traceback, never more than a second, whatever config.json and the safetensors header hold."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import fuzz_inputs as fuzz
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = fuzz.write_good(tmp_path_factory.mktemp("pair"))
    assert fuzz.must_answer(target, drafter, limit=5.0) == "yes"
    return target, drafter


class Restored:
    """Puts a file's bytes back."""

    def __init__(self, path: Path) -> None:
        self.path, self.raw = path, path.read_bytes()

    def __enter__(self) -> bytes:
        return self.raw

    def __exit__(self, *_: object) -> None:
        self.path.write_bytes(self.raw)


def config_bytes(pair: tuple[Path, Path], count: int, seed: int) -> Counter[str]:
    rng, seen = random.Random(seed), Counter[str]()
    for path in (pair[1] / "config.json", pair[0] / "config.json"):
        with Restored(path) as raw:
            for _ in range(count // 2):
                path.write_bytes(fuzz.mutated(raw, rng))
                seen[fuzz.must_answer(*pair)] += 1
    return seen


def config_values(pair: tuple[Path, Path], count: int, seed: int) -> Counter[str]:
    rng, seen = random.Random(seed), Counter[str]()
    for path in (pair[1] / "config.json", pair[0] / "config.json"):
        with Restored(path) as raw:
            value = json.loads(raw)
            places = [*fuzz.leaves(value)]
            for i in range(count // 2):
                place = places[i % len(places)]
                path.write_text(json.dumps(fuzz.replaced(value, place, rng.choice(fuzz.ODD))))
                seen[fuzz.must_answer(*pair)] += 1
    return seen


def header_bytes(pair: tuple[Path, Path], count: int, seed: int) -> Counter[str]:
    rng, seen = random.Random(seed), Counter[str]()
    path = pair[1] / "model.safetensors"
    with Restored(path) as raw:
        (length,) = struct.unpack("<Q", raw[:8])
        for i in range(count):
            header = fuzz.mutated(raw[8 : 8 + length], rng)
            size = len(header) if i % 4 else rng.choice((0, 1, length, 2**32, 2**63, 2**64 - 1, len(header) + 5))
            path.write_bytes(struct.pack("<Q", size) + header + raw[8 + length :])
            seen[fuzz.must_answer(*pair)] += 1
    return seen


def header_values(pair: tuple[Path, Path], count: int, seed: int) -> Counter[str]:
    rng, seen = random.Random(seed), Counter[str]()
    path = pair[1] / "model.safetensors"
    with Restored(path) as raw:
        (length,) = struct.unpack("<Q", raw[:8])
        value = json.loads(raw[8 : 8 + length])
        places = fuzz.leaves(value)
        for i in range(count):
            text = json.dumps(fuzz.replaced(value, places[i % len(places)], rng.choice(fuzz.ODD))).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
            seen[fuzz.must_answer(*pair)] += 1
    return seen


ALL = (config_bytes, config_values, header_bytes, header_values)


@pytest.mark.parametrize("kind", ALL)
def test_broken_inputs_get_an_answer(pair: tuple[Path, Path], kind: Any) -> None:
    seen = kind(pair, 40, seed=1)
    assert sum(seen.values()) == 40 and set(seen) - {"yes"}, "the mutations must reach the checks"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(["rope_parameters", "eagle_config", "quantization_config", "architectures", "head_dim"]),
       value=JSON_VALUES)  # fmt: skip
def test_any_value_under_a_key_that_is_looked_into(pair: tuple[Path, Path], key: str, value: Any) -> None:
    path = pair[1] / "config.json"
    with Restored(path) as raw:
        path.write_text(json.dumps(json.loads(raw) | {key: value}))
        fuzz.must_answer(*pair)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON_VALUES)
def test_any_json_as_a_whole_config(pair: tuple[Path, Path], value: Any) -> None:
    for path in (pair[0] / "config.json", pair[1] / "config.json"):
        with Restored(path):
            path.write_text(json.dumps(value))
            fuzz.must_answer(*pair)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("seed", range(10))
def test_twenty_thousand_broken_inputs(pair: tuple[Path, Path], kind: Any, seed: int) -> None:
    assert sum(kind(pair, 500, seed=100 + seed).values()) == 500
