"""check and remedy for a class without the EAGLE-3 interface: NO for the engine as it is, yes where draftsmith's plugin is
loaded and the source shows that it would find the layers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "engine" / "remedy"))
import remedy_engine

from draftsmith.check.run import check_pair, load_checks, make_context
from draftsmith.check.types import Options
from draftsmith.cli.main import app
from draftsmith.engine.remedy import climb

MODEL = """
from .utils import make_layers


class {name}Layer:
    def forward(self, positions, {hidden}, residual): ...


class {name}Model:
    def __init__(self, config):
        self.{embedding} = object()
        self.start_layer, self.end_layer, self.layers = make_layers(8, lambda prefix: {name}Layer(), prefix="layers")


class {name}ForCausalLM:
    def __init__(self, config):
        self.model = self._init_model(config)

    def _init_model(self, config):
        return {name}Model(config)
"""
CASES = {
    "Found": ("hidden_states", "embed_tokens"),
    "Strange": ("stream", "embed_tokens"),
    "Elsewhere": ("hidden_states", "wte"),
}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One made-up engine with the list (0.16), one without (0.26)."""
    found = {}
    for version in ("0.16.0", "0.26.0"):
        site = remedy_engine.write_engine(tmp_path_factory.mktemp("engine"), version)
        models = site / "vllm" / "model_executor" / "models"
        registry = (models / "registry.py").read_text()
        for name, (hidden, embedding) in CASES.items():
            (models / f"{name.lower()}.py").write_text(MODEL.format(name=name, hidden=hidden, embedding=embedding))
            line = f'    "{name}ForCausalLM": ("{name.lower()}", "{name}ForCausalLM"),\n'
            registry = registry.replace('    "AbleForCausalLM"', line + '    "AbleForCausalLM"', 1)
        (models / "registry.py").write_text(registry)
        if version == "0.26.0":
            (site / "vllm" / "config" / "speculative.py").write_text("class SpeculativeConfig:\n    method: str\n")
        found[version] = site
    return found


def gate(site: Path, pair: tuple[str, str], **options: object) -> dict[str, str]:
    verdict = check_pair(*pair, engine=str(site), options=Options(method="eagle3", **options))  # type: ignore[arg-type]
    return {r.id: r.status for r in verdict.checks if r.group == "gate"}


@pytest.mark.parametrize("version", ["0.16.0", "0.26.0"])
@pytest.mark.parametrize("name", CASES)
def test_yes_with_the_plugin_only(sites: dict[str, Path], version: str, name: str, tmp_path: Path) -> None:
    pair = remedy_engine.pair(tmp_path, f"{name}ForCausalLM", "found")
    listed = "fail" if version == "0.16.0" else "pass"
    assert gate(sites[version], pair) == {"gate.list": listed, "gate.interface": "fail"}
    given = name == "Found"
    with_it = {"gate.list": "pass" if given else listed, "gate.interface": "pass" if given else "fail"}
    assert gate(sites[version], pair, plugin=True) == with_it
    assert gate(sites[version], pair, plugin=True, pipeline_parallel=2)["gate.interface"] == "fail"
    assert gate(sites[version], pair, plugin=True, env={"VLLM_PLUGINS": ""})["gate.interface"] == "fail"


@pytest.mark.parametrize("version", ["0.16.0", "0.26.0"])
def test_the_remedy_is_the_plugin(sites: dict[str, Path], version: str, tmp_path: Path) -> None:
    load_checks()
    pair = remedy_engine.pair(tmp_path, "FoundForCausalLM", "found")
    plan = climb(make_context(*pair, str(sites[version]), Options(method="eagle3")))
    assert plan.rung == "plugin" and not plan.left
    assert plan.steps[-1].data["features"] == ["gate", "interface", "mends"]
    strange = remedy_engine.pair(tmp_path / "other", "StrangeForCausalLM", "found")
    assert climb(make_context(*strange, str(sites[version]), Options(method="eagle3"))).rung not in (
        "plugin",
        "nothing",
    )


def test_the_commands_say_so(sites: dict[str, Path], tmp_path: Path) -> None:
    pair = remedy_engine.pair(tmp_path, "FoundForCausalLM", "found")
    site = str(sites["0.26.0"])
    plain = CliRunner().invoke(app, ["check", *pair, "--engine", site, "--method", "eagle3"])
    assert plain.exit_code == 1 and "check --plugin" in plain.stdout
    with_it = CliRunner().invoke(app, ["check", *pair, "--engine", site, "--method", "eagle3", "--plugin", "--all"])
    assert with_it.exit_code == 0, with_it.stdout
    assert "draftsmith's plugin gives it" in with_it.stdout and "found.py:" in with_it.stdout
    applied = CliRunner().invoke(app, ["remedy", *pair, "--engine", site, "--apply"])
    assert applied.exit_code == 0 and "PYTHONPATH" in applied.stdout and "gate,interface,mends" in applied.stdout


def test_capture_is_not_warned_off(sites: dict[str, Path], tmp_path: Path) -> None:
    from draftsmith.check.before import before_training, require_servable
    from draftsmith.errors import UserError

    found, _ = remedy_engine.pair(tmp_path / "a", "FoundForCausalLM", "found")
    strange, _ = remedy_engine.pair(tmp_path / "b", "StrangeForCausalLM", "found")
    site = str(sites["0.26.0"])
    assert require_servable(found, site).verdict == "yes"
    assert before_training(found, site).verdict == "no"
    with pytest.raises(UserError, match="no EAGLE-3 drafter"):
        require_servable(strange, site)
