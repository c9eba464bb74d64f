"""The examples for containers, Slurm and Kubernetes: parsed, and every draftsmith command in them is one."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
sys.path.insert(0, str(Path(__file__).parent))
from command_lines import parse  # noqa: E402

INSTRUCTIONS = {
    "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD", "ARG", "LABEL", "EXPOSE", "VOLUME",
}  # fmt: skip
SBATCH = ("job-name", "nodes", "ntasks", "gres", "cpus-per-task", "mem", "time", "signal", "output")


def test_the_parser_knows_a_wrong_command() -> None:
    parse(["check", "a", "b", "--json"])
    parse(["engine", "install", "--platform", "cuda"])
    for words in (["chek", "a"], ["check", "a", "--no-such-option"], ["run"]):
        with pytest.raises(Exception, match=r"(?i)no command|no such option|missing"):
            parse(words)


def instructions(text: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", "".join(line for line in text.splitlines(True) if not line.lstrip().startswith("#")))
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def test_the_container_file() -> None:
    found = instructions((DEPLOY / "Containerfile").read_text())
    assert found[0][0] == "FROM" and {word for word, _ in found} <= INSTRUCTIONS
    for word, rest in found:
        if word == "COPY":
            *sources, _ = shlex.split(rest)
            assert all((ROOT / s).exists() for s in sources), rest
        if word in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list)
        if word == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest], check=False).returncode == 0
            for part in rest.split("&&"):
                if shlex.split(part)[:1] == ["draftsmith"]:
                    parse(shlex.split(part)[1:])
    users = [i for i, (word, _) in enumerate(found) if word == "USER"]
    assert users and found[users[-1]][1] != "root", "it must not run as root"
    assert users[-1] < next(i for i, (word, _) in enumerate(found) if word == "ENTRYPOINT")


def test_the_slurm_script() -> None:
    path = DEPLOY / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    options = argparse.ArgumentParser(exit_on_error=False)
    for name in SBATCH:
        options.add_argument(f"--{name}", required=True)
    options.add_argument("--requeue", action="store_true", required=True)
    lines = path.read_text().splitlines()
    words = [w for line in lines if line.startswith("#SBATCH ") for w in shlex.split(line.removeprefix("#SBATCH "))]
    given, left = options.parse_known_args(words)
    assert not left and re.fullmatch(r"\d+:\d\d:\d\d", given.time) and re.fullmatch(r"gpu:\d+", given.gres)
    ranks = re.search(r"--nproc-per-node (\d+)", path.read_text())
    assert ranks and given.gres == f"gpu:{ranks[1]}", "as many ranks as GPUs"
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("run ") and "()" not in line]
    assert commands
    for command in commands:
        if command[0] == "torchrun":
            command = ["draftsmith", *command[command.index("draftsmith.cli.main") + 1 :]]
        assert command[0] == "draftsmith"
        parse(command[1:])


def pods() -> list[tuple[str, dict[str, Any]]]:
    documents = [d for d in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if d]
    for d in documents:
        assert set(d) >= {"apiVersion", "kind", "metadata", "spec"} and d["metadata"]["name"]
    assert {d["kind"] for d in documents} == {"PersistentVolumeClaim", "Job", "Deployment"}
    return [(d["kind"], d["spec"]["template"]["spec"]) for d in documents if "template" in d["spec"]]


def test_the_kubernetes_example() -> None:
    claims = {
        d["metadata"]["name"]
        for d in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
        if d["kind"] == "PersistentVolumeClaim"
    }
    for kind, pod in pods():
        volumes = {v["name"]: v for v in pod["volumes"]}
        for v in volumes.values():
            assert "emptyDir" in v or v["persistentVolumeClaim"]["claimName"] in claims
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            command = [str(w) for w in container["command"]]
            assert all(isinstance(w, str) for w in container["command"]), "arguments must be strings"
            assert command[0] == "draftsmith" and container["image"]
            parse(command[1:])
            assert {m["name"] for m in container["volumeMounts"]} <= set(volumes)
            for e in container.get("env", []):
                assert "value" not in e or "TOKEN" not in e["name"], "a secret comes from a Secret"
        if kind == "Deployment":
            port = pod["containers"][0]["readinessProbe"]["httpGet"]["port"]
            assert str(port) in pod["containers"][0]["command"]
