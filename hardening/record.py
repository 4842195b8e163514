"""Where the figures of a run go."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def record(name: str, figures: dict[str, Any]) -> Path:
    """Write the figures to results/hardening-NAME.json with command, versions, hardware and date, and return where."""
    from headtilt.paper.experiments.report import metadata, write_json

    program = Path(sys.argv[0])
    command = ["python", "-m", f"hardening.{program.stem}", *sys.argv[1:]]
    return write_json(RESULTS / f"hardening-{name}.json", {**figures, **metadata(shlex.join(command))})
