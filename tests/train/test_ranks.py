"""Two processes (gloo) train as one would, and a run goes on with another number of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import rank_side
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


FORMS = ["hand", "muon", "reference", "mla", "hand+context", "mla+context"]


SHARED = "hand+context"


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The same optimizer step by one process (this one) and by two; four steps of a run whose packs two ranks share."""
    folder = tmp_path_factory.mktemp("ranks")
    rank_side.main(folder, "step", FORMS)
    launch(2, folder, "step", *FORMS, "--", "4", SHARED)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_make_the_step_of_one(form, steps):
    one, two = (load_file(steps / f"step-{c}-{form}.safetensors") for c in (1, 2))
    assert set(one) == set(two)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=2e-5, msg=name)


def test_ranks_that_share_each_pack_train_as_one_and_one_goes_on(steps, tmp_path):
    """Four steps of two ranks that share every pack, then four of one process: the weights of eight of one process."""
    rank_side.main(tmp_path, "4", [SHARED])
    for folder, packs, name in ((steps, 4, f"4-2-{SHARED}"), (steps, 8, f"8-1-{SHARED}")):
        if packs == 8:
            rank_side.main(tmp_path, "8", [SHARED])
            rank_side.main(steps, "8", [SHARED])
        one, two = load_file(tmp_path / f"{packs}-1-{SHARED}.safetensors"), load_file(folder / f"{name}.safetensors")
        assert int(two["packs"]) == packs
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4, msg=key)
    lines = [(f / SHARED / "metrics.jsonl").read_text().splitlines() for f in (tmp_path, steps)]
    tokens = [[json.loads(line).get("tokens") for line in x] for x in lines]
    assert tokens[0] and tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hand+context", "reference+context"])
def test_four_ranks_take_two_packs_and_share_each_by_two(form, tmp_path):
    rank_side.main(tmp_path, "step", [form])
    launch(4, tmp_path, "step", form)
    one, four = (load_file(tmp_path / f"step-{c}-{form}.safetensors") for c in (1, 4))
    for name, value in one.items():
        torch.testing.assert_close(four[name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.slow
def test_gradients_of_several_ranks_are_summed_in_float32(tmp_path):
    """1 + 3 * 2^-9: a sum in bfloat16 stays at 1, as each small part alone is less than half of its last bit."""
    launch(4, tmp_path, "reduce", "whole", "sharded")
    right = torch.tensor(1 + 3 * 2.0**-9).bfloat16()
    assert right > 1
    for form in ("whole", "sharded"):
        grad = load_file(tmp_path / f"reduce-4-{form}.safetensors")["grad"]
        assert bool((grad == right).all())


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2), (2, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(first, then, tmp_path):
    launch(first, tmp_path, "4", "hand", "muon", "mla")
    launch(then, tmp_path, "8", "hand", "muon", "mla")
    if first == then:
        (tmp_path / "whole").mkdir()
        launch(first, tmp_path / "whole", "8", "hand", "muon", "mla")
    for form in ("hand", "muon", "mla"):
        found = load_file(tmp_path / f"8-{then}-{form}.safetensors")
        assert int(found["packs"]) == 8
        if first == then:
            for name, value in load_file(tmp_path / f"whole/8-{then}-{form}.safetensors").items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
