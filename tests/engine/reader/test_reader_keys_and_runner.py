"""Config keys with their places and defaults, default aux layers, and the choice of model runner."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from engine_trees import vllm_files, write, write_vllm

from draftsmith.check.types import Options
from draftsmith.engine.reader import EngineFacts, read_engine
from draftsmith.engine.reader.configkeys import ABSENT
from draftsmith.engine.reader.drafters import (
    class_reads,
    default_layers,
    drafter_entry,
    registered_name,
    runner_reads,
    switches,
)
from draftsmith.engine.reader.evaluate import UNKNOWN, evaluate
from draftsmith.engine.reader.functions import find_function
from draftsmith.engine.reader.runner import choose_runner

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MOE: dict[str, Any] = LLAMA | {"num_local_experts": 8}

RULE_OLD = '''
DEFAULTS = frozenset({"LlamaForCausalLM"})
def defaults():
    """By platform."""
    from vllm.platforms import current_platform
    if current_platform.is_rocm():
        return DEFAULTS - {"LlamaForCausalLM"}
    return DEFAULTS
class VllmConfig:
    @property
    def use_v2_model_runner(self) -> bool:
        use_v2_model_runner = envs.VLLM_USE_V2_MODEL_RUNNER
        if use_v2_model_runner is not None:
            return use_v2_model_runner
        if self.some_config.new_thing is not None:
            return True
        if not self._is_default_v2_model_runner_model():
            return False
        if not HAS_TRITON:
            return False
        unsupported = self._features()
        if unsupported:
            return False
        return True

    def _is_default_v2_model_runner_model(self) -> bool:
        model_config = self.model_config
        if model_config is None:
            return False
        if getattr(model_config, "is_hybrid", False):
            return False
        architectures = getattr(model_config, "architectures", [])
        return any(arch in defaults() for arch in architectures) and not model_config.is_moe

    def _features(self) -> list[str]:
        unsupported: list[str] = []
        speculative_config = self.speculative_config
        if speculative_config is not None:
            if speculative_config.method not in ("eagle", "eagle3"):
                unsupported.append(f"method {speculative_config.method}")
            if speculative_config.parallel_drafting:
                unsupported.append("parallel drafting")
            if speculative_config.method == "eagle3" and self.parallel_config.pipeline_parallel_size > 1:
                unsupported.append("EAGLE3 with pipeline parallelism")
        if self.compilation_config.mode == CompilationMode.STOCK:
            unsupported.append("stock compile")
        return unsupported
'''


@pytest.fixture
def facts(tmp_path: Path) -> EngineFacts:
    return read_engine(write_vllm(tmp_path, config__vllm=RULE_OLD))


def test_keys_with_places_and_defaults(facts: EngineFacts) -> None:
    reads = class_reads(facts, "LlamaForCausalLMEagle3")
    top, nested = reads.get("norm_before_fc"), reads.get("norm_before_fc", ("eagle_config",))
    assert top is not None
    assert nested is not None
    assert (top.default, top.where.file) == ("False", "vllm/model_executor/models/llama_eagle3.py")
    assert nested.default == "getattr(self.config, 'norm_before_fc', False)"
    assert {r.default for r in reads.all("use_aux_hidden_state")} == {None, ABSENT}
    assert {r.under for r in reads.all("use_aux_hidden_state")} == {("eagle_config",)}
    assert {r.default for r in reads.all("target_hidden_size")} == {None, ABSENT}
    assert reads.understands("num_aux_hidden_states")
    assert not reads.understands("fc_norm")
    assert not reads.understands("block_size")
    assert "eagle_config.norm_before_fc" in switches(facts, "LlamaForCausalLMEagle3")


def test_where_the_two_runners_look_for_ids(facts: EngineFacts) -> None:
    one, two = runner_reads(facts, "v1"), runner_reads(facts, "v2")
    assert [r.spelled for r in one.reads if r.key.endswith("layer_ids")] == [
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config.eagle_aux_hidden_state_layer_ids",
    ]
    assert not one.understands("not_for_ids")
    assert {r.spelled for r in two.reads if r.key.endswith("layer_ids")} == {
        "eagle_aux_hidden_state_layer_ids",
        "dflash_config.layer_ids",
        "eagle_config.layer_ids",
    }


def test_a_release_whose_runner_reads_no_ids(tmp_path: Path) -> None:
    facts = read_engine(write_vllm(tmp_path, v1__worker__gpu_model_runner="class R:\n    pass\n"))
    assert runner_reads(facts, "v1").place is None


def test_a_function_is_cut_out_with_its_true_lines(facts: EngineFacts) -> None:
    found = find_function(facts.modules, "vllm.v1.worker.gpu_model_runner", "_get_eagle3_aux_layers_from_config")
    assert found is not None
    module, node = found
    assert "def _get_eagle3" in module.lines[node.lineno - 1]
    assert isinstance(node.body[-1], ast.Return)
    assert "return layer_ids" in module.lines[node.body[-1].lineno - 1]
    assert find_function(facts.modules, "vllm.v1.worker.gpu_model_runner", "missing") is None


def test_default_layers_of_protocol_and_class(facts: EngineFacts) -> None:
    assert facts.registry is not None
    assert default_layers(facts, facts.registry.entries["LlamaForCausalLM"], 61).ids == (2, 30, 58)
    assert default_layers(facts, facts.registry.entries["HeirForCausalLM"], 61).ids == (1, 2, 60)
    found = default_layers(facts, facts.registry.entries["LlamaForCausalLM"], 61).where
    assert found is not None
    assert "num_layers - 3" in found.text


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ("LlamaForCausalLM", "Eagle3LlamaForCausalLM"),
        ("LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3"),
        ("Eagle3Speculator", "Eagle3Speculator"),
        ("MiniCPMForCausalLM", "Eagle3MiniCPMForCausalLM"),
    ],
)
def test_what_vllm_makes_of_an_architecture(facts: EngineFacts, written: str, made: str) -> None:
    assert registered_name(written) == made
    name, entry = drafter_entry(facts, {"architectures": [written]})
    assert name == made
    assert (entry is not None) is (made in ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"))


def runner(facts: EngineFacts, target: dict[str, Any] = LLAMA, parallel: bool = False, **options: Any) -> str | None:
    return choose_runner(facts, target, Options(**options), parallel).runner


def test_the_rule_is_followed(facts: EngineFacts) -> None:
    assert runner(facts) == "v2"
    assert runner(facts, MOE) == "v1"
    assert runner(facts, {"architectures": ["PlainForCausalLM"]}) == "v1"
    assert runner(facts, pipeline_parallel=2) == "v1"
    assert runner(facts, parallel=True) == "v1"
    assert runner(facts, env={"VLLM_USE_V2_MODEL_RUNNER": "0"}) == "v1"
    assert runner(facts, MOE, env={"VLLM_USE_V2_MODEL_RUNNER": "1"}) == "v2"


def test_reasons_evidence_and_assumptions(facts: EngineFacts) -> None:
    found = choose_runner(facts, LLAMA, Options(pipeline_parallel=2))
    assert "EAGLE3 with pipeline parallelism" in found.why
    assert found.evidence[0].text.strip() == "return False"
    assert found.assumptions == (
        "not: self.some_config.new_thing is not None",
        "not: self.compilation_config.mode == CompilationMode.STOCK",
    )


def test_platform_and_triton(tmp_path: Path) -> None:
    root = write_vllm(tmp_path / "a", config__vllm=RULE_OLD)
    assert runner(read_engine(root, platform="rocm")) == "v1"
    assert runner(read_engine(root, platform="cpu")) == "v1"
    beside = write(root, {"torch/__init__.py": ""})
    assert runner(read_engine(beside)) == "v1"
    write(root, {"triton/__init__.py": ""})
    assert runner(read_engine(beside)) == "v2"
    assert runner(read_engine(beside, platform="cpu")) == "v1"
    write(root, {"triton/backends/cpu/__init__.py": ""})
    assert runner(read_engine(beside, platform="cpu")) == "v2"


def test_a_condition_on_the_model_that_cannot_be_decided_is_not_guessed(tmp_path: Path) -> None:
    rule = RULE_OLD.replace('getattr(model_config, "is_hybrid", False)', "model_config.has_new_property")
    found = choose_runner(read_engine(write_vllm(tmp_path, config__vllm=rule)), LLAMA, Options())
    assert found.runner is None
    assert "has_new_property" in found.why


def test_releases_before_the_rule(tmp_path: Path) -> None:
    facts = read_engine(write_vllm(tmp_path / "none"))
    assert runner(facts, env={"VLLM_USE_V2_MODEL_RUNNER": "1"}) == "v1"
    envs = "VLLM_USE_V2_MODEL_RUNNER: bool = False\n"
    facts = read_engine(write(tmp_path / "some", vllm_files(envs=envs)))
    assert (runner(facts), runner(facts, env={"VLLM_USE_V2_MODEL_RUNNER": "1"})) == ("v1", "v2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a and b", UNKNOWN),
        ("a and no", False),
        ("a or yes", True),
        ("not yes", False),
        ("[x + 1 for x in ids]", (2, 3)),
        ("ids[0] == 1 and max(ids) == 2", True),
        ("any(x in 'kimi' for x in ['ki', 'mo'])", True),
        ("all(x in word for x in ['ki'])", UNKNOWN),
        ("3 if a else 4", UNKNOWN),
        ("len(ids) // 0", UNKNOWN),
        ("ids[7]", UNKNOWN),
        ("1 < 'a'", UNKNOWN),
    ],
)
def test_three_valued_expressions(text: str, expected: Any) -> None:
    known = {"yes": True, "no": False, "ids": (1, 2)}
    node = ast.parse(text, mode="eval").body
    assert evaluate(node, lambda n: known.get(ast.unparse(n), UNKNOWN)) == expected
