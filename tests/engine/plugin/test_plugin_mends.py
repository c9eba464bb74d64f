"""The mend of the lost expansion, on a made-up module with the same fault, and the table that proves faults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import fake_engine
import pytest
import torch

from draftsmith.engine.plugin_src import draftsmith_vllm as plugin
from draftsmith.engine.plugin_src.draftsmith_vllm.faults import FAULTS, Fault, find_in, find_in_site
from draftsmith.engine.plugin_src.draftsmith_vllm.mends import MENDED, MENDS, WHOLE, mend, replace_code, with_statement

MODULE = "vllm.utils.cpu_triton_utils"
FAULT = next(f for f in FAULTS if f.id == "cpu-expand-lost")


def by_hand(values: torch.Tensor, ends: list[int], replace_from: float, replace_to: float) -> list[float]:
    out: list[float] = []
    for value, start, end in zip(values.tolist(), [0, *ends], ends, strict=False):
        out += [replace_to if value == replace_from else value] * (end - start)
    return out


@pytest.mark.parametrize("imported_first", [True, False])
def test_what_was_lost_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported_first: bool) -> None:
    monkeypatch.setenv(plugin.FEATURES_VARIABLE, "mends")
    with fake_engine.importable(fake_engine.write_engine(tmp_path)):
        values = torch.tensor([0.8, 0.0, 1.3])
        ends = torch.tensor([2, 3, 6], dtype=torch.int32)
        if imported_first:
            module = import_module(MODULE)
            untouched = torch.full((6,), -7.0)
            module._expand_kernel_impl(untouched, values, ends, 0, 1)
            assert untouched.tolist() == [-7.0] * 6, "the made-up engine does not have the fault"
        plugin.register()
        plugin.register()
        module = import_module(MODULE)
        output = torch.full((6,), -7.0)
        # The dispatcher holds the function object itself, so it must be that object that is mended.
        module.held_elsewhere["expand"](
            output=output, input_val=values, cu_num_tokens=ends, replace_from=0, replace_to=1, MAX_NUM_TOKENS=4
        )
        assert output.tolist() == pytest.approx([0.8, 0.8, 1.0, 1.3, 1.3, 1.3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16])
def test_it_equals_the_kernel_in_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with fake_engine.importable(fake_engine.write_engine(tmp_path)):
        module = import_module(MODULE)
        replace_code(module, "_expand_kernel_impl", WHOLE["expand_kernel"])
        for rows in (1, 2, 17):
            counts = torch.randint(0, 5, (rows,))
            ends = counts.cumsum(0).to(torch.int32)
            values = torch.randint(0, 4, (rows,)).to(dtype)
            total = int(ends[-1])
            # Rows beyond the last request are padding of a larger buffer and stay as they were.
            output = torch.full((total + 3,), 9).to(dtype)
            module._expand_kernel_impl(output, values, ends, 0, 1)
            assert output.tolist() == by_hand(values, ends.tolist(), 0, 1) + [9] * 3


def test_a_function_without_the_fault_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.FEATURES_VARIABLE, "mends")
    site = fake_engine.write_engine(tmp_path)
    file = site / "vllm/utils/cpu_triton_utils.py"
    fixed = file.read_text().replace(
        "    kernel(_ensure_int64(output),", "    output.copy_(output)\n    kernel(_ensure_int64(output),"
    )
    file.write_text(fixed)
    with fake_engine.importable(site):
        module = import_module(MODULE)
        code = module._expand_kernel_impl.__code__
        plugin.register()
        assert module._expand_kernel_impl.__code__ is code
        assert not hasattr(module._expand_kernel_impl, MENDED)


@pytest.mark.parametrize(("version", "features"), [("0.34.1", None), ("dev", None), ("0.19.0", "gate"), ("0.19.0", "")])
def test_nothing_changes_on_an_unknown_release_or_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, features: str | None
) -> None:
    monkeypatch.delenv(plugin.FEATURES_VARIABLE, raising=False)
    if features is not None:
        monkeypatch.setenv(plugin.FEATURES_VARIABLE, features)
    with fake_engine.importable(fake_engine.write_engine(tmp_path, version=version)):
        module = import_module(MODULE)
        plugin.register()
        assert not hasattr(module._expand_kernel_impl, MENDED)


def test_other_parameters_are_not_mended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = fake_engine.write_engine(tmp_path)
    file = site / "vllm/utils/cpu_triton_utils.py"
    file.write_text(file.read_text().replace("MAX_NUM_TOKENS=None", "OTHER=None"))
    with fake_engine.importable(site):
        module = import_module(MODULE)
        with pytest.raises(ValueError, match="the mend does not"):
            replace_code(module, "_expand_kernel_impl", WHOLE["expand_kernel"])


def test_every_fault_with_a_mend_names_one_that_exists() -> None:
    assert {f.mend for f in FAULTS if f.mend} == set(MENDS)
    assert len({f.id for f in FAULTS}) == len(FAULTS)


def test_evidence_is_the_line_that_proves_it(tmp_path: Path) -> None:
    found = find_in_site(fake_engine.write_engine(tmp_path))
    assert [f.fault.id for f in found] == ["cpu-expand-lost"]
    lines = (tmp_path / found[0].file).read_text().splitlines()
    assert (
        "_ensure_int64(output)" in lines[found[0].line - 1] == found[0].text
        or found[0].text in lines[found[0].line - 1]
    )


@pytest.mark.parametrize("text", ["", "def _expand_kernel_impl(:", "def other(): pass", '"""_ensure_int64(output)"""'])
def test_what_does_not_prove_it_is_no_fault(text: str) -> None:
    assert find_in(FAULT, text) is None


RUNNER = '''
class CPUModelRunner(Base):
    def __init__(self):
        assert self.speculative_config is None, "not here"

    def load_model(self):
        """Calls _setup_eagle3_aux_hidden_state_outputs? It does not."""
        self.drafter.load_model(self.model)
'''
LAYERS = """
class DeepseekV2Model:
    def forward(self):
        for idx, layer in enumerate(self.layers):
            if idx in self.aux_hidden_state_layers:
                out.append(h + r)
