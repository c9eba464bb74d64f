"""Known vulnerabilities of what is installed: exit 1 where there is one. Where the advisory service cannot be asked
(no network, a mirror without it), it says for how many packages it could not tell."""

from __future__ import annotations

import json
import subprocess
import sys


def main() -> int:
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--local",
        "--skip-editable",
        "--progress-spinner",
        "off",
        "--timeout",
        "15",
    ]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"audit: could not tell: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
        return 0
    bad = [(d["name"], d["version"], v["id"]) for d in found for v in d.get("vulns", [])]
    asked = sum("vulns" in d for d in found)
    for name, version, advisory in bad:
        print(f"audit: {name} {version}: {advisory}")
    print(f"audit: {asked} of {len(found)} packages asked about, {len(bad)} known vulnerabilities")
    if asked < len(found):
        print(f"audit: could not tell for {len(found) - asked}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
