"""How views go through a model: how many at once, in which memory layout, and what tells that memory ran out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headtilt.errors import ModelError
from headtilt.model.state import Model, by_this_thread, unhooked_afterwards

# Elements of input in the very first chunk of a shape, before anything is known of the model.
CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
CHUNK_RANGE = {"cpu": (8, 512), "cuda": (64, 16_384)}
# Bytes that the largest activation of a chunk may take afterwards. On a CPU it should stay in the cache: the paper's
# small network takes a third longer per view at 9 MB than up to 7 MB, the large one a sixth longer at 20 MB than up to
# 15 MB, MobileNetV2 a third longer at 38 MB. A GPU wants enough work per launch, and has the memory.
ACTIVATION_BYTES = {"cpu": 12 * 2**20, "cuda": 2**30}
MOST_VIEWS = {"cpu": 384, "cuda": 16_384}


def automatic_chunk(images: Tensor) -> int:
    """Return how many views of such images (B, C, H, W) to run at once on their device, the model unseen."""
    kind = kind_of(images.device)
    low, high = CHUNK_RANGE[kind]
    return min(max(CHUNK_ELEMENTS[kind] // images[0].numel(), low), high)


def fitting_chunk(device: torch.device, activation: int) -> int:
    """Return how many views to run at once where the largest activation of one takes so many bytes.

    A rule and no stopwatch: the same machine or another, the same chunks, hence the same bits.
    """
    budget = ACTIVATION_BYTES[kind_of(device)]
    if device.type == "cuda":
        budget = min(budget, torch.cuda.get_device_properties(device).total_memory // 16)
    return min(max(budget // max(activation, 1), 1), MOST_VIEWS[kind_of(device)])


def filled_size(device: torch.device, count: int, most: int) -> int:
    """Return how many views to run where `count` are wanted: on a GPU one of few sizes, four to the octave.

    cuDNN plans every convolution anew for each batch size that it has not met. A gate that lets some images go leaves
    another number of views every time. Filling them up costs a twelfth of the work at the median, a quarter at most.

    Args:
        device: A CPU takes any number as it comes.
        count: At least 1.
        most: Never more than this, unless `count` is.
    """
    if device.type != "cuda":
        return count
    step = 1 << max(count.bit_length() - 3, 0)
    return max(min(-(-count // step) * step, most), count)


def kind_of(device: torch.device) -> str:
    """Return the kind of device whose figures apply."""
    return device.type if device.type in CHUNK_ELEMENTS else "cpu"


@contextmanager
def activations(model: Model, views: int) -> Iterator[list[int]]:
    """Collect in the list that is yielded how many bytes one view takes in the output of every module.

    Args:
        model: Bare callables show none.
        views: How many views will go through it.
    """
    sizes: list[int] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
        if isinstance(output, Tensor) and output.ndim:
            sizes.append(output.numel() * output.element_size() // views)

    modules = model.modules() if isinstance(model, nn.Module) else ()
    leaves = [module for module in modules if not any(module.children())]
    # A scripted module runs its parts without Python, and takes no hooks.
    ours = by_this_thread(note)
    hooks = (leaf.register_forward_hook(ours) for leaf in leaves if not isinstance(leaf, torch.jit.ScriptModule))
    with unhooked_afterwards(hooks):
        yield sizes


def convolves_faster_with_channels_last(model: Model, device: torch.device) -> bool:
    """Return whether it is worth trying that layout for the model's convolutions.

    On an H200 in single precision the paper's small and large network and MobileNetV2 take 0.9, 0.8 and 0.75 of the
    time per view.
    """
    if not isinstance(model, nn.Module) or not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return False
    return device.type == "cuda" or (device.type == "cpu" and torch.backends.mkldnn.is_available())


def takes_channels_last(
    forward: Callable[[Tensor], Tensor], views: Tensor, plain: Tensor, autocast: torch.dtype | None
) -> bool:
    """Return whether a model takes views whose channels lie last in memory, and says the same of them.

    Args:
        forward: From views (V, C, H, W) to logits (V, Y).
        views: A few.
        plain: What the model says of them as they lie.
        autocast: Reduced precision in which it runs, or None.
    """
    try:
        moved = forward(channels_last(views))
    except (MemoryError, RuntimeError):  # such as from `view` where it should be `reshape`
        return False
    tolerance = 2e-2 if autocast is not None else 5e-3 if views.is_cuda else 1e-4  # a GPU convolves in TF32
    alike = torch.allclose(moved, plain, rtol=tolerance, atol=tolerance)
    return alike and torch.equal(moved.argmax(1), plain.argmax(1))


def channels_last(views: Tensor) -> Tensor:
    """Return views (V, C, H, W) that lie in memory as (V, H, W, C), marked as such also where C is 1."""
    _, channels, height, width = views.shape
    moved = views.contiguous(memory_format=torch.channels_last)
    return moved.as_strided(views.shape, (height * width * channels, 1, width * channels, channels))


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a GPU or in the host."""
    if isinstance(error, ModelError):  # says what the model did wrong, whatever its words
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = ("can't allocate memory", "not enough memory", "out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
