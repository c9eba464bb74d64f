"""The model-type list, the registry and the interface, in every shape, from made-up sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_trees import (
    INTERFACES,
    LIST_ELSEWHERE,
    LIST_LOCAL,
    LIST_METHODS,
    LIST_NONE,
    LIST_STRING,
    write_vllm,
)

from draftsmith.engine.reader import EngineFacts, read_engine


@pytest.fixture
def facts(tmp_path: Path) -> EngineFacts:
    return read_engine(write_vllm(tmp_path))


def supports(facts: EngineFacts, architecture: str) -> bool | None:
    found = facts.supports(architecture)
    assert found is not None, architecture
    return found.supports


def test_the_plain_string(tmp_path: Path) -> None:
    found = read_engine(write_vllm(tmp_path, LIST_STRING)).model_list
    assert found is not None
    assert (found.entries, found.methods) == (("llama",), ("eagle3",))
    assert found.reads_text_config
    assert found.matching("llama4_text") == "llama"
    assert found.matching("qwen3") is None
    assert found.message("qwen3") == (
        "Eagle3 is only supported for Llama models. Got self.target_model_config.hf_text_config.model_type='qwen3'"
    )
    assert (found.where.file, found.where.line) == ("vllm/config/speculative.py", 6)


def test_the_local_list(tmp_path: Path) -> None:
    found = read_engine(write_vllm(tmp_path, LIST_LOCAL)).model_list
    assert found is not None
    assert found.entries == ("llama", "qwen")
    assert found.matching("qwen3_moe") == "qwen"
    assert "for ['llama', 'qwen'] models. Got" in found.message("kimi_k2")
    assert found.list_evidence is not None
    assert found.list_evidence.line == 6
    assert not found.applies("dflash")


def test_a_list_at_module_level_for_several_methods_and_the_outer_config(tmp_path: Path) -> None:
    found = read_engine(write_vllm(tmp_path, LIST_METHODS)).model_list
    assert found is not None
    assert (found.entries, found.methods) == (("llama", "kimi_k2"), ("eagle3", "dflash"))
    assert not found.reads_text_config
    assert found.message("olmoe", "dflash").startswith("dflash is only supported for ['llama', 'kimi_k2'] models")


def test_a_list_that_cannot_be_read_is_not_guessed(tmp_path: Path) -> None:
    found = read_engine(write_vllm(tmp_path, LIST_ELSEWHERE)).model_list
    assert found is not None
    assert found.entries is None


def test_no_list(tmp_path: Path) -> None:
    facts = read_engine(write_vllm(tmp_path, LIST_NONE))
    assert facts.model_list is None
    assert facts.model_list_place is not None
    assert facts.model_list_place.text == "class SpeculativeConfig:"


def test_the_old_places_of_the_config(tmp_path: Path) -> None:
    root = write_vllm(tmp_path, "")
    (root / "vllm/config/speculative.py").unlink()
    (root / "vllm/config/__init__.py").write_text(LIST_LOCAL)
    found = read_engine(root).model_list
    assert found is not None
    assert found.where.file == "vllm/config/__init__.py"


def test_the_registry_knows_pieces_order_and_what_was_taken_out(facts: EngineFacts) -> None:
    registry = facts.registry
    assert registry is not None
    assert registry.entries["SplitForCausalLM"].module == "vllm.models.split"
    assert registry.entries["LlamaForCausalLM"].module == "vllm.model_executor.models.llama"
    assert registry.entries["TwiceForCausalLM"].cls == "TransformersForCausalLM"
    assert "GhostForCausalLM" not in registry.entries
    assert registry.former == {"OldForCausalLM": "0.9.2"}
    assert '"LazyForCausalLM"' in registry.evidence(registry.entries["LazyForCausalLM"]).text
    assert set(facts.drafters) == {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("PlainForCausalLM", False),
        ("LlamaForCausalLM", True),
        ("HeirForCausalLM", True),
        ("DuckForCausalLM", True),
        ("HalfDuckForCausalLM", False),
        ("MadeModel", True),
        ("TransformersForCausalLM", True),
        ("LostForCausalLM", None),
        ("GoneForCausalLM", None),
        ("VersionedForCausalLM", None),
    ],
)
def test_the_interface_through_bases_aliases_mixins_and_ducks(
    facts: EngineFacts, architecture: str, expected: bool | None
) -> None:
    assert supports(facts, architecture) is expected


def test_the_way_to_the_protocol_is_shown(facts: EngineFacts) -> None:
    found = facts.supports("HeirForCausalLM")
    assert found is not None
    assert found.through == ("HeirForCausalLM", "AuxMixin", "SupportsEagle3")
    assert [e.file.rsplit("/", 1)[1] for e in found.evidence] == ["heir.py", "mixins.py"]


@pytest.mark.parametrize(
    ("platform", "split", "lazy"), [("cuda", True, False), ("cpu", True, False), ("rocm", False, True)]
)
def test_platform_split_packages(tmp_path: Path, platform: str, split: bool, lazy: bool) -> None:
    facts = read_engine(write_vllm(tmp_path), platform=platform)
    assert supports(facts, "SplitForCausalLM") is split
    assert supports(facts, "LazyForCausalLM") is lazy


def test_before_the_protocol_the_called_methods_decide(tmp_path: Path) -> None:
    runner = (
        "class R:\n    def load(self):\n        self.model.set_aux_hidden_state_layers(\n"
        "            self.model.get_eagle3_aux_hidden_state_layers())\n"
    )
    llama = (
        "class LlamaForCausalLM:\n    def set_aux_hidden_state_layers(self, l): ...\n"
        "    def get_eagle3_aux_hidden_state_layers(self):\n        return (2, self.n // 2, self.n - 3)\n"
    )
    facts = read_engine(
        write_vllm(
            tmp_path,
            interfaces="class IsHybrid:\n    pass\n",
            v1__worker__gpu_model_runner=runner,
            model_executor__models__llama=llama,
        )
    )
    assert facts.interface is not None
    assert facts.interface.protocol is None
    assert facts.interface.members == {"set_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers"}
    assert supports(facts, "LlamaForCausalLM") is True
    assert supports(facts, "PlainForCausalLM") is False


def test_a_release_without_eagle3(tmp_path: Path) -> None:
    facts = read_engine(
        write_vllm(
            tmp_path, interfaces="class IsHybrid:\n    pass\n", v1__worker__gpu_model_runner="class R:\n    pass\n"
        )
    )
    assert facts.interface is None
    assert supports(facts, "LlamaForCausalLM") is False


def test_source_that_does_not_parse_is_named_and_not_fatal(tmp_path: Path) -> None:
    facts = read_engine(write_vllm(tmp_path, model_executor__models__llama="class LlamaForCausalLM(:\n"))
    assert supports(facts, "LlamaForCausalLM") is None
    assert list(facts.modules.unreadable) == ["vllm/model_executor/models/llama.py"]


def test_circular_imports_and_bases_end(tmp_path: Path) -> None:
    circular = "from .plain import LlamaForCausalLM\n"
    facts = read_engine(
        write_vllm(
            tmp_path,
            model_executor__models__llama=circular,
            model_executor__models__plain="from .llama import *\nfrom .llama import LlamaForCausalLM\n",
        )
    )
    assert supports(facts, "LlamaForCausalLM") is None
    assert supports(facts, "PlainForCausalLM") is None


def test_a_protocol_member_more_makes_the_duck_fail(tmp_path: Path) -> None:
    more = INTERFACES.replace("    supports_eagle3: ", "    another_flag: bool\n    supports_eagle3: ")
    assert supports(read_engine(write_vllm(tmp_path, interfaces=more)), "DuckForCausalLM") is False
