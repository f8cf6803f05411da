"""TensorBoard summaries other than numbers: images, figures and histograms that modules sow or metrics return.

A sown value is a pytree of arrays, which the step returns unchanged. It is drawn and encoded later, in the thread that writes event files.
"""

import contextlib
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct as flax_struct

from fitflax.callbacks.event_files import Write
from fitflax.callbacks.summaries import summary_value, write_histogram, write_values
from fitflax.checkpoints.checkpoint import Checkpoint
from fitflax.errors import CallbackError, NotReadyError
from fitflax.leaves import named_leaves
from fitflax.logs import Kind
from fitflax.state import PyTree

__all__ = ["FigureSummary", "HistogramSummary", "ImageSummary", "check_images", "flatten_sown", "sown_values", "write_logged", "write_sown"]


@flax_struct.dataclass
class ImageSummary:
    """Shows images in TensorBoard. Sow it in a module, or return it from a metric's `summary`.

    Attributes:
        images: An array `[images, height, width, channels]` with 1 (gray), 3 (RGB) or 4 (RGBA) channels, of uint8, or of floats from 0 to 1.
        max_images: The maximum number of images to show.

    >>> from flax import linen as nn
    >>> class Net(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         h = nn.Conv(3, (3, 3))(x)
    ...         self.sow("summaries", "features", ImageSummary(nn.sigmoid(h)))
    ...         return h
    """

    images: Any
    max_images: int = flax_struct.field(pytree_node=False, default=3)


@flax_struct.dataclass
class HistogramSummary:
    """Shows a histogram of all elements of an array in TensorBoard. A sown array is shown as a histogram without this; a sown number is not.

    Attributes:
        values: An array of any shape.

    >>> HistogramSummary(np.zeros((2, 3))).values.shape
    (2, 3)
    """

    values: Any


class FigureSummary:
    """Shows a matplotlib figure in TensorBoard. The thread that writes event files draws it from arrays.

    Args:
        draw: A function `draw(*arrays) -> matplotlib.figure.Figure` of NumPy arrays. Make the figure with `matplotlib.figure.Figure()`, because pyplot is not
            thread-safe. Functions with the same code count as equal, so a function that is defined inside `__call__` does not make the step recompile.
        *arrays: Arrays to draw, or pytrees of them.

    >>> def draw(scores):
    ...     from matplotlib.figure import Figure
    ...     figure = Figure()
    ...     figure.subplots().imshow(scores)
    ...     return figure
    >>> FigureSummary(draw, np.eye(3)).arrays[0].shape
    (3, 3)
    """

    def __init__(self, draw: Callable[..., Any], *arrays: Any) -> None:
        self.draw = draw
        self.arrays = arrays


class _StaticDraw:
    """The static part of a `FigureSummary`. Functions with the same code are equal."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw = draw
        fn = getattr(draw, "func", draw)  # Of a functools.partial.
        fn = getattr(fn, "__func__", fn)  # Of a method.
        self._code = getattr(fn, "__code__", fn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StaticDraw) and self._code == other._code

    def __hash__(self) -> int:
        return hash(self._code)


jax.tree_util.register_pytree_node(
    FigureSummary, lambda figure: (figure.arrays, _StaticDraw(figure.draw)), lambda drawn, arrays: FigureSummary(drawn.draw, *arrays)
)

_KINDS = (ImageSummary, HistogramSummary, FigureSummary)


def flatten_sown(collection: str, tree: PyTree) -> dict[str, Any]:
    """Returns the values of a collection by tag, `collection/module/path/name`. If a module is called several times, its values are numbered.

    >>> flatten_sown("summaries", {"layer": {"mean": (0.5,), "norm": (1.0, 2.0)}})
    {'summaries/layer/mean': 0.5, 'summaries/layer/norm/0': 1.0, 'summaries/layer/norm/1': 2.0}
    """
    return dict(_leaves(collection, tree))


def _leaves(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from _leaves(f"{path}/{name}", child)
    elif isinstance(node, tuple | list):
        for index, child in enumerate(node):
            yield from _leaves(path if len(node) == 1 else f"{path}/{index}", child)
    elif isinstance(node, _KINDS) or not hasattr(node, "__dataclass_fields__"):
        yield path, node
    else:
        for name, leaf in named_leaves(node):
            yield f"{path}/{name}", leaf


def sown_values(checkpoint: Checkpoint, collections: Sequence[str], *, is_plain: bool) -> dict[str, Any]:
    """Returns the sown values of a checkpoint's step, by tag, after `check_images`.

    If a callback is used as a plain function (`is_plain`), the loop may not have kept sown values for it.
    """
    if not collections or checkpoint.run.step_values is None:
        return {}
    try:
        sown = checkpoint.sown
    except NotReadyError:
        if not is_plain:
            raise
        return {}
    values = {tag: value for name in collections for tag, value in flatten_sown(name, sown.get(name, {})).items()}
    for tag, value in values.items():
        check_images(tag, value)
    return values


def check_images(tag: str, value: Any) -> None:
    """Raises a `CallbackError` if images have a wrong shape or dtype. Called in the training thread."""
    if not isinstance(value, ImageSummary):
        return
    shape, dtype = np.shape(value.images), np.dtype(getattr(value.images, "dtype", np.float64))
    if len(shape) < 4 or shape[-1] not in (1, 3, 4):
        raise CallbackError(f"{tag}: ImageSummary needs images of shape [images, height, width, channels] with 1, 3 or 4 channels. Received: {list(shape)}.")
    if dtype != np.uint8 and not jnp.issubdtype(dtype, jnp.floating):
        raise CallbackError(f"{tag}: ImageSummary needs images of uint8, or of floats from 0 to 1. Received: {dtype}.")


def write_logged(write: Write, group: str, step: int, values: Mapping[str, Any], kinds: Mapping[str, Kind], now: float) -> None:
    """Writes logged values as their metric's `summary` shows them, or as `write_values` does. `kinds` are properties of metrics by log key."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        summary = kinds[key].summary if key in kinds else None
        with _tagged_errors(key):
            shown = value if summary is None else summary(value)
        for tag, one in _flatten(key, shown):
            if isinstance(one, _KINDS):
                check_images(tag, one)
                _write_media(write, group, tag, step, one, now)
            else:
                plain[tag] = one
    write_values(write, group, step, plain, now)


