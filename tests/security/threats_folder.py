"""A hostile drafter, target, states or run folder."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pair as tp
from threat import HarmError, little_memory, refused, require, threat

from draftsmith.check import headers
from draftsmith.errors import UserError


def join(folder: Path, name: str) -> Path:
    return folder / name


def no_inside(module: str) -> Any:
    return lambda mp: mp.setattr(f"{module}.inside", join)


class Payload:
    """A pickle of this makes a file where it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def victim(folder: Path) -> Path:
    """Weights that belong to somebody else, beside the hostile folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tp.write_safetensors(folder / "secret.safetensors", {"lm_head.weight": np.ones((4, 4), "<f4")})
    return folder / "secret.safetensors"


def index_to(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = {"weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


@threat("T01", "an index names a file outside the folder", no_inside("draftsmith.check.headers"))
def _(tmp: Path) -> None:
    victim(tmp / "other")
    index_to(tmp / "model", "../other/secret.safetensors")
    require(headers.read_weights(tmp / "model").nbytes == 0, "another folder's file was opened")


@threat("T02", "weights are a link out of the folder (check)", no_inside("draftsmith.check.headers"))
def _(tmp: Path) -> None:
    (tmp / "model").mkdir()
    (tmp / "model" / "model.safetensors").symlink_to(victim(tmp / "other"))
    require("lm_head.weight" not in headers.read_weights(tmp / "model").tensors, "the link was followed")


@threat("T03", "weights are a link out of the folder (target)", no_inside("draftsmith.target.tensors"))
def _(tmp: Path) -> None:
    from draftsmith.target.tensors import Checkpoint

    tp.Pair(tp.target_config(), {}, {}, {}, []).write_target(tmp / "model")
    (tmp / "model" / "model.safetensors").unlink()
    (tmp / "model" / "model.safetensors").symlink_to(victim(tmp / "other"))
    with refused("leaves the folder"):
        Checkpoint.open(tmp / "model")


def _no_header_limit(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(headers, "MAX_HEADER", 1 << 40)


@threat("T04", "a header bomb: a file that is all header", _no_header_limit)
def _(tmp: Path) -> None:
    length = headers.MAX_HEADER + 1 if headers.MAX_HEADER < 1 << 30 else 100_000_001
    with (tmp / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", length))
        f.truncate(8 + length)  # a hole: nothing on disk
    with little_memory():
        require(bool(headers.read_weights(tmp).problems), "it was taken for weights")


def _plain_json(mp: pytest.MonkeyPatch) -> None:
    mp.setattr("draftsmith.untrusted.parse_json", json.loads)


@threat("T05", "a config nested beyond the interpreter's stack", _plain_json)
def _(tmp: Path) -> None:
    from draftsmith.target.config import load_config

    (tmp / "config.json").write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with refused("JSON"):
        load_config(tmp)


def _no_json_limit(mp: pytest.MonkeyPatch) -> None:
    mp.setattr("draftsmith.target.config.read_json", lambda path: json.loads(path.read_bytes()))


@threat("T06", "a config of any size", _no_json_limit)
def _(tmp: Path) -> None:
    from draftsmith.target.config import load_config
    from draftsmith.untrusted import MAX_JSON

    with (tmp / "config.json").open("wb") as f:
        f.write(b'{"a": 1}')
        f.seek(2 * MAX_JSON)
        f.write(b"\n")
    with little_memory(MAX_JSON + (8 << 20)), refused():
        load_config(tmp)


def _no_map_limit(mp: pytest.MonkeyPatch) -> None:
    for module in ("checkpoint", "foreign"):
        mp.setattr(f"draftsmith.dialects.{module}.require_sane_map", lambda *a: None)


@threat("T07", "a map of a billion entries", _no_map_limit)
def _(tmp: Path) -> None:
    from draftsmith.dialects.checkpoint import MAX_VOCAB
    from draftsmith.dialects.foreign import read

    n, hidden = MAX_VOCAB + 64, 2
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2,
        "intermediate_size": 2, "vocab_size": n, "draft_vocab_size": n, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu", "target_hidden_size": hidden,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }  # fmt: skip
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "fc.weight": ("F32", (hidden, 3 * hidden)), "norm.weight": ("F32", (hidden,)),
        "lm_head.weight": ("F32", (n, hidden)), "d2t": ("I64", (n,)),
    }  # fmt: skip
    layer = "layers.0."
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{layer}{norm}.weight"] = ("F32", (hidden,))
    for p, wide in (("q", 2 * hidden), ("k", 2 * hidden), ("v", 2 * hidden), ("o", hidden)):
        shapes[f"{layer}self_attn.{p}_proj.weight"] = ("F32", (2, wide))
    for p in ("gate", "up", "down"):
        shapes[f"{layer}mlp.{p}_proj.weight"] = ("F32", (2, 2))
    tp.write_sparse(tmp / "model.safetensors", shapes, {"F32": 32, "I64": 64})
    (tmp / "config.json").write_text(json.dumps(config))
    with refused("vocabulary or map"):
        read(tmp)


def _always_allow(mp: pytest.MonkeyPatch) -> None:
    from draftsmith.dialects import foreign

    load = foreign._load
    mp.setattr(foreign, "_load", lambda folder, allow: load(folder, True))


def _drafter_of_pickle(tmp: Path, content: Any) -> Path:
    import torch

    (tmp / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 8})
    )
    torch.save(content, tmp / "pytorch_model.bin")
    return tmp


@threat("T08", "weights are a pickle, and nobody was asked", _always_allow)
def _(tmp: Path) -> None:
    import torch

    from draftsmith.dialects.foreign import read

    with refused("--allow-pickle"):
        read(_drafter_of_pickle(tmp, {"fc.weight": torch.zeros(8, 24)}))


def _full_unpickler(mp: pytest.MonkeyPatch) -> None:
    import torch

    load = torch.load
    mp.setattr(torch, "load", lambda *a, **k: load(*a, **(k | {"weights_only": False})))


@threat("T09", "a pickle that runs code, read with --allow-pickle", _full_unpickler)
def _(tmp: Path) -> None:
    from draftsmith.dialects.foreign import read

    marker = tmp / "owned"
    with contextlib.suppress(UserError):
        read(_drafter_of_pickle(tmp, {"fc.weight": Payload(marker)}), allow_pickle=True)
    require(not marker.exists(), "the pickle's code was run")


def _torchs_own_index(mp: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    mp.setattr("draftsmith.train.dcp_reader.CarefulReader.read_metadata", FileSystemReader.read_metadata)


@threat("T10", "a run folder whose resume index runs code", _torchs_own_index)
def _(tmp: Path) -> None:
    from draftsmith.train.dcp_reader import CarefulReader

    marker = tmp / "owned"
    (tmp / ".metadata").write_bytes(pickle.dumps(Payload(marker)))
    with contextlib.suppress(UserError, AttributeError):
        CarefulReader(tmp).read_metadata()
    require(not marker.exists(), "the index's code was run")


EVIL = "import os\nos.mkdir({marker!r})\n"


def _code_folder(tmp: Path) -> Path:
    """A target whose tokenizer and model are code of its own; importing it makes tmp/owned."""
    (tmp / "evil.py").write_text(EVIL.format(marker=str(tmp / "owned")) + "class Evil: pass\n")
    places = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    config = tp.target_config(model_type="evil", auto_map=places, architectures=["Evil"])
    (tmp / "config.json").write_text(json.dumps(config))
    (tmp / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": places}))
    return tmp


def _trust_all(mp: pytest.MonkeyPatch) -> None:
    """The flag counts as given; code is copied to a folder of the test's own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from draftsmith.target.tokenizer import TargetTokenizer

    for owner in (AutoTokenizer, AutoModelForCausalLM):
        load = owner.from_pretrained
        mp.setattr(owner, "from_pretrained", lambda *a, load=load, **k: load(*a, **(k | {"trust_remote_code": True})))
    load_own = TargetTokenizer.load
    mp.setattr(TargetTokenizer, "load", staticmethod(lambda folder, trust=False: load_own(folder, True)))


