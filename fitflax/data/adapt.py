"""Recognizes what kind of data the user passed and returns a source for it.

Optional libraries are never imported here. Their objects are recognized with the help of `sys.modules`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

import fitflax.data.huggingface as huggingface
import fitflax.data.ray_data as ray_data
import fitflax.data.tables as tables
import fitflax.data.torch_loader as torch_loader
from fitflax.data.arrays import ArraySource
from fitflax.data.batch import DEFAULT_BATCH_SIZE, Selection, Triple
from fitflax.data.grain import grain_length, is_grain
from fitflax.data.sequences import SequenceSource, is_sequence
from fitflax.data.sources import IterableSource, OneShotSource, Source
from fitflax.data.tensorflow import TensorFlowSource, is_tensorflow_dataset
from fitflax.data.token_file import TokenFile, TokenSource
from fitflax.data.whole_batches import is_structure
from fitflax.errors import ConfigError, DataError

__all__ = ["adapt", "takes_batch_size"]


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The arguments of `adapt` other than the data."""

    y: Any
    sample_weight: Any
    batch_size: int | None
    shuffle: bool
    seed: int
    drop_remainder: bool
    selection: Selection
    inputs_only: bool
    name: str

    @property
    def size(self) -> int:
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    def reject(self, data: Any, *names: str) -> None:
        """Checks that none of the named arguments was given, because the data comes in batches already."""
        values = {"y": self.y, "sample_weight": self.sample_weight, "batch_size": self.batch_size, "drop_remainder": self.drop_remainder or None}
        given = [key for key in names if values[key] is not None]
        if given:
            raise ConfigError(
                f"{', '.join(given)} can only be passed with in-memory arrays. "
                f"`{self.name}` is a {type(data).__name__}, which defines its own batches; leave {', '.join(given)} out."
            )


