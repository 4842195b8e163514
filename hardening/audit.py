"""Known holes in what headtilt depends on: ``python -m hardening.audit`` asks pip-audit about this environment.

Where no advisory database can be reached, that is what is stored, and nothing else is claimed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from hardening.record import record


def audit() -> dict[str, Any]:
    """Return what pip-audit knows of every installed distribution, or that it could not ask."""
    command = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off", "--timeout=15"]
    for service in ("pypi", "osv"):
        try:
            done = subprocess.run(
                [*command, f"--vulnerability-service={service}"],
                capture_output=True,
                text=True,
                check=False,
                timeout=240,
            )
        except subprocess.TimeoutExpired:
            continue
        if done.stdout.lstrip().startswith("{"):
            answers = json.loads(done.stdout)["dependencies"]
            # A registry without advisories skips everything, and "no known holes" would be worth nothing.
            listed = [one for one in answers if "skip_reason" not in one]
            if len(listed) < len(answers) / 2:
                continue
            holes = {one["name"]: [hole["id"] for hole in one["vulns"]] for one in listed if one.get("vulns")}
            return {"asked": service, "distributions": len(listed), "known_holes": holes}
    return {"asked": None, "why": "no advisory database could be reached: not audited"}


if __name__ == "__main__":
    print(record("audit", found := audit()), json.dumps(found, indent=1))
