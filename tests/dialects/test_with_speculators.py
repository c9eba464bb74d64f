"""The `speculators` package itself: a drafter that it wrote loads, converts and computes the same here, one written here loads
in it and computes the same there, and one of its drafters is served.

The package is installed by pip into a folder of its own in the user's cache (its wheel and what it imports, without its
pins), which only these tests' side process sees.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.contract import Contract, NormSwitches
from draftsmith.dialects import foreign, others
from draftsmith.dialects.checkpoint import Checkpoint, tensor_shapes
from draftsmith.dialects.convert import convert_folder
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter, Steps
from draftsmith.engine.metrics import read_counters
from draftsmith.engine.server import Server
from draftsmith.errors import UserError
from draftsmith.target.config import target_facts
from draftsmith.target.packages import home
from draftsmith.target.weights import read_embedding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
VERSION = "0.9.0"
PACKAGES = (
    f"speculators=={VERSION}", f"hs-connectors=={VERSION}", "datasets>=4,<=5.1", "loguru", "dill", "multiprocess", "xxhash",
    "pandas", "python-dateutil", "six", "pytz", "tzdata",
)  # fmt: skip
"""The package and what it imports beside draftsmith's own requirements."""
ROWS, DRAFT = 128, 40
"""Rows: one block of its attention."""
SWITCHES = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
}


@pytest.fixture(scope="module")
def site():
    """A folder for the path with the package in it; made once."""
    folder = home() / "packages" / f"speculators-{VERSION}"
    if not (folder / ".complete").is_file():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        if done.returncode:
            pytest.skip(f"speculators cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
        (folder / ".complete").touch()
    return folder


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory, tiny_target):
    """The tiny target with heads of 32, the smallest that the CPU engine has a kernel for."""
    folder = tmp_path_factory.mktemp("target") / "tiny-llama-32"
    shutil.copytree(tiny_target, folder)
    sizes = json.loads((folder / "config.json").read_text()) | {"num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(sizes | {"head_dim": 32}))
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_target):
    """Aux states, the tokens after them, and a draft vocab, as a file for both sides."""
    facts = target_facts(tiny_target)
    g = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("inputs") / "inputs.safetensors"
    chosen = torch.randperm(facts.vocab_size, generator=g)[:DRAFT].sort().values
    aux = torch.randn(ROWS, 3 * facts.hidden_size, generator=g)
    ids = torch.randint(facts.vocab_size, (ROWS,), generator=g)
    save_file({"aux": aux, "ids": ids, "draft_ids": chosen}, path)
    return path


def side(site, kind, target, inputs, jobs):
    script = Path(__file__).with_name("speculators_side.py")
    env = os.environ | {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), kind, str(target), str(inputs), *jobs]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


def theirs(folder):
    """Logits [T, D] of each draft step as the package computed them."""
    found = load_file(f"{folder}.logits")
    return [found[f"step{i}"] for i in range(len(found))]


