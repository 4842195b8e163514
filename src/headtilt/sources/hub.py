"""Bundles on the Hugging Face hub: pushed from a folder, fetched by name."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from headtilt.errors import DataError, MissingExtraError, OptionError
from headtilt.io.bundle import CONFIG, TENSORS

NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
CARD = """---
library_name: headtilt
tags: [headtilt, image-classification]
---

What headtilt fitted for `{model}`: how upright images look to it.

```python
import headtilt as ht

robust = ht.from_pretrained("{model}", bundle="{name}")
```
"""


def push(robust: Any, name: str, *, token: str | None = None, private: bool = False, model: str = "MODEL") -> str:
    """Write what was fitted to a repository on the hub, made where there is none, and return its address.

    Args:
        robust: A wrapper with `save`.
        name: ORGANISATION/NAME.
        token: Of an account that may write there; the one that is logged in by default.
        private: Whether a new repository is private.
        model: The spec of the model that it was fitted for, for the card.
    """
    check_name(name)
    api = _api(token)
    with tempfile.TemporaryDirectory() as folder:
        robust.save(folder)
        (Path(folder) / "README.md").write_text(CARD.format(model=model, name=name), encoding="utf-8")
        try:
            api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="A bundle of headtilt")
        except Exception as error:  # the hub's own errors, and those of the network below it
            raise DataError(f"{name} could not be written to the hub: {error}") from error
    return f"{api.endpoint}/{name}"


def fetched(name: str, *, token: str | None = None) -> Path:
    """Return the folder of a bundle that a name on the hub stands for; its two files are fetched once and kept."""
    check_name(name)
    try:
        folder = _api(token).snapshot_download(name, allow_patterns=[CONFIG, TENSORS])
    except Exception as error:  # as above
        raise DataError(
            "bundle must be a folder that headtilt wrote, or a name on the hub that can be reached; "
            f"{name!r} is neither: {error}"
        ) from error
    return Path(folder)


def on_hub(bundle: str | os.PathLike[str]) -> bool:
    """Return whether a bundle is named as on the hub, and is no folder here."""
    return isinstance(bundle, str) and not Path(bundle).exists() and NAME.fullmatch(bundle) is not None


def check_name(name: str) -> None:
    """Raise `OptionError` unless a name is one of the hub."""
    if not NAME.fullmatch(name):
        raise OptionError(f"name must be ORGANISATION/NAME; got {name!r}.")


def _api(token: str | None) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hf") from error
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)
