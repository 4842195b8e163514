"""From nothing to README's four lines, and to the photographs task: what each step takes, in an empty environment.

    python benchmarks/first_hour.py readme --log results/first-hour-readme.txt
    python benchmarks/first_hour.py photographs --log results/first-hour-photographs.txt

The repository is cloned, a virtual environment made, everything installed with what the docs say, but for the address
of torch's CPU build: any index will do that pip is set up for. Each line of the log has the seconds by the clock and
those of the processor, which hardly depend on what else the machine does. Torch has one thread, since two that wait
for each other on a busy machine take several times as long.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
# README's four lines, around the network and the digits that come with the package.
README = """
from headtilt.paper.data import load
from headtilt.sources import zoo

model, upright_images = zoo.load("digits"), load("digits", "fit", limit=300).floats()
images = load("digits", "test", limit=1).floats().rot90(-1, (-2, -1))
"""


class Log:
    """Runs commands in a folder, and notes what they take.

    Args:
        folder: Where they run.
        path: Of the log.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path, self.lines = folder, path, [__doc__.splitlines()[0]]
        self.start, self.cpu = time.perf_counter(), 0.0

    def run(self, *words: str, shown: str | None = None, said: bool = False) -> None:
        """Run a command, and note what it took; with `said`, also what it printed."""
        start, before = time.perf_counter(), processor()
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment = {**kept, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
        wall, cpu = time.perf_counter() - start, processor() - before
        self.cpu += cpu
        self.note(f"$ {shown or ' '.join(words)}\n    # {wall:.0f} s by the clock, {cpu:.0f} s of the processor")
        if said:
            self.note(done.stdout.rstrip())

    def note(self, text: str) -> None:
        """Write a line."""
        print(text, flush=True)
        self.lines.append(text)

    def close(self, name: str) -> None:
        """Write what it took in all, and the file."""
        self.note(f"\nin all: {time.perf_counter() - self.start:.0f} s by the clock, {self.cpu:.0f} s of the processor")
        self.note(f"python benchmarks/first_hour.py {name} --log results/{self.path.name}")
        load = " ".join(f"{one:.1f}" for one in os.getloadavg())
        self.note(
            f"{os.cpu_count()} cores, load over 1, 5 and 15 minutes: {load}; {time.strftime('%Y-%m-%d %H:%M')} UTC"
        )
        self.path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")


def processor() -> float:
    """Return the processor's seconds of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def code(page: str) -> str:
    """Return the Python blocks of a page, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("readme", "photographs"))
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args()
    extras = {"readme": ["'.[demo]'"], "photographs": ["'.[demo,hf]'", "scikit-image"]}[options.name]
    script = README + code("README.md") if options.name == "readme" else code("docs/tasks/photographs.md")
    with tempfile.TemporaryDirectory() as place:
        log = Log(Path(place), options.log.resolve())
        log.run("git", "clone", "--quiet", str(ROOT), "headtilt", shown="git clone headtilt")
        log.folder = Path(place, "headtilt")
        log.run(sys.executable, "-m", "venv", ".venv", shown="python3 -m venv .venv")
        pip = (".venv/bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir")
        log.run(*pip, TORCH, shown=f"pip install {TORCH}    # the CPU build")
        log.run(*pip, *(one.strip("'") for one in extras), shown=f"pip install {' '.join(extras)}")
        (log.folder / "first.py").write_text(script, encoding="utf-8")
        what = "README's four lines" if options.name == "readme" else "the Python blocks of docs/tasks/photographs.md"
        log.run(".venv/bin/python", "first.py", shown=f"python first.py    # {what}", said=True)
        log.close(options.name)


if __name__ == "__main__":
    main()