def adapt(
    data: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_remainder: bool = False,
    selection: Selection = Selection(),  # noqa: B008 (frozen)
    inputs_only: bool = False,
    name: str = "data",
) -> Source:
    """Returns a source that yields the batches of `data`.

    Args:
        data: In-memory data: an array, or a list, tuple, dict, dataclass or other pytree whose leaves are all arrays with an axis of examples (data frames and
            series count as arrays). Or a Hugging Face or Ray dataset, a PyTorch `DataLoader`, a `tf.data.Dataset`, a Grain dataset or loader, any
            other object with `__getitem__` and `__len__`, such as Keras's `PyDataset`, any other iterable or iterator of batches, a function that returns one
            of these, a `TokenFile`, or a `Source`.
        y: Targets of in-memory data.
        sample_weight: Weights of in-memory data, `[examples]` or `[examples, ...]`.
        batch_size: Rows of a batch of in-memory data, or of a Hugging Face or Ray dataset; 32 by default.
        shuffle: Whether in-memory data or a Hugging Face `Dataset` is shuffled in each pass.
        seed: Seed of the shuffling.
        drop_remainder: Whether a shorter last batch of such data is dropped.
        selection: Which keys of dicts, and which columns, are inputs and targets.
        inputs_only: Whether only inputs are needed, as in `predict`.
        name: The caller's name for `data`, for errors.

    Raises:
        DataError: `data` does not yield batches, or its arrays do not fit together.
        ConfigError: An argument does not apply to this kind of data.

    >>> import numpy as np
    >>> adapt(np.zeros((100, 3)), np.zeros(100), batch_size=32).num_batches
    4
    """
    if shuffle not in (True, False):
        raise ConfigError(f"shuffle must be True or False. Received: {shuffle!r}. Pass True to shuffle the rows; Keras's 'batch' is not supported.")
    if isinstance(data, Source):
        return data
    arguments = _Arguments(y, sample_weight, batch_size, bool(shuffle), seed, drop_remainder, selection, inputs_only, name)
    for role, given in ((name, data), ("y", y), ("sample_weight", sample_weight)):
        if _is_number_list(given):
            raise DataError(f"`{role}` is a list of Python numbers. Convert it to an array: np.asarray({role}).")
    if isinstance(data, TokenFile):
        arguments.reject(data, "y", "sample_weight")
        order: dict[str, Any] = {"shuffle": arguments.shuffle, "seed": seed, "drop_remainder": drop_remainder}
        return TokenSource(data, inputs_only=inputs_only, batch_size=arguments.size, **order)
    known = _library_source(data, arguments)
    if known is not None:
        return known
    if is_in_memory(data):
        if selection.inputs is not None and tables.is_frame(data):
            wanted = selection.columns(list(data.columns), inputs_only=inputs_only or y is not None, name=name)
            data = tables.named_columns(data, wanted, name)
        x, targets, weights = _split_arrays(_as_numpy(data, name), _as_numpy(y, "y"), _as_numpy(sample_weight, "sample_weight"), selection, inputs_only)
        return ArraySource(x, targets, weights, batch_size=arguments.size, shuffle=arguments.shuffle, seed=seed, drop_remainder=drop_remainder)
    if is_structure(data) and (isinstance(data, tuple) or not (hasattr(data, "__iter__") or callable(data))):
        raise DataError(f"`{name}` is a pytree (a {type(data).__name__}) with leaves that are not arrays. Convert every leaf to an array.")
    if isinstance(data, str | bytes) or data is None or not (callable(data) or hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise DataError(
            f"`{name}` must be arrays, an iterable of batches, or a function that returns an iterator of batches. Received: a {type(data).__name__}."
        )
    arguments.reject(data, "y", "sample_weight", "batch_size", "drop_remainder")
    sequence = _sequence_source(data, arguments)
    if sequence is not None:
        return sequence
    if isinstance(data, Iterator):
        convert = torch_loader.torch_batch if torch_loader.is_loader_iterator(data) else lambda item: item
        return OneShotSource(data, selection, inputs_only=inputs_only, convert=convert)
    # A class counts as a function that makes an iterator.
    if not isinstance(data, type) and (hasattr(data, "__iter__") or not callable(data)):
        length = len(data) if hasattr(data, "__len__") else None
        if length == 0:
            raise DataError(f"`{name}` is an empty {type(data).__name__}.")
        return IterableSource(lambda: data, selection, inputs_only=inputs_only, num_batches=length)
    # The function may return an object that has its own source.
    return IterableSource(data, selection, inputs_only=inputs_only, adapt=lambda made: _library_source(made, arguments) or _sequence_source(made, arguments))


def _is_number_list(data: Any) -> bool:
    """Returns whether `data` is a list of Python numbers, nested or not."""
    while isinstance(data, list) and data and isinstance(data[0], list):
        data = data[0]
    return isinstance(data, list) and bool(data) and isinstance(data[0], bool | int | float)


def takes_batch_size(data: Any) -> bool:
    """Returns whether `adapt` assembles the batches of `data` itself, so that it accepts a batch size.

    >>> import numpy as np
    >>> takes_batch_size(np.zeros(3)), takes_batch_size(iter([np.zeros(3)]))
    (True, False)
    """
    return is_in_memory(data) or isinstance(data, TokenFile) or huggingface.is_table(data) or huggingface.is_stream(data) or ray_data.is_ray_data(data)


def _library_source(data: Any, arguments: _Arguments) -> Source | None:
    """Returns the source of an object of a supported library; `None` for anything else."""
    name, selection, inputs_only = arguments.name, arguments.selection, arguments.inputs_only
    if huggingface.is_split_dict(data):
        raise DataError(f"`{name}` is a {type(data).__name__} with the splits {list(data)}. Pass one of them: {name}[{next(iter(data), 'train')!r}].")
    if huggingface.is_table(data) or huggingface.is_stream(data) or ray_data.is_ray_data(data):
        arguments.reject(data, "y", "sample_weight")
        options: dict[str, Any] = {"batch_size": arguments.size, "drop_remainder": arguments.drop_remainder, "inputs_only": inputs_only, "name": name}
        if ray_data.is_ray_data(data):
            return ray_data.RaySource(data, selection, **options)
        if huggingface.is_stream(data):
            return huggingface.StreamSource(data, selection, **options)
        return huggingface.TableSource(data, selection, shuffle=arguments.shuffle, seed=arguments.seed, **options)
    make: Callable[[], Source]
    if torch_loader.is_loader(data):
        make = lambda: torch_loader.TorchSource(data, selection, inputs_only=inputs_only)  # noqa: E731
    elif torch_loader.is_bare_dataset(data):
        raise DataError(
            f"`{name}` is a PyTorch dataset (a {type(data).__name__}), which yields single examples. Pass a loader: DataLoader({name}, batch_size=32)."
        )
    elif is_tensorflow_dataset(data):
        make = lambda: TensorFlowSource(data, selection, inputs_only=inputs_only)  # noqa: E731
    elif is_grain(data):
        length, is_endless = grain_length(data)
        if length == 0:
            raise DataError(f"`{name}` is an empty {type(data).__name__}.")
        make = lambda: IterableSource(lambda: data, selection, inputs_only=inputs_only, num_batches=length, is_endless=is_endless)  # noqa: E731
    else:
        return None
    arguments.reject(data, "y", "sample_weight", "batch_size", "drop_remainder")
    return make()


def _sequence_source(data: Any, arguments: _Arguments) -> Source | None:
    """Returns the source of a sequence of batches; `None` for anything else."""
    if not is_sequence(data):
        return None
    return SequenceSource(data, arguments.selection, inputs_only=arguments.inputs_only, name=arguments.name)


def _as_numpy(tree: Any, name: str) -> Any:
    """Returns in-memory data with frames, series and tensors as NumPy arrays."""
    if tables.is_frame(tree):
        return tables.matrix(tree, name)
    if tables.is_series(tree):
        return tables.vector(tree, name)
    if torch_loader.is_tensor(tree):
        return torch_loader.torch_batch(tree)
    if type(tree) in (list, tuple):
        return type(tree)(_as_numpy(part, f"{name}[{index}]") for index, part in enumerate(tree))
    if isinstance(tree, dict):
        return {key: _as_numpy(part, f"{name}[{key!r}]") for key, part in tree.items()}
    if is_structure(tree):
        return jax.tree_util.tree_map_with_path(lambda path, leaf: _as_numpy(leaf, name + jax.tree_util.keystr(path)), tree)
    return tree


def is_in_memory(data: Any) -> bool:
    """Returns whether `data` is an array, or a list, tuple, dict or other pytree of nothing but arrays."""
    if isinstance(data, list | tuple):
        return bool(data) and all(is_in_memory(part) or part is None or (isinstance(part, tuple) and not part) for part in data) and bool(jax.tree.leaves(data))
    if isinstance(data, dict):
        return bool(data) and all(is_in_memory(part) for part in data.values())
    if is_structure(data):
        # An iterable that is not a mapping yields batches.
        is_table = isinstance(data, Mapping) or not (hasattr(data, "__iter__") or callable(data))
        return is_table and bool(jax.tree.leaves(data)) and all(is_in_memory(leaf) for leaf in jax.tree.leaves(data))
    return hasattr(data, "__array__") and hasattr(data, "shape")


def _split_arrays(data: Any, y: Any, weights: Any, selection: Selection, inputs_only: bool) -> tuple[Any, Any, Any]:
    if inputs_only:
        # Without targets, as in predict, a tuple is several inputs.
        return (selection.split(data, inputs_only=True).x if isinstance(data, Mapping) else data), (), weights
    if y is not None:
        x = selection.split(data, inputs_only=True).x if isinstance(data, Mapping) else data
        return x, y, weights
    if isinstance(data, list) and all(isinstance(part, tuple | dict) or is_structure(part) for part in data):
        raise DataError(
            f"A list that contains only arrays is treated as inputs. Received: a list of length {len(data)}, "
            f"whose first element is a {type(data[0]).__name__}. To pass a list of batches, use a function: `lambda: batches`."
        )
    triple = Triple(data, (), None) if type(data) is list else selection.split(data)
    if weights is not None and triple.weights is not None:
        raise ConfigError("sample_weight is passed twice: as an argument and as the third element of the data. Leave one of them out.")
    return triple.x, triple.y, triple.weights if weights is None else weights
