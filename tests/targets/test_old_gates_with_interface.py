"""The story's own releases: 0.16 and 0.17 refuse Kimi-K2.5 twice, by the list and by the missing interface. With the plugin
their real config classes take it, and `check --plugin` says so; without the interface to give, widening alone stays a NO.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine" / "plugin"))
from test_old_gates import DRAFTER, TARGETS, extra, observe, unpacked  # noqa: F401 (extra is a fixture)

from draftsmith.check.run import load_checks
from draftsmith.check.types import Context, Options, run_checks
from draftsmith.engine.inject import plugin_env
from draftsmith.engine.reader import read_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]
REFUSED_TWICE = {"0.16.0": ("kimi_k25", "deepseek_v3", "olmoe"), "0.19.0": ("olmoe",), "0.21.0": ("olmoe",)}
"""Release → targets that neither its list nor its classes take. Not 0.17.0: its own inspection of a model fails beside
newer packages, before its gate is reached."""


def gate(site: Path, config: dict[str, Any], plugin: bool) -> dict[str, str]:
    load_checks()
    ctx = Context(options=Options(method="eagle3", plugin=plugin), target_config=config,
                  engine=read_engine(site, platform="cpu"))  # fmt: skip
    return {r.id: r.status for r in run_checks(ctx, groups=("gate",))}


@pytest.mark.parametrize("release", REFUSED_TWICE)
def test_list_and_interface(release: str, extra: Path, real_engine: Any, tmp_path: Path) -> None:  # noqa: F811
    site, cases = unpacked(release), []
    for name, config in (TARGETS | {"drafter": DRAFTER}).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        if name in REFUSED_TWICE[release]:
            cases.append({"name": name, "target": str(tmp_path / name), "drafter": str(tmp_path / "drafter")})
    plain = observe(site, extra, real_engine, cases, {}, tmp_path)
    widened = observe(site, extra, real_engine, cases, plugin_env(site, ["gate"], base={}), tmp_path)
    helped = observe(site, extra, real_engine, cases, plugin_env(site, ["gate", "interface"], base={}), tmp_path)
    for name in REFUSED_TWICE[release]:
        assert gate(site, TARGETS[name], plugin=False) == {"gate.list": "fail", "gate.interface": "fail"}
        assert plain[name]["taken"] is False and "only supported for" in plain[name]["error"]
        assert widened[name]["taken"] is False and widened[name]["plugin"]
        assert gate(site, TARGETS[name], plugin=True) == {"gate.list": "pass", "gate.interface": "pass"}
        assert helped[name]["taken"] is True, helped[name]["error"][:400]
