"""Two processes (gloo) train as one would, and a run goes on with another number of them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SIDE = Path(__file__).with_name("rank_side.py")


def launch(count, *arguments):
    command = [sys.executable]
    if count > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    done = subprocess.run(
        [*command, str(SIDE), *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("form", ["hand", pytest.param("reference", marks=pytest.mark.slow), "mla"])
def test_two_ranks_make_the_step_of_one(form, tmp_path):
    for count in (1, 2):
        launch(count, tmp_path, "step", form)
    one, two = (load_file(tmp_path / f"step-{c}.safetensors") for c in (1, 2))
    assert set(one) == set(two)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hand", "mla"])
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2), (2, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(form, first, then, tmp_path):
    launch(first, tmp_path, "4", form)
    launch(then, tmp_path, "8", form)
    found = load_file(tmp_path / f"8-{then}.safetensors")
    assert int(found["packs"]) == 8
    whole = tmp_path / "whole"
    whole.mkdir()
    if first == then:
        launch(first, whole, "8", form)
        again = load_file(whole / f"8-{first}.safetensors")
        for name, value in found.items():
            torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6, msg=name)
