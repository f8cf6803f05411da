"""Makes tensorboardX's summaries for `TensorBoard`: numbers, lists, tables, histograms, hyperparameters, and the environment as text."""

import functools
import platform
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.callbacks.event_files import Write
from fitflax.checkpoints.formats.json_documents import library_versions
from fitflax.leaves import named_leaves
from fitflax.state import PyTree

__all__ = ["TRAIN", "describe_environment", "hyperparameter_summaries", "summary_value", "write_histogram", "write_values"]

TRAIN = "train"
_HISTOGRAM_BINS = 64


def write_values(write: Write, group: str, step: int, values: Mapping[str, Any], now: float) -> None:
    """Writes numbers as scalars, lists as a scalar per entry, and matrices as tables. All are in one event, because events cost more than values."""
    from tensorboardX import summary
    from tensorboardX.proto.summary_pb2 import Summary

    parts: list[Any] = []
    for key, value in values.items():
        if isinstance(value, float | int):
            parts.append(scalar(key, value))
            continue
        array = np.asarray(jax.device_get(value))
        is_number = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)
        if not is_number or not array.size:
            continue  # A value from a user's callback that is not a number.
        if array.ndim == 0:
            parts.append(scalar(key, float(array)))
        elif array.ndim == 1:
            parts += [scalar(f"{key}/{index}", float(entry)) for index, entry in enumerate(array)]
        else:
            parts += summary.text(key, _markdown(array.reshape(-1, array.shape[-1]))).value
    if parts:
        write(group, step, Summary(value=parts), now)


def _markdown(rows: Any) -> str:
    """Returns a matrix as a Markdown table with numbered rows and columns, which are targets and predictions in a confusion matrix."""
    lines = [["", *map(str, range(rows.shape[1]))], ["---"] * (rows.shape[1] + 1)]
    lines += [[f"**{number}**", *(f"{entry:g}" for entry in row)] for number, row in enumerate(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def scalar(key: str, value: float) -> Any:
    """Returns a number as a summary value. Unlike tensorboardX's function, it does not log a warning for NaN or infinity."""
    return summary_value(key, simple_value=value).value[0]


def summary_value(key: str, **content: Any) -> Any:
    """Returns a summary of one value. `content` is a field of TensorBoard's protocol buffer."""
    from tensorboardX.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag_of(key), **content)])


@functools.lru_cache(maxsize=1024)
def tag_of(key: str) -> str:
    """Returns a log key without characters that are invalid in a tag."""
    from tensorboardX import summary

    return str(summary.scalar(key, 0.0).value[0].tag)


def write_histogram(write: Write, group: str, tag: str, step: int, values: Any, now: float) -> None:
    """Writes a histogram of the finite values, if there are any. Complex values are replaced by their magnitudes."""
    from tensorboardX import summary

    finite = (np.abs(values) if np.iscomplexobj(values) else values).astype(np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    if finite.size:
        write(group, step, summary.histogram(tag, finite, _HISTOGRAM_BINS), now)


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
        info.name.group, info.name.tag = group, tag_of(tag)
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
