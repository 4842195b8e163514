"""Weights on disk: safetensors alone, written atomically; nothing here ever unpickles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headtilt.errors import DataError, MissingExtraError
from headtilt.io.files import written_whole


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError("safetensors", "data") from error
    return safetensors


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors and string metadata to a safetensors file, whole or not at all."""
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with written_whole(path) as unfinished:
        _safetensors().torch.save_file(contiguous, unfinished, metadata=metadata)


def load_weights(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> nn.Module:
    """Return the model with the tensors of a file in it; raise `DataError` where they are those of another network."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise DataError(
            f"{path} holds the weights of another network: {error}. Delete it or write it again."
        ) from error
    return model


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    library = _safetensors()
    try:
        with library.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except Exception as error:
        raise DataError(f"{path} is not a readable safetensors file: {error}. Delete it or write it again.") from error
