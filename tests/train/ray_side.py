"""Run by test_train_stream.py in a process of its own: the train stage with its engines on a local Ray cluster of two
nodes; one engine's process is killed while it works. Prints how many were killed and the stage's status."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

from draftsmith.pipeline import open_run
from draftsmith.recipe import load_recipe
from draftsmith.stage import execute
from draftsmith.train.stage import STAGE
from draftsmith.ui import QuietUi

killed: list[int] = []
over = threading.Event()


def kill_one_engine() -> None:
    """The first actor process that is seen at work (Ray names them after their class)."""
    while not over.wait(0.05):
        for p in psutil.process_iter(["cmdline"]):
            if any("PackMaker" in part for part in p.info["cmdline"] or ()):
                time.sleep(1.0)
                os.kill(p.pid, signal.SIGKILL)
                killed.append(p.pid)
                return


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    killer = threading.Thread(target=kill_one_engine)
    killer.start()
    settings = {"train.stream": "ray", "train.stream_engines": 2}
    record = execute(STAGE, open_run(load_recipe(Path(sys.argv[1]), settings), QuietUi()))
    over.set()
    killer.join()
    print("killed", len(killed))
    print(record["status"])
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
