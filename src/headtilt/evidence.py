"""What the classifier says of each view: chunked passes, Monte-Carlo dropout, and a model that leaves as it came."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from headtilt.borrow import Masks, Model, dropout_masks, undisturbed
from headtilt.errors import ModelError, OptionError, at_least, checked_seed
from headtilt.pace import (
    ACTIVATION_BYTES,
    activations,
    automatic_chunk,
    channels_last,
    convolves_faster_with_channels_last,
    fitting_chunk,
    kind_of,
    out_of_memory,
)
from headtilt.warp import Interpolation, Padding, warp, warp_all

SAMPLED_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True)
class Evidence:
    """What a classifier says of views of any leading shape.

    Attributes:
        logits: (…, Y). Their softmax is the mean softmax over the dropout passes, their logsumexp the mean logsumexp;
            with one deterministic pass they are the model's own logits.
        features: (…, D), the penultimate features, or None where nobody asked for them.
    """

    logits: Tensor
    features: Tensor | None = None

    def at(self, *index: Any) -> Evidence:
        """Return the evidence of the views at an index into the leading axes."""
        return Evidence(self.logits[index], None if self.features is None else self.features[index])

    def reshape(self, *leading: int) -> Evidence:
        """Return the same views under other leading axes."""
        features = self.features
        return Evidence(
            self.logits.reshape(*leading, self.logits.shape[-1]),
            None if features is None else features.reshape(*leading, features.shape[-1]),
        )

    @property
    def log_probs(self) -> Tensor:
        """Log of the mean prediction (…, Y)."""
        return self.logits.log_softmax(dim=-1)

    @property
    def energy(self) -> Tensor:
        """Mean energy E = −logsumexp (…); low where the model is familiar with the view."""
        return -self.logits.logsumexp(dim=-1)

    @property
    def labels(self) -> Tensor:
        """Most probable class (…)."""
        return self.logits.argmax(dim=-1)


def floored(logits: Tensor) -> Tensor:
    """Return logits that a network can read: classes ruled out by −∞ are merely hopeless."""
    return logits.clamp_min(-1e3)


def concatenate(parts: Sequence[Evidence], dim: int = 0) -> Evidence:
    """Return the evidence of all parts along one of the leading axes; features only where all parts have them."""
    features = [part.features for part in parts if part.features is not None]
    joined = torch.cat(features, dim) if len(features) == len(parts) else None
    return Evidence(torch.cat([part.logits for part in parts], dim), joined)


Evaluate = Callable[[Tensor, Tensor], Evidence]
"""``(index (V,), poses (V, 3, 3)) -> Evidence (V, …)``: what the classifier says of those views of a batch."""


def everywhere(evaluate: Evaluate, batch: int, poses: Tensor) -> Evidence:
    """Return the evidence (B·P, …) of each of `batch` images under each of the poses (P, 3, 3), image by image.

    `Views` knows a short cut; any other callable is asked view by view.
    """
    if isinstance(evaluate, Views):
        return evaluate.everywhere(poses)
    index = torch.arange(batch, device=poses.device).repeat_interleave(poses.shape[0])
    return evaluate(index, poses.repeat(batch, 1, 1))


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
        features: Modules whose inputs, joined, are the feature vector: one name or several; "auto" takes the last two
            linear layers that see one vector per view, where there are any; None reads none.
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
        self.passes = at_least("mc_passes", mc_passes, 1)
        self.sampled = mc_sampled or mc_passes > 1
        self.seed = checked_seed(seed)
        self.chunk = None if chunk is None else at_least("chunk", chunk, 1)
        self.autocast = autocast
        self.output_key = output_key
        self.features = (features,) if isinstance(features, str) and features != "auto" else features
        self.batched_passes: bool | None = None  # unknown until the first batch has been tried both ways
        self.seen: tuple[int, ...] | None = None  # (C, H, W) of the views shown last
        self.single_logit = False  # whether the model gave one logit, which is two classes inside
        self.repeated = 0  # most elements that one view has at a dropout layer, which repeats it; seen at that trial
        self.channels_last: bool | None = None  # unknown until the first batch has been tried both ways
        self.chunks: dict[tuple[Any, ...], int] = {}  # views at once that each shape and device turned out to bear
        self.masks: Masks = {}
        if self.sampled:
            self._dropouts()

    def __call__(self, images: Tensor) -> Evidence:
        """Return the evidence (B, …) of the images (B, C, H, W) as they are."""
        return self._chunked(len(images), images, lambda part: images[part])

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
                first, last = part.start // len(block), -(-part.stop // len(block))
                views = warp_all(block, poses[first:last], padding=padding, interpolation=interpolation)
                return views.flatten(0, 1)[part.start - first * len(block) : part.stop - first * len(block)]

            found = self._chunked(len(block) * len(poses), block, view, unit=len(block)).reshape(len(poses), -1)
            features = found.features
            return Evidence(found.logits.transpose(0, 1), None if features is None else features.transpose(0, 1))

        with undisturbed(self.model):
            return concatenate([seen(block) for block in blocks]).reshape(len(images) * len(poses))

    def borrowed(self) -> AbstractContextManager[None]:
        """Return a context in which calls need not restore the model one by one: leaving it does, whatever happened."""
        return undisturbed(self.model)

    def with_features(self, features: str | Sequence[str] | None) -> Predictor:
        """Return a copy that also reads features; "auto" reads none where the model has none to read."""
        other = copy.copy(self)
        other.features = (features,) if isinstance(features, str) and features != "auto" else features
        return other

    def with_model(self, model: Model) -> Predictor:
        """Return a copy for another model, which has to be callable and have dropout where it is sampled."""
        other = copy.copy(self)
        other.model, other.batched_passes, other.repeated = checked_model(model), None, 0
        other.channels_last, other.chunks, other.masks = None, {}, {}
        if other.sampled:
            other._dropouts()
        return other

    def device_and_dtype(self, images: Tensor) -> tuple[torch.device, torch.dtype]:
        """Return where the model lives and what it computes in; for a bare callable, what the images have."""
        if isinstance(self.model, nn.Module):
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                if tensor.is_floating_point():
                    return tensor.device, tensor.dtype
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
        shape = (images.shape[1:], device)
        parts: list[Evidence] = []

        def views(part: slice) -> Tensor:
            made = view(part).to(device=device, dtype=dtype)
            return channels_last(made) if self.channels_last and unit is not None else made

        with torch.no_grad(), undisturbed(self.model):
            self._get_acquainted(shape, lambda: views(slice(0, min(count, 2))))
            with self.feature_taps() as taps:
                start = 0
                while start < count:
                    chunk = self._chunk(images)
                    stop = min(start + (chunk // (unit or 1) * (unit or 1) or chunk), count)
                    part = self._attempt(partial(views, slice(start, stop)), stop - start, images.shape[1:], taps)
                    if part is None:
                        self.chunks[shape] = max((stop - start) // 2, 1)
                        continue
                    parts.append(part)
                    start = stop
        evidence = concatenate(parts)
        check_finite(evidence.logits)
        return evidence

    def _chunk(self, images: Tensor) -> int:
        """Return how many views of such images to run at once."""
        device, _ = self.device_and_dtype(images)
        return self.chunks.get((images.shape[1:], device)) or self.chunk or automatic_chunk(images)

    def _get_acquainted(self, shape: tuple[Any, ...], few: Callable[[], Tensor]) -> None:
        """Find out, at the first views of a shape, how many the device bears at once and in which layout they run."""
        device = shape[-1]
        if self.features == "auto":
            self.features = self._find_feature_layers(few()[:1])
        if self.channels_last is None and not convolves_faster_with_channels_last(self.model, device, self.autocast):
            self.channels_last = False
        measured = shape in self.chunks or self.chunk is not None or not isinstance(self.model, nn.Module)
        if measured and self.channels_last is not None:
            return
        views = few()
        try:
            with activations(self.model, len(views)) as sizes:
                plain = self._forward(views)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, ModelError) or not out_of_memory(error):
                raise
            sizes = [ACTIVATION_BYTES[kind_of(device)]]  # one view at a time, then
        else:
            if self.channels_last is None:
                self.channels_last = self._layouts_agree(views, plain)
        if not measured:
            self.chunks[shape] = fitting_chunk(device, max(sizes, default=1))

    def _layouts_agree(self, views: Tensor, plain: Tensor) -> bool:
        """Return whether the model takes views whose channels lie last in memory, and says the same of them."""
        try:
            moved = self._forward(channels_last(views))
        except (MemoryError, RuntimeError):  # such as from `view` where it should be `reshape`
            return False
        tolerance = 1e-4 if self.autocast is None else 2e-2
        return torch.allclose(moved, plain, rtol=tolerance, atol=tolerance) and torch.equal(
            moved.argmax(1), plain.argmax(1)
        )

    def _attempt(
        self, views: Callable[[], Tensor], count: int, shape: tuple[int, ...], taps: list[list[Tensor]]
    ) -> Evidence | None:
        """Return the evidence of a chunk of `count` views of a shape, or None where memory ran out and less may do."""
        try:
            return self._evidence(views(), taps)
        except (MemoryError, RuntimeError) as error:
            # A `ModelError` says what the model did wrong, whatever its words.
            if isinstance(error, ModelError) or not out_of_memory(error):
                raise
            if count == 1 and not (self.sampled and self.batched_passes is not False):
                raise ModelError(f"model raised on views of shape {(1, *shape)}: {error}") from error
        if count == 1:
            self.batched_passes = False  # less than one view is one pass of it
        for tap in taps:
            tap.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _evidence(self, views: Tensor, taps: list[list[Tensor]]) -> Evidence:
        if not self.sampled:
            logits = self._forward(views)
            return Evidence(logits, _pooled(taps, 1, len(views)))
        if self.batched_passes is None:
            self.batched_passes = self._passes_agree(views, taps)
        # What dropout repeats must not take more memory than the chunk itself, or than activations may anyway.
        room = views.numel()
        if self.chunk is None:
            room = max(room, ACTIVATION_BYTES[kind_of(views.device)] // views.element_size())
        most = room // max(self.passes * self.repeated, 1) if self.batched_passes else len(views)
        return concatenate([self._averaged(part, taps) for part in views.split(max(most, 1))])

    def _averaged(self, views: Tensor, taps: list[list[Tensor]]) -> Evidence:
        """Return the evidence of views averaged over the dropout passes."""
        stacked = self._batched(views, self.passes) if self.batched_passes else self._one_by_one(views, self.passes)
        features = _pooled(taps, self.passes, len(views))
        familiar = stacked.logsumexp(-1)
        log_probs = (stacked - familiar[..., None]).logsumexp(0) - math.log(self.passes)
        return Evidence(log_probs + familiar.mean(0)[:, None], features)

    def _passes_agree(self, views: Tensor, taps: list[list[Tensor]]) -> bool:
        """Return whether running the passes as one batch behind the first dropout layer is the plain computation."""
        # Two different views: one alone could be broadcast where a model adds what was repeated to what was not.
        few = views[:2] if len(views) > 1 else torch.cat([views, views.flip(-1)])
        plain = self._one_by_one(few, 2)
        try:
            return torch.allclose(self._batched(few, 2), plain, rtol=1e-3, atol=1e-4)
        except ModelError:
            return False
        finally:
            for tap in taps:
                tap.clear()

    def _one_by_one(self, views: Tensor, passes: int) -> Tensor:
        return torch.stack([self._masked(views, range(number, number + 1)) for number in range(passes)])

    def _batched(self, views: Tensor, passes: int) -> Tensor:
        return self._masked(views, range(passes)).reshape(passes, len(views), -1)

    def _masked(self, views: Tensor, passes: range) -> Tensor:
        with dropout_masks(self._dropouts(), passes, self.seed, self.masks) as sizes:
            logits = self._forward(views, copies=len(passes))
        self.repeated = max(sizes, default=0)
        return logits

    def _dropouts(self) -> list[nn.Module]:
        modules = self.model.modules() if isinstance(self.model, nn.Module) else ()
        layers: list[nn.Module] = [module for module in modules if isinstance(module, SAMPLED_LAYERS) and module.p > 0]
        if not layers:
            raise OptionError(
                "mc_passes > 1 needs a dropout layer with p > 0 to sample, and this model has none. Use mc_passes=1."
            )
        return layers

    def _forward(self, views: Tensor, copies: int = 1) -> Tensor:
        try:
            with ExitStack() as stack:
                if self.autocast is not None:
                    stack.enter_context(torch.autocast(views.device.type, dtype=self.autocast))
                output = self.model(views)
            self.single_logit = logits_in(output, self.output_key).shape[-1:] == (1,)
        except ModelError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise ModelError(f"model raised on views of shape {tuple(views.shape)}: {error}") from error
        return _as_logits(output, self.output_key, len(views) * copies)

    @contextmanager
    def feature_taps(self) -> Iterator[list[list[Tensor]]]:
        """Collect the input of each feature layer in the lists that are yielded."""
        layers = [feature_layer(self.model, name) for name in self.features or ()]
        taps: list[list[Tensor]] = [[] for _ in layers]
        handles = [
            layer.register_forward_pre_hook(lambda _, inputs, tap=tap: tap.append(inputs[0]))
            for layer, tap in zip(layers, taps, strict=True)
        ]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()

    def _find_feature_layers(self, view: Tensor) -> tuple[str, ...]:
        """Return the names of the last two linear layers that see one vector per view, in the order they run."""
        order: list[str] = []

        def note(name: str, inputs: tuple[Tensor, ...]) -> None:
            if inputs[0].ndim == 2 and len(inputs[0]) == len(view):
                order.append(name)

        handles = [
            module.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs))
            for name, module in (self.model.named_modules() if isinstance(self.model, nn.Module) else ())
            if isinstance(module, nn.Linear)
        ]
        try:
            self._forward(view)
        finally:
            for handle in handles:
                handle.remove()
        return tuple(dict.fromkeys(order))[-2:]


@dataclass(frozen=True)
class Views:
    """An `Evaluate`: what a predictor says of views of these images, and a calibrator of that.

    Attributes:
        predictor: Whom to ask.
        images: (B, C, H, W).
        padding: See `warp`.
        interpolation: See `warp`.
        calibrate: From evidence to evidence; None leaves it as it is.
    """

    predictor: Predictor
    images: Tensor
    padding: Padding = "zeros"
    interpolation: Interpolation = "bilinear"
    calibrate: Callable[[Evidence], Evidence] | None = None

    def __call__(self, index: Tensor, poses: Tensor) -> Evidence:
        """Return the evidence (V, …) of image `index[v]` seen under `poses[v]`."""
        seen = self.predictor.views(self.images, index, poses, padding=self.padding, interpolation=self.interpolation)
        return seen if self.calibrate is None else self.calibrate(seen)

    def everywhere(self, poses: Tensor) -> Evidence:
        """Return the evidence (B·P, …) of every image under every pose (P, 3, 3), image by image."""
        seen = self.predictor.all_views(self.images, poses, padding=self.padding, interpolation=self.interpolation)
        return seen if self.calibrate is None else self.calibrate(seen)


def checked_model(model: Model) -> Model:
    """Return the model; raise `ModelError` unless it can be called."""
    if not callable(model):
        raise ModelError(f"model must be an nn.Module or a callable that returns logits; got {type(model).__name__}.")
    return model


def check_finite(logits: Tensor) -> None:
    """Raise `ModelError` for NaN, +∞, or −∞ for every class; a class ruled out by −∞ is fine. Synchronises once."""
    largest = logits.amax(-1)
    if bool(largest.isfinite().all()):
        return
    what = "NaN logits" if bool(largest.isnan().any()) else "infinite logits (+∞, or −∞ for every class of a view)"
    raise ModelError(f"model returned {what}. Check its weights and the range its input expects.")


def checked_features(features: Any) -> str | Sequence[str] | None:
    """Return the names of feature layers; raise `OptionError` unless they are one name, several, or None."""
    names = [features] if features is None or isinstance(features, str) else features
    if not isinstance(names, Sequence) or not all(name is None or isinstance(name, str) for name in names):
        raise OptionError(f'features must be "auto", the name of a module, several names, or None; got {features!r}.')
    return cast("str | Sequence[str] | None", features)


def feature_layer(model: Model, name: str) -> nn.Module:
    """Return the module of that name, whose input serves as feature vector."""
    if not isinstance(model, nn.Module):
        raise OptionError("features need an nn.Module; a plain callable has none that can be read.")
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise OptionError(f"features must name a module of the model; {name!r} is none.") from error


def _as_logits(output: Any, key: str, views: int) -> Tensor:
    """Return the (V, Y) logits in whatever the model returned."""
    logits = logits_in(output, key)
    if logits.ndim != 2 or len(logits) != views or not logits.shape[1] or not logits.is_floating_point():
        raise ModelError(
            f"model must return floating-point logits ({views}, Y); got {logits.dtype} {tuple(logits.shape)}."
        )
    return two_classes(logits.float() if logits.dtype != torch.float64 else logits)


def two_classes(logits: Tensor) -> Tensor:
    """Return a single logit z (…, 1) as the two classes (−z/2, z/2), no and yes; all others as they are.

    The softmax of the two is the sigmoid of z, and their energy is low wherever the model is sure, yes or no.
    """
    return torch.cat([-logits / 2, logits / 2], dim=-1) if logits.shape[-1] == 1 else logits


def logits_in(output: Any, key: str) -> Tensor:
    """Return the tensor in whatever a model returned: itself, or what a dict or an object holds under `key`."""
    if isinstance(output, dict):
        if key not in output:
            raise ModelError(
                f"model returned a dict without {key!r}; it has {sorted(map(str, output))}. Set output_key."
            )
        output = output[key]
    elif not isinstance(output, Tensor) and hasattr(output, key):
        output = getattr(output, key)
    if not isinstance(output, Tensor):
        raise ModelError(f"model must return logits as a tensor, an object or dict with {key!r}; got {type(output)}.")
    return output


def _pooled(taps: list[list[Tensor]], passes: int, views: int) -> Tensor | None:
    """Return the tapped features (V, D): mean over passes, and over space where they still have any."""
    vectors = []
    for tap in taps:
        tapped = torch.cat(tap)
        tap.clear()
        copies = len(tapped) // views
        if copies not in (1, passes) or len(tapped) != copies * views:
            raise ModelError(f"a feature layer ran on {len(tapped)} rows for {views} views. Name another module.")
        vectors.append(as_vectors(tapped).reshape(copies, views, -1).mean(0))
    return torch.cat(vectors, dim=1) if vectors else None


def as_vectors(tapped: Tensor) -> Tensor:
    """Return one feature vector per view: the mean over space where a layer still sees any."""
    return (tapped.flatten(2).mean(-1) if tapped.ndim == 4 else tapped.flatten(1)).float()