def _flatten(tag: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield tag, value
        return
    for name, one in value.items():
        yield from _flatten(f"{tag}/{name}", one)


def write_sown(write: Write, group: str, step: int, values: Mapping[str, Any], now: float) -> None:
    """Writes sown values by tag: numbers as scalars, images and figures as images, other arrays as histograms."""
    write_values(write, group, step, {tag: float(value) for tag, value in values.items() if not isinstance(value, _KINDS) and not np.ndim(value)}, now)
    for tag, value in values.items():
        if isinstance(value, _KINDS):
            _write_media(write, group, tag, step, value, now)
        elif np.ndim(value):
            write_histogram(write, group, tag, step, np.asarray(jax.device_get(value)), now)


def _write_media(write: Write, group: str, tag: str, step: int, value: Any, now: float) -> None:
    if isinstance(value, ImageSummary):
        images = np.asarray(jax.device_get(value.images))
        images = images.reshape(-1, *images.shape[-3:])[: value.max_images]
        for index, image in enumerate(images):
            _write_image(write, group, tag if len(images) == 1 else f"{tag}/{index}", step, _png(_as_uint8(image)), now)
    elif isinstance(value, FigureSummary):
        file = io.BytesIO()
        with _tagged_errors(tag):
            value.draw(*jax.device_get(value.arrays)).savefig(file, format="png")
        _write_image(write, group, tag, step, file.getvalue(), now)
    else:
        write_histogram(write, group, tag, step, np.asarray(jax.device_get(value.values)), now)


@contextlib.contextmanager
def _tagged_errors(tag: str) -> Iterator[None]:
    """Adds the tag to errors of a user's function."""
    try:
        yield
    except Exception as error:
        raise CallbackError(f"{tag} cannot be drawn: {type(error).__name__}: {error}") from error


def _write_image(write: Write, group: str, tag: str, step: int, png: bytes, now: float) -> None:
    # The header is at a fixed offset: https://www.w3.org/TR/png/#11IHDR.
    width, height, _, color = cast(tuple[int, int, int, int], struct.unpack(">IIBB", png[16:26]))
    channels = {0: 1, 2: 3, 6: 4}[color]
    write(group, step, summary_value(tag, image={"height": height, "width": width, "colorspace": channels, "encoded_image_string": png}), now)


def _as_uint8(image: Any) -> Any:
    """Returns an image as uint8. Floats are clipped to 0 to 1; NaN becomes 0."""
    if image.dtype == np.uint8:
        return image
    return (np.clip(np.nan_to_num(image.astype(np.float32), nan=0.0), 0, 1) * 255).round().astype(np.uint8)


def _png(image: Any) -> bytes:
    """Encodes a uint8 image `[height, width, channels]` as PNG (https://www.w3.org/TR/png/). These few lines replace a dependency."""
    height, width, channels = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)  # Each row begins with its filter; 0 is none.

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes())) + chunk(b"IEND", b"")
