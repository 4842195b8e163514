"""mkdocs hooks: figures come from results/, which is published beside the pages."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from figures import ROOT
from mkdocs.structure.files import File

KINDS = {"results": (".json", ".png", ".txt"), "examples": (".ipynb",)}  # by folder, what is published of it
OUTSIDE = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Any, *, config: Any) -> Any:
    """Add the stored results, and the files of the repository that are pages too."""
    for folder, kinds in KINDS.items():
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix in kinds:
                files.append(File.generated(config, f"{folder}/{path.name}", abs_src_path=str(path)))
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links to results/ and examples/ into links within the site."""
    here = posixpath.dirname(page.file.src_uri) or "."
    filled = markdown.replace(" ± ", "\u00a0±\u00a0")  # a number stays beside its spread
    return re.sub(
        r"\]\((?:\.\./)*((?:results|examples)/[^)]*)\)", lambda match: f"]({posixpath.relpath(match[1], here)})", filled
    )
