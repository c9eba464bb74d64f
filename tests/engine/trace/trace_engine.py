"""A made-up engine whose modules raise in every way that explain must follow."""

from __future__ import annotations

import textwrap
from pathlib import Path

FILES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '0.19.0'\n",
    "vllm/engine/__init__.py": "",
    "vllm/config.py": """
        ALLOWED = ["llama", "qwen"]


        class SpeculativeConfig:
            def _verify(self):
                if self.method == "eagle3" and self.target:
                    if not any(w in self.target.kind for w in ALLOWED):
                        raise ValueError(
                            f"{self.method} is only supported for {ALLOWED} "
                            f"models. Got {self.target.kind=}"
                        )
                    elif self.count is None:
                        raise ValueError("count must be given for %s and %d" % (self.method, self.n))
                return self
    """,
    "vllm/worker.py": """
        import logging

        logger = logging.getLogger(__name__)


        class ShapeError(Exception):
            def __init__(self, wanted, got):
                super().__init__(f"The tensor wants {wanted} rows and the file gives {got} rows")


        def load(weights, name, size):
            for item in weights:
                try:
                    item.copy()
                except KeyError as e:
                    msg = "Could not place the weights of {} ".format(item.name)
                    if size > 3:
                        msg += "because " + str(e)
                    raise RuntimeError(msg) from e
            assert size == len(weights), f"Expected {size} weights in the folder, found {len(weights)}"
            while size:
                size -= 1
            else:
                logger.error("The loader of %s lost %d of its parts", name, size)
            err = TypeError("Loader " + name + " has no way to read the parts")
            raise err


        def run(tensor, other):
            with tensor.lock:
                return tensor @ other


        def twin_a(x):
            raise NotImplementedError(f"Mode {x} is not available on this device")


        def twin_b(x):
            raise NotImplementedError(f"Mode {x} is not available on this device")
    """,
}


def write_engine(site: Path) -> Path:
    for name, text in FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(textwrap.dedent(text).lstrip("\n"))
    return site


def line_of(site: Path, file: str, text: str) -> int:
    """1-based line of the first line that holds `text`."""
    return next(n for n, row in enumerate((site / file).read_text().split("\n"), 1) if text in row)