@pytest.fixture(scope="module")
def made(tmp_path_factory, site, inputs, tiny_target):
    """Name of the switches → a drafter that the package wrote."""
    root = tmp_path_factory.mktemp("made")
    found = {name: root / name.replace(" ", "-") for name in SWITCHES}
    jobs = [f"{found[n]}={json.dumps({'norm_before_residual': False} | SWITCHES[n])}" for n in SWITCHES]
    side(site, "write", tiny_target, inputs, jobs)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory, site, inputs, tiny_target):
    """Name of the switches → a drafter written here, read by the package."""
    root, facts = tmp_path_factory.mktemp("written"), target_facts(tiny_target)
    found = {}
    for name, switches in SWITCHES.items():
        config = DrafterConfig(
            hidden_size=facts.hidden_size, target_hidden_size=facts.hidden_size, aux_layer_ids=[2, 4, 5], head_dim=16,
            vocab_size=facts.vocab_size, draft_vocab_size=DRAFT, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=96, max_position_embeddings=512, norms=NormSwitches(**switches),
            rope={"rope_theta": 1e6, "rope_type": "default"},
        )  # fmt: skip
        torch.manual_seed(1)
        tensors = {n: torch.randn(s) * 0.1 for n, s in tensor_shapes(config).items()}
        tensors |= {n: t.abs() + 0.5 for n, t in tensors.items() if "norm" in n}
        chosen = load_file(inputs)["draft_ids"]
        tensors["d2t"] = chosen - torch.arange(DRAFT)
        tensors["t2d"] = torch.zeros(facts.vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
        contract = Contract(target=facts.model_copy(update={"name": str(tiny_target)}))
        found[name] = root / name.replace(" ", "-")
        source = root / f"source-{len(found)}"
        others.write("vllm", Checkpoint(config, tensors, contract), source, dtype="float32")
        convert_folder(source, found[name], "speculators", target=tiny_target)
    side(site, "read", tiny_target, inputs, [str(f) for f in found.values()])
    return found


def ours(folder, inputs, target):
    """The same of our own drafter, read from `folder`."""
    found, given = foreign.read(folder), load_file(inputs)
    model = Drafter(found.config).eval()
    model.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in found.tensors.items()})
    if model.embed_tokens is None:
        model.attach_embedding(read_embedding(target).float())
    steps, ids, said = Steps(spans=((0, ROWS),)), given["ids"], []
    with torch.no_grad():
        state = model.fuse(given["aux"])
        for s in range(3):
            normed, state = model.step(state, model.embed(ids), torch.arange(ROWS) + s, steps)
            said.append(model.lm_head(normed))
            ids = torch.cat([given["ids"][1 + s :], torch.zeros(1 + s, dtype=torch.int64)])
    return said


def agree(a, b):
    assert len(a) == len(b) == 3
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert x.shape == (ROWS, DRAFT) and x.std() > 0.1
        assert torch.linalg.norm(x - y) <= 1e-4 * torch.linalg.norm(y), f"draft step {i}"


@pytest.mark.parametrize("name", SWITCHES)
def test_a_drafter_that_it_wrote_loads_converts_and_computes_the_same(tmp_path, made, inputs, tiny_target, name):
    said = theirs(made[name])
    agree(ours(made[name], inputs, tiny_target), said)
    for to in ("vllm", "speculators", "sglang"):
        out = tmp_path / f"{to}-eagle3"
        if to == "sglang" and SWITCHES[name].get("norm_before_residual"):
            with pytest.raises(UserError, match="norm_before_residual"):
                convert_folder(made[name], out, to, target=tiny_target)
            continue
        convert_folder(made[name], out, to, target=tiny_target)
        agree(ours(out, inputs, tiny_target), said)
    assert foreign.read(tmp_path / "vllm-eagle3").config.aux_layer_ids == [2, 4, 5]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_drafter_of_ours_loads_in_it_and_computes_the_same(written, inputs, tiny_target, name):
    agree(theirs(written[name]), ours(written[name], inputs, tiny_target))


@pytest.mark.engine
def test_a_drafter_that_it_wrote_is_served(tmp_path, made, tiny_target, real_engine):
    """As it wrote it, and converted: the same proposals, so the same counters, and the same tokens."""
    folders = {"as it is": made["plain"], "converted": tmp_path / "served-eagle3"}
    convert_folder(made["plain"], folders["converted"], "vllm", target=tiny_target)
    found = {}
    for name, folder in folders.items():
        spec = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
        with Server(
            real_engine, tiny_target, speculative=spec, log=tmp_path / f"{name}.log", dtype="float32", max_model_len=128
        ) as server:
            body = {"model": server.name, "prompt": list(range(5, 25)), "max_tokens": 40, "temperature": 0,
                    "ignore_eos": True, "return_token_ids": True}  # fmt: skip
            answer = httpx.post(server.url + "/v1/completions", json=body, timeout=300).json()
            counters = read_counters(httpx.get(server.url + "/metrics").text)
            found[name] = answer["choices"][0]["token_ids"], counters.drafts, counters.accepted_per_position
    assert len(found["converted"][0]) == 40 and found["converted"][1] > 0
    assert found["converted"] == found["as it is"]
