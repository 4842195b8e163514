"""Asking the classifier about views: chunked passes, Monte-Carlo dropout, and a model that leaves as it came."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from headtilt.errors import ModelError, at_least, checked_seed
from headtilt.geometry.warp import Interpolation, Padding, warp, warp_all
from headtilt.model.chunking import (
    ACTIVATION_BYTES,
    activations,
    automatic_chunk,
    channels_last,
    convolves_faster_with_channels_last,
    filled_size,
    fitting_chunk,
    kind_of,
    out_of_memory,
    takes_channels_last,
)
from headtilt.model.evidence import Evidence, concatenate, mean_prediction
from headtilt.model.outputs import (
    as_logits,
    checked_model,
    joined,
    logits_in,
    pooled,
    tap_hooks,
    tappable,
)
from headtilt.model.state import Masks, Model, dropout_layers, dropout_masks, undisturbed, unhooked_afterwards
from headtilt.model.taps import found_taps, tap_names

Read = list[list[Tensor]]  # what each tap has read so far
_BORROWED = threading.local()  # predictors that this thread is using at the moment, and what their taps have read


class Predictor:
    """Evidence of a model on images or on views of them, in bounded memory and without autograd.

    Args:
        model: An `nn.Module` or any callable (B, C, H, W) → logits (B, Y); an object with `.logits` or a dict will do.
        mc_passes: How many dropout masks to average over; 1 is the deterministic model.
        mc_sampled: Sample the mask even for a single pass.
        seed: Seed of the dropout masks. A pass is one mask per layer, shared by all views (the paper's W ← ΛW), so
            results depend neither on chunks nor on the batch.
        chunk: Views per forward pass; None chooses by what the first chunk of a shape shows: its largest activation
            should fit the cache, or the GPU's memory. Where memory runs out the chunk is halved, and stays so.
        autocast: Reduced-precision dtype for `torch.autocast`, or None.
        output_key: Key or attribute that holds the logits where the model returns a dict or an object.
        features: Taps whose vectors, joined, are the features: names of modules, for what they are given, or with
            ":out" behind them for what they give; "auto" finds them where there are any (see `taps`); None reads none.
    """

    def __init__(
        self,
        model: Model,
        *,
        mc_passes: int = 1,
        mc_sampled: bool = False,
        seed: int = 0,
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
        output_key: str = "logits",
        features: str | Sequence[str] | None = None,
    ) -> None:
        self.model = checked_model(model)
        self.inner = tappable(model)
        self.passes = at_least("mc_passes", mc_passes, 1)
        self.sampled = mc_sampled or mc_passes > 1
        self.seed = checked_seed(seed)
        self.chunk = None if chunk is None else at_least("chunk", chunk, 1)
        self.autocast = autocast
        self.output_key = output_key
        self.features = tap_names(features)
        self.batched_passes: bool | None = None  # unknown until the first batch has been tried both ways
        self.seen: tuple[int, ...] | None = None  # (C, H, W) of the views shown last
        self.single_logit = False  # whether the model gave one logit, which is two classes inside
        self.repeated = 0  # most elements that one view has at a dropout layer, which repeats it; seen at that trial
        self.layouts: dict[tuple[Any, ...], bool] = {}  # whether channels may lie last, by device and precision
        self.chunks: dict[tuple[Any, ...], int] = {}  # views at once that each shape, device and precision bore
        self.masks: Masks = {}
        if self.sampled:
            dropout_layers(self.model)

    def __call__(self, images: Tensor) -> Evidence:
        """Return the evidence (B, …) of the images (B, C, H, W) as they are."""
        return self._chunked(len(images), images, lambda part: images[part].clone())  # a model may write into its input

    def views(
        self,
        images: Tensor,
        index: Tensor,
        poses: Tensor,
        *,
        padding: Padding = "zeros",
        interpolation: Interpolation = "bilinear",
    ) -> Evidence:
        """Return the evidence (V, …) of image `index[v]` seen under `poses[v]`, never more than a chunk in memory.

        Args:
            images: (B, C, H, W).
            index: (V,), which image each view shows.
            poses: (V, 3, 3).
            padding: See `warp`.
            interpolation: See `warp`.
        """

        def view(part: slice) -> Tensor:
            return warp(images[index[part]], poses[part], padding=padding, interpolation=interpolation)

        return self._chunked(len(poses), images, view, unit=1)

    def all_views(
        self,
        images: Tensor,
        poses: Tensor,
        *,
        padding: Padding = "zeros",
        interpolation: Interpolation = "bilinear",
    ) -> Evidence:
        """Return the evidence (B·P, …) of every image under every one of the poses, image by image.

        The same as `views`, but each pose's grid is built and its weights are computed once for all images.

        Args:
            images: (B, C, H, W).
            poses: (P, 3, 3).
            padding: See `warp`.
            interpolation: See `warp`.
        """
        blocks = images.chunk(-(-len(images) // self._chunk(images)))

        def seen(block: Tensor) -> Evidence:
            def view(part: slice) -> Tensor:
                if part.stop - part.start < len(block):  # memory ran out: no more of the block than is wanted
                    places = torch.arange(part.start, part.stop, device=block.device)
                    few, under = block[places % len(block)], poses[places.to(poses.device) // len(block)]
                    return warp(few, under, padding=padding, interpolation=interpolation)
                first, last = part.start // len(block), -(-part.stop // len(block))
                views = warp_all(block, poses[first:last], padding=padding, interpolation=interpolation)
                return views.flatten(0, 1)[part.start - first * len(block) : part.stop - first * len(block)]

            found = self._chunked(len(block) * len(poses), block, view, unit=len(block)).reshape(len(poses), -1)
            return found.transpose()

        return concatenate([seen(block) for block in blocks]).reshape(len(images) * len(poses))

    def borrowed(self) -> AbstractContextManager[Read]:
        """Put the model in eval mode and listen at its taps; leaving restores it, whatever happened.

        Calls within need not do so one by one. Yields what the taps read; nothing while they are still to be found.
        """
        mine: dict[Predictor, Read] = _BORROWED.__dict__.setdefault("by_predictor", {})
        return nullcontext(mine[self]) if self in mine else self._borrowed_first(mine)

    @contextmanager
    def _borrowed_first(self, mine: dict[Predictor, Read]) -> Iterator[Read]:
        """Do what `borrowed` says, and note among the thread's borrowed predictors that it is done."""
        read, hooks = tap_hooks(self.model, () if self.features == "auto" else self.features or ())
        with undisturbed(self.model), unhooked_afterwards(hooks):
            if self.features == "auto":
                yield read
                return
            mine[self] = read
            try:
                yield read
            finally:
                del mine[self]

    def with_features(self, features: str | Sequence[str] | None) -> Predictor:
        """Return a copy that also reads features; "auto" reads none where the model has none to read."""
        other = copy.copy(self)
        other.features = tap_names(features)
        return other

    def with_model(self, model: Model) -> Predictor:
        """Return a copy for another model, which has to be callable and have dropout where it is sampled."""
        other = copy.copy(self)
        other.model, other.inner = checked_model(model), tappable(model)
        other.batched_passes, other.repeated = None, 0
        other.layouts, other.chunks, other.masks = {}, {}, {}
        if other.sampled:
            dropout_layers(other.model)
        return other

    def device_and_dtype(self, images: Tensor) -> tuple[torch.device, torch.dtype]:
        """Return where the model lives and what it computes in; for a bare callable, what the images have."""
        if isinstance(self.model, nn.Module):
            hollow = False
            for tensor in chain(self.model.parameters(), self.model.buffers()):
                if tensor.is_floating_point() and not tensor.is_meta:
                    return tensor.device, tensor.dtype
                hollow |= tensor.is_meta  # weights of large models may be fetched when they are needed, but not all
            if hollow:
                raise ModelError("model lies on the meta device, which holds no numbers. Load its weights first.")
        return images.device, images.dtype

    def _chunked(
        self, count: int, images: Tensor, view: Callable[[slice], Tensor], unit: int | None = None
    ) -> Evidence:
        """Return the evidence of `count` views, a chunk at a time.

        Args:
            count: How many.
            images: What they are views of.
            view: Makes the views of a slice.
            unit: A chunk is a multiple of it where it can be; None for the images as they came, which also keep their
                layout: what the model says of them is its own answer, bit for bit.
        """
        self.seen = tuple(images.shape[1:])
        device, dtype = self.device_and_dtype(images)
        shape = (images.shape[1:], device, dtype)
        parts: list[Evidence] = []

        def views(part: slice) -> Tensor:
            most = self._chunk(images)
            made = view(part).to(device=device, dtype=dtype)
            if unit is None:
                return made
            spare = filled_size(device, len(made), most) - len(made)
            if spare:
                made = torch.cat([made, made[-1:].expand(spare, -1, -1, -1)])
            return channels_last(made) if self.layouts.get((device, dtype)) else made

        with torch.no_grad():
            self._find_chunk_and_layout(shape, lambda: views(slice(0, min(count, 2))))
            with self.borrowed() as read:
                start = 0
                while start < count:
                    chunk = self._chunk(images)
                    stop = min(start + (chunk // (unit or 1) * (unit or 1) or chunk), count)
                    part = self._attempt(partial(views, slice(start, stop)), stop - start, images.shape[1:], read)
                    if part is None:
                        self.chunks[shape] = max((stop - start) // 2, 1)
                        continue
                    parts.append(part)
                    start = stop
                return joined(parts)

    def _chunk(self, images: Tensor) -> int:
        """Return how many views of such images to run at once."""
        return (
            self.chunks.get((images.shape[1:], *self.device_and_dtype(images))) or self.chunk or automatic_chunk(images)
        )

    def _find_chunk_and_layout(self, shape: tuple[Any, ...], few: Callable[[], Tensor]) -> None:
        """Find out, at the first views of a shape, how many the device bears at once and in which layout they run."""
        layout = shape[1:]
        if layout not in self.layouts and not convolves_faster_with_channels_last(self.model, shape[1]):
            self.layouts[layout] = False
        measured = shape in self.chunks or self.chunk is not None or not isinstance(self.model, nn.Module)
        if self.features != "auto" and measured and layout in self.layouts:
            return
        with undisturbed(self.model):
            if self.features == "auto":
                self.features = found_taps(self.model, self._forward, few()[:1])
            if not measured or layout not in self.layouts:
                self._measure(shape, few, measured)

    def _measure(self, shape: tuple[Any, ...], few: Callable[[], Tensor], measured: bool) -> None:
        device, layout = shape[1], shape[1:]
        try:
            views = few()
            with activations(self.model, len(views)) as sizes:
                plain = self._forward(views, eager=True)  # hooks and compiled code do not go together
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            sizes = [ACTIVATION_BYTES[kind_of(device)]]  # one view at a time, then
            self.layouts.setdefault(layout, False)
        else:
            if layout not in self.layouts:
                self.layouts[layout] = takes_channels_last(self._forward, few(), plain, self.autocast)
        if not measured:
            self.chunks[shape] = fitting_chunk(device, max(sizes, default=1))

    def _attempt(self, views: Callable[[], Tensor], count: int, shape: tuple[int, ...], read: Read) -> Evidence | None:
        """Return the evidence of a chunk of `count` views of a shape, or None where memory ran out and less may do."""
        for tap in read:  # others may have run the model since the last chunk
            tap.clear()
        try:
            evidence = self._evidence(views(), read)
            # A chunk may have been filled up to a size that the device likes.
            return evidence if len(evidence.logits) == count else evidence.at(slice(count))
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if count == 1 and not (self.sampled and self.batched_passes is not False):
                raise ModelError(f"model raised on views of shape {(1, *shape)}: {error}") from error
        if count == 1:
            self.batched_passes = False  # less than one view is one pass of it
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _evidence(self, views: Tensor, read: Read) -> Evidence:
        if not self.sampled:
            logits = self._forward(views)
            return Evidence(logits, pooled(read, 1, len(views)))
        if self.batched_passes is None:
            self.batched_passes = self._passes_agree(views, read)
        # What dropout repeats must not take more memory than the chunk itself, or than activations may anyway.
        room = views.numel()
        if self.chunk is None:
            room = max(room, ACTIVATION_BYTES[kind_of(views.device)] // views.element_size())
        most = room // max(self.passes * self.repeated, 1) if self.batched_passes else len(views)
        return concatenate([self._averaged(part, read) for part in views.split(max(most, 1))])

    def _averaged(self, views: Tensor, read: Read) -> Evidence:
        """Return the evidence of views averaged over the dropout passes."""
        stacked = self._batched(views, self.passes) if self.batched_passes else self._one_by_one(views, self.passes)
        features = pooled(read, self.passes, len(views))
        return Evidence(mean_prediction(stacked), features)

    def _passes_agree(self, views: Tensor, read: Read) -> bool:
        """Return whether running the passes as one batch behind the first dropout layer is the plain computation."""
        # Two different views: one alone could be broadcast where a model adds what was repeated to what was not.
        few = views[:2] if len(views) > 1 else torch.cat([views, views.flip(-1)])
        plain = self._one_by_one(few, 2)
        try:
            return torch.allclose(self._batched(few.clone(), 2), plain, rtol=1e-3, atol=1e-4)
        except ModelError:
            return False
        finally:
            for tap in read:
                tap.clear()

    def _one_by_one(self, views: Tensor, passes: int) -> Tensor:
        return torch.stack([self._masked(views.clone(), range(number, number + 1)) for number in range(passes)])

    def _batched(self, views: Tensor, passes: int) -> Tensor:
        return self._masked(views, range(passes)).reshape(passes, len(views), -1)

    def _masked(self, views: Tensor, passes: range) -> Tensor:
        with dropout_masks(dropout_layers(self.model), passes, self.seed, self.masks) as sizes:
            logits = self._forward(views, copies=len(passes))
        self.repeated = max(sizes, default=0)
        return logits

    def _forward(self, views: Tensor, copies: int = 1, eager: bool = False) -> Tensor:
        try:
            with ExitStack() as stack:
                if self.autocast is not None:
                    stack.enter_context(torch.autocast(views.device.type, dtype=self.autocast))
                hooked = self.features or self.sampled or eager
                output = (self.inner if hooked else self.model)(views)
            self.single_logit = logits_in(output, self.output_key).shape[-1:] == (1,)
        except Exception as error:
            if isinstance(error, ModelError) or out_of_memory(error):
                raise
            raise ModelError(
                f"model raised on views of shape {tuple(views.shape)}: {str(error).rstrip('.')}. "
                "Check that the images have the channels and the size that the model takes."
            ) from error
        return as_logits(output, self.output_key, len(views) * copies)