"""
BOOKKEEPING = """
class GPUModelRunner(Base):
    def _bookkeeping_sync(
        self, indices
    ) -> list:
        for i in indices:
            gen = self.generators.get(i)
            if gen is not None:
                gen.set_offset(gen.get_offset() - 4)
        return [i for i in indices]
"""
ROPE = """
class RotaryEmbedding:
    def forward_cpu(self, positions, query, key=None):
        from vllm import _custom_ops as ops

        ops.rotary_embedding(
            positions, query, key, self.head_size, self.cache, self.is_neox_style,
        )
        return query, key
"""
ROUTER = """
class CPURouter(BaseRouter):
    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        if self.use_grouped_topk:
            return _grouped_topk(gating_output=router_logits, num_expert_group=self.num_expert_group)
        elif self.custom_routing_function is None:
            assert self.scoring_func == "softmax"
            return "softmax"
"""
REBIND = """
def _rebind_kernels(overrides):
    originals = {original: wrapper for original, wrapper in overrides}

    def lookup(value):
        return next((w for original, w in originals.items() if value is original), None)

    for module in list(modules):
        for attr, value in list(vars(module).items()):
            wrapper = None
            if hasattr(value, "__dict__"):
                wrapper = lookup(vars(value).get("kernel"))
            if wrapper is not None:
                value.kernel = wrapper
