"""TensorBoard summaries: numbers, tables, hyperparameters, and the images, figures and histograms that modules sow or metrics return.

A sown value is a pytree of arrays, which the step returns unchanged. It is drawn and encoded later, in the thread that writes event files.
"""

import contextlib
import functools
import io
import platform
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct as flax_struct

from fitflax.checkpoints.json_documents import library_versions
from fitflax.errors import CallbackError
from fitflax.leaves import named_leaves
from fitflax.logs import Kind
from fitflax.state import PyTree

TRAIN = "train"
_HISTOGRAM_BINS = 64

Emit = Callable[[Any], None]
"""A function that writes a summary, which may have several values."""


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
        fn = getattr(draw, "func", draw)  # The function of a `functools.partial`.
        fn = getattr(fn, "__func__", fn)  # The function of a method.
        self._code = getattr(fn, "__code__", fn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StaticDraw) and self._code == other._code

    def __hash__(self) -> int:
        return hash(self._code)


jax.tree_util.register_pytree_node(
    FigureSummary, lambda figure: (figure.arrays, _StaticDraw(figure.draw)), lambda drawn, arrays: FigureSummary(drawn.draw, *arrays)
)

# The number of channels by the color type of a PNG.
_CHANNELS = {0: 1, 2: 3, 6: 4}
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


def check_images(tag: str, value: Any) -> None:
    """Raises a `CallbackError` if images have a wrong shape or dtype. Called in the training thread."""
    if not isinstance(value, ImageSummary):
        return
    shape, dtype = np.shape(value.images), np.dtype(getattr(value.images, "dtype", np.float64))
    if len(shape) < 4 or shape[-1] not in (1, 3, 4):
        raise CallbackError(f"{tag}: ImageSummary needs images of shape [images, height, width, channels] with 1, 3 or 4 channels. Received: {list(shape)}.")
    if dtype != np.uint8 and not jnp.issubdtype(dtype, jnp.floating):
        raise CallbackError(f"{tag}: ImageSummary needs images of uint8, or of floats from 0 to 1. Received: {dtype}.")


# -- writing --


