"""The shim goes before the question in every form in which a runner asks it: its own method (0.22 on), the middle of
load_model (to 0.21), and the function of the V2 runner that two modules know by name.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_engine
import pytest
from test_shim import CONFIG, IDS, Fused, Outer, Plain

from draftsmith.engine.plugin_src import draftsmith_vllm as plugin

INTERFACES = """
from typing import Protocol, runtime_checkable


@runtime_checkable
class SupportsEagle3(Protocol):
    supports_eagle3 = True
    has_own_lm_head: bool = False
    has_own_embed_tokens: bool = False

    def set_aux_hidden_state_layers(self, layers): ...

    def {getter}(self): ...


def supports_eagle3(model):
    return isinstance(model, SupportsEagle3)
"""
METHOD = """
from vllm.model_executor.models.interfaces import supports_eagle3


class GPUModelRunner:
    def load_model(self):
        self._setup_eagle3_aux_hidden_state_outputs()

    def _setup_eagle3_aux_hidden_state_outputs(self):
        if not self.use_aux_hidden_state_outputs:
            return
        if not supports_eagle3(self.get_model()):
            raise RuntimeError("Model does not support EAGLE3 interface")
        self.model.set_aux_hidden_state_layers(self.model.get_eagle3_default_aux_hidden_state_layers())
"""
INLINE = """
from vllm.model_executor.models.interfaces import supports_eagle3


class GPUModelRunner:
    def load_model(self, eep_scale_up=False):
        if self.use_aux_hidden_state_outputs:
            if not supports_eagle3(self.get_model()):
                raise RuntimeError("Model does not support EAGLE3 interface")
            self.model.set_aux_hidden_state_layers(self.model.get_eagle3_aux_hidden_state_layers())
"""
SETTER = """
from vllm.model_executor.models.interfaces import supports_eagle3


def set_eagle3_aux_hidden_state_layers(model, spec_config):
    if not supports_eagle3(model):
        raise RuntimeError("Model does not support EAGLE3 interface")
    model.set_aux_hidden_state_layers((1, 3))
"""
USER = """
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import set_eagle3_aux_hidden_state_layers


def load(model, spec_config):
    set_eagle3_aux_hidden_state_layers(model, spec_config)
"""


def write(site: Path, runner: str, getter: str) -> Path:
    fake_engine.write_engine(site, version="0.32.0" if runner is METHOD else "0.16.0")
    files = {"v1/worker/gpu_model_runner.py": runner, "v1/worker/gpu/model_runner.py": USER,
             "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py": SETTER}  # fmt: skip
    for name, text in files.items():
        path = site / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (site / "vllm/model_executor/models/interfaces.py").write_text(INTERFACES.format(getter=getter))
    return site


def runner_of(model: Any, stages: int = 1, wanted: bool = True) -> Any:
    runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner()
    runner.model, runner.get_model, runner.use_aux_hidden_state_outputs = model, lambda: model, wanted
    runner.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=CONFIG),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )
    return runner


@pytest.fixture(params=[(METHOD, "get_eagle3_default_aux_hidden_state_layers"), (INLINE, "get_eagle3_aux_hidden_state_layers")],
                ids=["method", "inline"])  # fmt: skip
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path, *request.param)


@pytest.mark.parametrize("imported_first", [True, False])
def test_the_v1_runner_finds_the_interface(site: Path, imported_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_engine.importable(site):
        if imported_first:
            with pytest.raises(RuntimeError, match="does not support"):
                runner_of(Outer(Fused)).load_model()
        plugin.register()
        plugin.register()
        model: Any = Outer(Fused)
        runner_of(model).load_model()
        assert len(model(IDS)[1]) == 1  # the default (2, 2, 2) of a target of five layers
        plain: Any = Outer(Plain)
        runner_of(plain, wanted=False).load_model()
        assert not hasattr(plain, "supports_eagle3")


def test_a_refusal_is_told_and_the_engine_says_the_rest(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fake_engine.importable(site), caplog.at_level(logging.WARNING, "vllm"):
        plugin.register()
        with pytest.raises(RuntimeError, match="does not support EAGLE3"):
            runner_of(Outer(Fused), stages=2).load_model()
        assert "pipeline stages" in caplog.text


def test_a_class_of_its_own_interface_is_left_alone_unless_forced(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Outer):
        supports_eagle3 = True
        has_own_lm_head = has_own_embed_tokens = False
        layers: tuple[int, ...] = ()

        def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
            self.layers = layers

        def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
            return (1, 3)

        get_eagle3_aux_hidden_state_layers = get_eagle3_default_aux_hidden_state_layers

    with fake_engine.importable(site):
        plugin.register()
        own: Any = Own(Fused)
        runner_of(own).load_model()
        assert own.layers == (1, 3) and type(own) is Own
        monkeypatch.setenv("DRAFTSMITH_VLLM_SHIM", "force")
        forced: Any = Own(Fused)
        runner_of(forced).load_model()
        assert forced.layers == () and len(forced(IDS)[1]) == 1


@pytest.mark.parametrize("imported_first", [True, False])
def test_the_v2_runners_function(site: Path, imported_first: bool) -> None:
    with fake_engine.importable(site):
        if imported_first:
            import_module("vllm.v1.worker.gpu.model_runner")
        plugin.register()
        spec = SimpleNamespace(
            target_model_config=SimpleNamespace(hf_text_config=CONFIG),
            target_parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        )
        model: Any = Outer(Fused)
        import_module("vllm.v1.worker.gpu.model_runner").load(model, spec)
        assert len(model(IDS)[1]) == 2


def test_without_the_feature_nothing_is_given(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.FEATURES_VARIABLE, "gate,mends")
    with fake_engine.importable(site):
        plugin.register()
        with pytest.raises(RuntimeError, match="does not support"):
            runner_of(Outer(Fused)).load_model()
    assert "vllm" not in sys.modules