"""


@pytest.mark.parametrize(
    ("fault", "source", "mended"),
    [
        ("cpu-seed-in-parts", BOOKKEEPING, ("if gen is not None:", 'if gen is not None and gen.device.type != "cpu":')),
        ("cpu-latent-rope", ROPE, ("ops\n\n", "ops\n\n        query = query.view(len(positions), -1)\n")),
        ("cpu-sigmoid-routing", ROUTER, ('self.scoring_func == "softmax"', 'self.scoring_func == "sigmoid"')),
        ("cpu-numba-at-start", REBIND, ('hasattr(value, "__dict__")', "isinstance(vars(value), dict)")),
        ("cpu-no-speculation", RUNNER, ("        assert self.speculative_config is None", "        assert True")),
        (
            "cpu-eagle3-not-set-up",
            RUNNER,
            ("self.drafter.load_model(self.model)", "self.drafter.load_model(self.model); self._setup_eagle3_aux_hidden_state_outputs()"),
        ),
        (
            "deepseek-last-boundary",
            LAYERS,
            ("out.append(h + r)", "out.append(h + r)\n        if self.end_layer in self.aux_hidden_state_layers:\n            pass"),
        ),
    ],
)  # fmt: skip
def test_each_row_is_proved_and_disproved(fault: str, source: str, mended: tuple[str, str]) -> None:
    row = next(f for f in FAULTS if f.id == fault)
    found = find_in(row, source)
    assert found is not None
    text = found.text.replace('"', "'")
    assert row.holds[0] in text or row.holds[0].startswith(text)  # a call may go over several lines
    assert mended[0] in source
    assert find_in(row, source.replace(*mended)) is None


@pytest.fixture
def module_of(tmp_path: Path) -> Callable[[str, str], ModuleType]:
    """A module object of some source text that lies in a file."""

    def make(name: str, source: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        module = ModuleType(name)
        module.__file__ = str(path)
        exec(compile(source, str(path), "exec"), module.__dict__)
        return module

    return make


def fault_of(name: str) -> Fault:
    return next(f for f in FAULTS if f.id == name)


def test_a_seed_begins_again_after_a_part_of_the_prompt(module_of: Callable[[str, str], ModuleType]) -> None:
    module = module_of("runner", "Base = object\n" + BOOKKEEPING)
    generator = torch.Generator()
    generator.manual_seed(5)
    first = torch.rand(3, generator=generator)
    runner = module.GPUModelRunner()
    runner.generators = {0: generator, 1: None}
    with pytest.raises(RuntimeError):
        runner._bookkeeping_sync([0, 1])
    assert mend(fault_of("cpu-seed-in-parts"), module)
    assert runner._bookkeeping_sync([0, 1, 2]) == [0, 1, 2]
    assert torch.equal(torch.rand(3, generator=generator), first)


def test_a_query_of_several_heads_takes_the_native_form(
    module_of: Callable[[str, str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    ops = SimpleNamespace(rotary_embedding=lambda positions, query, *more: calls.append(("kernel", query.dim())))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(_custom_ops=ops))
    module = module_of("rope", ROPE)
    rope = module.RotaryEmbedding()
    rope.head_size, rope.cache, rope.is_neox_style = 4, None, False
    rope.forward_native = lambda positions, query, key: calls.append(("native", query.dim())) or (query, key)
    flat, heads = torch.zeros(3, 8), torch.zeros(3, 2, 4)
    rope.forward_cpu(None, heads)
    assert mend(fault_of("cpu-latent-rope"), module) and mend(fault_of("cpu-latent-rope"), module)
    rope.forward_cpu(None, heads)
    rope.forward_cpu(None, flat, flat)
    assert calls == [("kernel", 3), ("native", 3), ("kernel", 2)]


def test_sigmoid_routing_is_that_of_one_group(module_of: Callable[[str, str], ModuleType]) -> None:
    asked: list[dict[str, object]] = []
    module = module_of("router", "BaseRouter = object\n" + ROUTER)
    module._grouped_topk = lambda **given: asked.append(given) or "grouped"
    router = module.CPURouter()
    router.use_grouped_topk, router.custom_routing_function, router.scoring_func = False, None, "sigmoid"
    router.top_k, router.renormalize, router.routed_scaling_factor, router.e_score_correction_bias = (
        2,
        True,
        1.0,
        "bias",
    )
    with pytest.raises(AssertionError):
        router._compute_routing(None, "logits", None)
    assert mend(fault_of("cpu-sigmoid-routing"), module)
    assert router._compute_routing(None, "logits", None) == "grouped"
    assert asked == [
        {"gating_output": "logits", "topk": 2, "renormalize": True, "num_expert_group": 1, "topk_group": 1,
         "scoring_func": "sigmoid", "routed_scaling_factor": 1.0, "e_score_correction_bias": "bias"}
    ]  # fmt: skip
    router.scoring_func = "softmax"
    assert router._compute_routing(None, "logits", None) == "softmax"
    router.scoring_func = "other"
    with pytest.raises(AssertionError):
        router._compute_routing(None, "logits", None)


class AnswersEverything:
    """As llvmlite's library object: every name is a function, `__dict__` too."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        return print


def test_a_library_that_answers_every_name_is_passed_by(module_of: Callable[[str, str], ModuleType]) -> None:
    module = module_of("dispatcher", REBIND)
    owner, kernel, wrapper = SimpleNamespace(kernel=print), print, object()
    module.modules = [SimpleNamespace(lib=AnswersEverything(), one=3, owner=owner)]
    with pytest.raises(AttributeError):
        module._rebind_kernels([(kernel, wrapper)])
    assert mend(fault_of("cpu-numba-at-start"), module)
    module._rebind_kernels([(kernel, wrapper)])
    assert owner.kernel is wrapper


@pytest.mark.parametrize(("source", "says"), [
    ("def f():\n    g()\n    g()\n", "2 times"),
    ("def f():\n    pass\n", "0 times"),
    ("f = 3\n", "not a function"),
])  # fmt: skip
def test_a_statement_that_is_not_there_once_is_not_replaced(source: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        with_statement(source, "f", "g()", "h()")


def test_a_scope_is_cut_out_with_its_true_line() -> None:
    text = "x = 1\n" * 500 + ROPE + "\n\ndef forward_cpu():\n    pass\n"
    found = find_in(fault_of("cpu-latent-rope"), text)
    assert found is not None and found.line == text[: text.index("ops.rotary_embedding(")].count("\n") + 1
    # A string that begins at the margin makes the cut fail; the whole file is parsed then.
    odd = text.replace("return query, key", 's = """\nmargin"""\n        return query, key')
    again = find_in(fault_of("cpu-latent-rope"), odd)
    assert again is not None and again.line == found.line


def test_what_a_fault_spoils_is_told_from_the_row_of_check() -> None:
    from draftsmith.engine.faults import spoils

    assert spoils("cpu-expand-lost: at temperature > 0 …") == "sampling"
    assert spoils("cpu-latent-rope: latent attention …") == "always"
    assert spoils("cpu-seed-in-parts: a request …") == spoils("none of the known faults") == ""
    assert {f.spoils for f in FAULTS} <= {"", "sampling", "always"}