def write_logged(emit: Emit, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Writes logged values as their metric's `summary` shows them, or as numbers. `kinds` are properties of metrics by log key."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        summary = kinds[key].summary if key in kinds else None
        with _tagged_errors(key):
            shown = value if summary is None else summary(value)
        for tag, one in _flatten(key, shown):
            if isinstance(one, _KINDS):
                check_images(tag, one)
                _write_media(emit, tag, one)
            else:
                plain[tag] = one
    _write_values(emit, plain)


def _flatten(tag: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield tag, value
        return
    for name, one in value.items():
        yield from _flatten(f"{tag}/{name}", one)


def write_sown(emit: Emit, values: Mapping[str, Any]) -> None:
    """Writes sown values by tag: numbers as scalars, images and figures as images, other arrays as histograms."""
    numbers = {tag: value for tag, value in values.items() if not isinstance(value, _KINDS) and not np.ndim(value)}
    _write_values(emit, numbers)
    for tag, value in values.items():
        if isinstance(value, _KINDS):
            _write_media(emit, tag, value)
        elif tag not in numbers:
            write_histogram(emit, tag, value)


def _write_values(emit: Emit, values: Mapping[str, Any]) -> None:
    """Writes numbers as scalars, lists as a scalar per entry, and matrices as tables. All are in one event, because events cost more than values."""
    from tensorboardX import summary
    from tensorboardX.proto.summary_pb2 import Summary

    parts: list[Any] = []
    for key, value in values.items():
        if isinstance(value, float | int):
            parts.append(_value(key, simple_value=value))
            continue
        try:
            array = np.asarray(jax.device_get(value))
        except ValueError:  # Nested lists of different lengths.
            continue
        is_number = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)
        if not is_number or not array.size:
            continue  # A value from a user's callback that is not a number.
        if array.ndim == 0:
            parts.append(_value(key, simple_value=float(array)))
        elif array.ndim == 1:
            parts += [_value(f"{key}/{index}", simple_value=float(entry)) for index, entry in enumerate(array)]
        else:
            parts += summary.text(key, _markdown(array.reshape(-1, array.shape[-1]))).value
    if parts:
        emit(Summary(value=parts))


def _value(key: str, **content: Any) -> Any:
    """Returns a value of a summary. Unlike tensorboardX's functions, it does not log a warning for NaN or infinity."""
    from tensorboardX.proto.summary_pb2 import Summary

    return Summary.Value(tag=_tag_of(key), **content)


@functools.lru_cache(maxsize=1024)
def _tag_of(key: str) -> str:
    """Returns a log key without characters that are invalid in a tag."""
    from tensorboardX import summary

    return str(summary.scalar(key, 0.0).value[0].tag)


def _markdown(rows: Any) -> str:
    """Returns a matrix as a Markdown table with numbered rows and columns, which are targets and predictions in a confusion matrix."""
    lines = [["", *map(str, range(rows.shape[1]))], ["---"] * (rows.shape[1] + 1)]
    lines += [[f"**{number}**", *(f"{entry:g}" for entry in row)] for number, row in enumerate(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_histogram(emit: Emit, tag: str, values: Any) -> None:
    """Writes a histogram of the finite values, if there are any. Complex values are replaced by their magnitudes."""
    from tensorboardX import summary

    array = np.asarray(jax.device_get(values))
    finite = (np.abs(array) if np.iscomplexobj(array) else array).astype(np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    if finite.size:
        emit(summary.histogram(tag, finite, _HISTOGRAM_BINS))


def _write_media(emit: Emit, tag: str, value: Any) -> None:
    if isinstance(value, ImageSummary):
        images = np.asarray(jax.device_get(value.images))
        images = images.reshape(-1, *images.shape[-3:])[: value.max_images]
        for index, image in enumerate(images):
            _write_image(emit, tag if len(images) == 1 else f"{tag}/{index}", _png(_as_uint8(image)))
    elif isinstance(value, FigureSummary):
        file = io.BytesIO()
        with _tagged_errors(tag):
            value.draw(*jax.device_get(value.arrays)).savefig(file, format="png")
        _write_image(emit, tag, file.getvalue())
    else:
        write_histogram(emit, tag, value.values)


def _write_image(emit: Emit, tag: str, png: bytes) -> None:
    from tensorboardX.proto.summary_pb2 import Summary

    # The header is at a fixed offset: https://www.w3.org/TR/png/#11IHDR.
    width, height, _, color = cast(tuple[int, int, int, int], struct.unpack(">IIBB", png[16:26]))
    image = {"height": height, "width": width, "colorspace": _CHANNELS[color], "encoded_image_string": png}
    emit(Summary(value=[_value(tag, image=image)]))


@contextlib.contextmanager
def _tagged_errors(tag: str) -> Iterator[None]:
    """Adds the tag to errors of a user's function."""
    try:
        yield
    except Exception as error:
        raise CallbackError(f"{tag} cannot be drawn: {type(error).__name__}: {error}") from error


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


# -- the beginning of a run --


def hyperparameter_summaries(values: Mapping[str, Any], tags: list[tuple[str, str]], now: float) -> list[Any]:
    """Returns the summaries for TensorBoard's table of hyperparameters.

    `tags` are the table's metrics, as pairs of subdirectory and tag. TensorBoard finds them only if the run is in a subdirectory of its logdir.
    """
    from tensorboardX import summary
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    experiment, start, _ = summary.hparams(dict(values), {f"{group}/{tag}": None for group, tag in tags})
    plugins = [part.value[0].metadata.plugin_data for part in (experiment, start)]
    contents = [HParamsPluginData.FromString(plugin.content) for plugin in plugins]
    for info, (group, tag) in zip(contents[0].experiment.metric_infos, tags, strict=True):
        info.name.group, info.name.tag = group, _tag_of(tag)
    contents[1].session_start_info.start_time_secs = now
    for plugin, content in zip(plugins, contents, strict=True):
        plugin.content = content.SerializeToString()
    return [experiment, start]


def describe_environment(params: PyTree) -> str:
    """Describes command line, versions, devices and parameters in Markdown."""
    leaves = named_leaves(params)
    devices = sorted(leaves[0][1].devices(), key=lambda device: device.id) if leaves else jax.devices()
    facts: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "python": f"{platform.python_version()} on {platform.platform()}",
        **library_versions(),
        "devices": f"{len(devices)} {devices[0].device_kind} ({devices[0].platform}), {jax.process_count()} processes",
        "parameters": f"{sum(leaf.size for _, leaf in leaves):,} in {len(leaves)} arrays, {sum(leaf.nbytes for _, leaf in leaves):,} bytes",
    }
    lines = ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items()), "", "| parameter | shape | dtype | size |", "|---|---|---|---|"]
    lines += [f"| {path} | {list(leaf.shape)} | {leaf.dtype} | {leaf.size:,} |" for path, leaf in leaves]
    return "\n".join(lines)