def _modules_here(tmp: Path) -> Any:
    mp = pytest.MonkeyPatch()
    mp.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp / "modules"))
    return mp


@threat("T11", "a target whose tokenizer is code of its own", _trust_all)
def _(tmp: Path) -> None:
    from draftsmith.target.tokenizer import TargetTokenizer

    with _modules_here(tmp).context(), contextlib.suppress(Exception):
        TargetTokenizer.load(_code_folder(tmp))
    require(not (tmp / "owned").exists(), "the folder's code was run")


@threat("T12", "a target whose model is code of its own", _trust_all)
def _(tmp: Path) -> None:
    import torch

    from draftsmith.extract.transformers_backend import load_model

    with _modules_here(tmp).context(), contextlib.suppress(Exception):
        load_model(_code_folder(tmp), torch.float32, "cpu")
    require(not (tmp / "owned").exists(), "the folder's code was run")


def byte_tokenizer(folder: Path, template: str) -> None:
    """The root conftest's maker; several folders of tests have a module `conftest`, so it is taken by its path."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("root_conftest", Path(__file__).parent.parent / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_byte_tokenizer(folder, template)


def _no_sandbox(mp: pytest.MonkeyPatch) -> None:
    import jinja2.sandbox

    mp.setattr(jinja2.sandbox.ImmutableSandboxedEnvironment, "is_safe_attribute", lambda *a: True)
    mp.setattr(jinja2.sandbox.ImmutableSandboxedEnvironment, "is_safe_callable", lambda *a: True)


@threat("T13", "a chat template that reaches for the system", _no_sandbox)
def _(tmp: Path) -> None:
    from draftsmith.target.tokenizer import RenderError, TargetTokenizer

    marker = tmp / "owned"
    byte_tokenizer(tmp, "{{ cycler.__init__.__globals__.os.mkdir('" + str(marker) + "') }}")
    (tmp / "config.json").write_text(json.dumps(tp.target_config()))
    with contextlib.suppress(RenderError):
        TargetTokenizer.load(tmp).render([{"role": "user", "content": "hello"}])
    require(not marker.exists(), "the template ran code")


def _store(folder: Path, value: float) -> Any:
    import torch

    from draftsmith.contract import Contract, TargetFacts
    from draftsmith.extract.codecs import make_codec
    from draftsmith.extract.states import States
    from draftsmith.extract.store import StateWriter

    facts = TargetFacts(
        name="t", config_hash="0" * 64, architecture="LlamaForCausalLM", model_type="llama",
        outer_model_type="llama", hidden_size=4, num_layers=8, vocab_size=16,
    )  # fmt: skip
    contract = Contract(target=facts, aux_layer_ids=[2, 4, 5], final_state="pre_norm")
    states = States(
        token_ids=torch.arange(3),
        boundary=1,
        aux=torch.full((3, 3, 4), value, dtype=torch.bfloat16),
        final_start=0,
        final=torch.full((3, 4), value, dtype=torch.bfloat16),
    )
    with StateWriter(folder, contract, make_codec("bf16")) as writer:
        writer.add("row", states)
    return states


def _any_shard(mp: pytest.MonkeyPatch) -> None:
    """Both guards away: an index may name any shard, and one that it does not describe is taken at its own size."""
    from draftsmith.extract.store import StateStore

    mp.setattr("draftsmith.extract.shard.require_own", lambda *a: None)
    init = StateStore.__init__

    def trusting(self: Any, folder: Path) -> None:
        class Sizes(dict[str, int]):
            def __missing__(self, shard: str) -> int:
                return (folder / f"{shard}.safetensors").stat().st_size

        init(self, folder)
        self._sizes = Sizes()

    mp.setattr(StateStore, "__init__", trusting)


@threat("T14", "a states store whose index points outside it", _any_shard)
def _(tmp: Path) -> None:
    from draftsmith.extract.store import StateStore

    _store(tmp / "theirs", 7.0)
    _store(tmp / "hostile", 1.0)
    index = tmp / "hostile" / "shard-00000.json"
    found = json.loads(index.read_text())
    found["rows"][0]["shard"] = "../theirs/shard-00000"
    index.write_text(json.dumps(found))
    with refused("is said to lie in"):
        if float(StateStore.open(tmp / "hostile").read("row").aux[0, 0, 0]) == 7.0:
            raise HarmError("states of another store were read")


@threat("T15", "a states folder to import that names files elsewhere", no_inside("draftsmith.extract.speculators"))
def _(tmp: Path) -> None:
    from draftsmith.extract.speculators import _tables, write_speculators
    from draftsmith.extract.store import StateStore

    _store(tmp / "store", 1.0)
    write_speculators(StateStore.open(tmp / "store"), tmp / "theirs")
    (tmp / "hostile").mkdir()
    place = "../theirs/data-00000-of-00001.arrow"
    (tmp / "hostile" / "state.json").write_text(json.dumps({"_data_files": [{"filename": place}]}))
    with refused("not a file of this folder"):
        list(_tables(tmp / "hostile"))


@threat(
    "T16",
    "a recipe that names Python objects",
    lambda mp: mp.setattr("yaml.safe_load", __import__("yaml").unsafe_load),
)
def _(tmp: Path) -> None:
    from draftsmith.recipe import load_recipe

    marker = tmp / "owned"
    (tmp / "r.yaml").write_text(f"target: !!python/object/apply:os.mkdir ['{marker}']\n")
    with contextlib.suppress(UserError):
        load_recipe(tmp / "r.yaml")
    require(not marker.exists(), "the recipe ran code")


@threat(
    "T17",
    "a wheel that unpacks to any size",
    lambda mp: mp.setattr("draftsmith.engine.reader.source.LARGEST", 1 << 40),
)
def _(tmp: Path) -> None:
    import zipfile

    from draftsmith.engine.reader.source import ZipSource

    with zipfile.ZipFile(tmp / "vllm.whl", "w", zipfile.ZIP_DEFLATED) as z, z.open("vllm/config.py", "w") as f:
        for _ in range(40):
            f.write(b"#" * (1 << 20))
    with little_memory(), refused("no source file is that large"):
        ZipSource(tmp / "vllm.whl").read_bytes("vllm/config.py")
