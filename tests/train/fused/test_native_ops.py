"""The compiled loops of a CPU, and plain torch where there is no compiler: both against float64, and their choice."""

import shutil
import subprocess
import sys

import pytest
import torch
from fused_cases import assert_same, autograd, fused_of
from test_fused_step import CASES, packed
from tiny_drafters import document, tiny_config, tiny_drafter, tiny_head

from draftsmith.train.batch import join
from draftsmith.train.fused import cpu_attention, native, ops, ops_native, ops_torch

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(native.library(torch.float32) is None, reason="no C compiler here")


@pytest.mark.parametrize("form", [ops_torch, pytest.param(ops_native, marks=compiled)], ids=["torch", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["plain", "every norm", "both fc norms", "own embedding", "part of the head rotated"])
def test_each_form_equals_autograd(case, dtype, form):
    model = tiny_drafter(tiny_config(**CASES[case]), dtype=dtype)
    head, batch = tiny_head(model, dtype), packed(model.config).to("cpu", dtype)
    step = fused_of(model, head, dtype)
    step.ops = form
    loss, stats = step.loss_and_grads(batch, step.plan(batch, 3, multiple=1), [1.0, 0.8, 0.64])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    assert_same(step, loss, stats, autograd(model, head, batch, 3), tolerance)


@compiled
def test_compiled_loops_are_taken_for_wide_types_alone():
    assert ops.ops_for(CPU, torch.float32) is ops_native
    assert ops.ops_for(CPU, torch.bfloat16) is ops_torch


def _soft_ce(form, logits, teacher, weight):
    logits, teacher = logits.clone(), teacher.clone()
    n = len(logits)
    figures = torch.zeros(3, n, dtype=logits.dtype)
    index = torch.arange(n)
    entropy = form.settle(teacher)
    form.soft_ce(logits, teacher, index.int(), index, weight, figures, index, entropy)
    return logits, figures


@compiled
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_cross_entropy_of_float32_agrees_with_float64(scale):
    """Also where nearly all probabilities vanish, and for rows without weight."""
    gen = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(9, 1003, generator=gen, dtype=torch.float64) * scale for _ in range(2))
    weight = torch.tensor([0.5, 0.0, 1, 1, 2, 0.25, 1, 0.0, 1], dtype=torch.float64)
    expected = _soft_ce(ops_torch, logits, teacher, weight)
    found = _soft_ce(ops_native, logits.float(), teacher.float(), weight.float())
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-5)


@compiled
def test_a_row_that_is_no_number_stays_one():
    """The optimizer leaves such a step out; a kernel that hid it would train on nonsense."""
    logits = torch.randn(2, 64)
    logits[0, 7] = float("nan")
    grad, figures = _soft_ce(ops_native, logits, torch.randn(2, 64), torch.ones(2))
    assert grad[0].isnan().all() and figures[0, 0].isnan()
    assert grad[1].isfinite().all() and figures[:, 1].isfinite().all()


@compiled
@pytest.mark.parametrize("multiple", [1, 128], ids=["active rows only", "all rows"])
def test_attention_in_several_blocks_of_rows(monkeypatch, multiple):
    monkeypatch.setattr(cpu_attention, "CELLS", 1)  # blocks of 8 rows
    model = tiny_drafter()
    head, batch = tiny_head(model), join([document(40, 9, 0), document(30, 2, 1)], pad_to=72)
    step = fused_of(model, head)
    loss, stats = step.loss_and_grads(batch, step.plan(batch, 3, multiple=multiple), [1.0, 0.8, 0.64])
    assert_same(step, loss, stats, autograd(model, head, batch, 3))


@compiled
def test_same_threads_same_bits():
    gen = torch.Generator().manual_seed(1)
    x, dy = torch.randn(37, 40, generator=gen), torch.randn(37, 40, generator=gen)
    results = []
    for _ in range(3):
        out, dw = torch.empty_like(x), torch.zeros(40)
        ops_native.norm_bwd(dy, x, torch.ones(40), 1e-5, out, dw)
        results.append((out, dw))
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(r, results[0], strict=True))


@compiled
def test_kernels_refuse_what_they_cannot_read():
    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match="dense rows"):
        ops_native.silu_mul_fwd(x, torch.empty(3, 4).t())
    with pytest.raises(ValueError, match="one type"):
        ops_native.norm_fwd(x, torch.ones(6, dtype=torch.float64), 1e-5, torch.empty(4, 6))


@pytest.mark.parametrize("env", [{"DRAFTSMITH_NATIVE": "0"}, {"CC": "false"}], ids=["switched off", "broken compiler"])
def test_without_a_compiler_plain_torch_serves(env, tmp_path, monkeypatch):
    for name, value in (env | {"DRAFTSMITH_HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    native.library.cache_clear()
    try:
        assert ops.ops_for(CPU, torch.float32) is ops_torch
        assert not list(tmp_path.rglob("*.so"))
    finally:
        native.library.cache_clear()


@pytest.mark.skipif(not shutil.which("cc") or sys.platform != "linux", reason="no C compiler here")
def test_a_built_library_is_kept_and_one_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    monkeypatch.setattr(native, "SOURCE", source)
    command = [shutil.which("cc"), "-shared", "-fPIC", str(source)]
    first = native._built(command)
    stamp = first.stat().st_mtime_ns
    assert native._built(command) == first and first.stat().st_mtime_ns == stamp
    source.write_text("int one(void) { return 1 }")
    with pytest.raises(subprocess.CalledProcessError):
        native._built(command)
    assert [p.name for p in (tmp_path / "native").iterdir()] == [first.name]
