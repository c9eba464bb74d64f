"""Runs under an engine's interpreter: what a worker does first on the CPU, in a process that has imported numba. No arguments.

Prints `RESULT {"registered": true}`, or dies.
"""

from __future__ import annotations

import json


def main() -> None:
    import numba  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    current_platform.register_triton_kernel_overrides()
    print("RESULT " + json.dumps({"registered": True}))


if __name__ == "__main__":
    main()
