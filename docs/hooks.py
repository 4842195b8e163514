"""mkdocs hooks: figures come from results/, which is published beside the pages."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from figures import RESULTS, ROOT
from mkdocs.structure.files import File

KINDS = (".json", ".png", ".txt")
OUTSIDE = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Any, *, config: Any) -> Any:
    """Add the stored results, and the files of the repository that are pages too."""
    for path in sorted(RESULTS.iterdir()):
        if path.suffix in KINDS:
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links to results/ into links within the site."""
    here = posixpath.dirname(page.file.src_uri) or "."
    filled = markdown.replace(" ± ", "\u00a0±\u00a0")  # a number stays beside its spread
    return re.sub(
        r"\]\((?:\.\./)*results/([^)]*)\)", lambda match: f"]({posixpath.relpath(f'results/{match[1]}', here)})", filled
    )
