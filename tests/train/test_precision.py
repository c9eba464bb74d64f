"""Products in bfloat16 on a CPU: where they are used, where not, and that nothing else of the process notices."""

from types import SimpleNamespace

import pytest
import torch
from test_loop import section, training

from draftsmith.cpu import multiplies_bf16
from draftsmith.train import loop, precision, stage
from draftsmith.train.precision import bf16_products, has_bf16_products


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("fpu sse2 avx512f avx512_bf16 avx512vl", True),
        ("fpu avx512_vnni amx_bf16 amx_tile", True),
        ("fpu avx2 avx512f avx512_vnni", False),  # it would be emulated
        ("fpu xavx512_bf16", False),
    ],
)
def test_what_a_cpu_can_do_is_read_from_its_flags(tmp_path, flags, found):
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nmodel name : some CPU\nflags\t\t: {flags}\nbugs : none\n")
    assert multiplies_bf16(info) == found


def test_a_machine_that_does_not_say_multiplies_in_float32(tmp_path):
    assert not multiplies_bf16(tmp_path / "none")
    (tmp_path / "arm").write_text("processor : 0\nFeatures : fp asimd bf16\n")
    assert not multiplies_bf16(tmp_path / "arm")


def test_the_setting_is_put_back_whatever_happens():
    before = torch.get_float32_matmul_precision()
    with bf16_products(True):
        assert torch.get_float32_matmul_precision() == "medium"
        with bf16_products(False):
            assert torch.get_float32_matmul_precision() == "medium"
    with pytest.raises(ZeroDivisionError), bf16_products(True):
        _ = 1 / 0
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("device", "dtype", "able", "used"),
    [
        ("cpu", None, True, True),
        ("cpu", None, False, False),
        ("cpu", "float32", True, False),
        ("cuda", None, True, False),
    ],
)
def test_they_are_used_on_an_able_cpu_unless_the_recipe_says_float32(monkeypatch, device, dtype, able, used):
    monkeypatch.setattr(precision, "has_bf16_products", lambda: able)
    assert stage.rounds_products(SimpleNamespace(dtype=dtype), torch.device(device)) == used


@pytest.mark.parametrize("hand", [True, False])
def test_steps_round_their_products_and_validation_does_not(tmp_path, monkeypatch, hand):
    """The rounding is that of bfloat16: the weights are near those of float32, and are not the same where the CPU can."""
    found: dict[str, set[str]] = {"step": set(), "validation": set()}
    acceptance = loop.acceptance

    def judged(*args):
        found["validation"].add(torch.get_float32_matmul_precision())
        return acceptance(*args)

    monkeypatch.setattr(loop, "acceptance", judged)
    weights = []
    for rounded in (False, True):
        run = training(tmp_path / str(rounded), section(lr=0.001), hand=hand, bf16_products=rounded)
        inner = run.core.step

        def step(*args, inner=inner):
            found["step"].add(torch.get_float32_matmul_precision())
            return inner(*args)

        run.core.step = step
        run.run()
        weights.append(torch.cat([p.detach().flatten().clone() for p in run.core.model.parameters()]))
    assert found == {"step": {"highest", "medium"}, "validation": {"highest"}}
    assert torch.allclose(*weights, atol=0.02) and weights[0].isfinite().all()
    moved = (weights[0] - weights[1]).abs().max()
    assert moved > 0 or not has_bf16_products()
