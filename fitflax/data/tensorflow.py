"""`tf.data.Dataset`: batches as NumPy arrays. TensorFlow is never imported here; whoever has one of its data sets has imported it."""

import sys
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from fitflax.data.batch import Position, Selection, Triple, leaf_paths
from fitflax.data.passes import Bookmark
from fitflax.data.streams import IterableSource
from fitflax.errors import DataError, warn

__all__ = ["TensorFlowSource", "is_tensorflow_dataset"]

_INFINITE = -1


def is_tensorflow_dataset(data: Any) -> bool:
    """Returns whether `data` is a `tf.data.Dataset`."""
    module = sys.modules.get("tensorflow")
    return module is not None and hasattr(module, "data") and isinstance(data, module.data.Dataset)


class TensorFlowSource(IterableSource):
    """The batches of a `tf.data.Dataset`.

    Args:
        dataset: The data set, already batched.
        selection: Which parts are inputs and targets.
        inputs_only: Whether only inputs are needed.

    Raises:
        DataError: The data set is not batched, or what is picked of it is ragged or sparse.
    """

    owns_batches = True  # TensorFlow's tensors never change.

    def __init__(self, dataset: Any, selection: Selection, *, inputs_only: bool = False) -> None:
        _check(selection.split(dataset.element_spec, inputs_only=inputs_only))
        count = int(dataset.cardinality())
        if count == 0:
            raise DataError("The tf.data.Dataset is empty: it has 0 batches.")
        num_batches = count if count > 0 else None
        super().__init__(dataset.as_numpy_iterator, selection, inputs_only=inputs_only, num_batches=num_batches, is_endless=count == _INFINITE)
        self._dataset = dataset

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        shuffles = list(_shuffles(self._dataset))
        if any(_is_unseeded(shuffle) for shuffle in shuffles):
            warn(
                "The order of examples cannot be repeated, so this run will differ from one that was never stopped: the tf.data.Dataset shuffles without a "
                "seed. Pass shuffle(..., seed=0)."
            )
        if shuffles:
            # The order of a pass follows from the seed and from how many passes were begun before it.
            for _ in range(position.passes):
                self._dataset.as_numpy_iterator()
        return super().reopen(position, bookmark)


def _check(spec: Triple) -> None:
    """Checks the types of a batch before any work.

    Raises:
        DataError: They are none that have examples along a first axis of arrays.
    """
    leaves = [leaf for name, part in zip(("x", "y", "sample_weight"), spec, strict=True) for leaf in leaf_paths(part, name)]
    kinds = {path: type(leaf).__name__.removesuffix("Spec") for path, leaf in leaves}
    ragged = [f"{path} is a {kind}" for path, kind in kinds.items() if kind in ("RaggedTensor", "SparseTensor")]
    if ragged:
        raise DataError(f"Batches must be dense arrays: {', '.join(ragged)}. Use .padded_batch(n), .to_tensor() or tf.sparse.to_dense.")
    shapes = {path: leaf.shape for path, leaf in leaves if hasattr(leaf, "shape")}
    scalars = [f"{path} is a single number" for path, shape in shapes.items() if shape.rank == 0]
    lengths = {path: shape[0] for path, shape in shapes.items() if shape.rank and shape[0] is not None}
    if scalars or len(set(lengths.values())) > 1:
        listed = ", ".join(scalars or [f"{path} has {length}" for path, length in lengths.items()])
        raise DataError(f"Every array must have a leading axis of examples, of the same length: {listed}. Is the tf.data.Dataset batched? Use .batch(n).")


def _shuffles(dataset: Any) -> Iterator[Any]:
    # There is no public way to ask; without this one the walk finds nothing.
    if type(dataset).__name__ == "_ShuffleDataset":
        yield dataset
    for parent in getattr(dataset, "_inputs", tuple)():
        yield from _shuffles(parent)


def _is_unseeded(shuffle: Any) -> bool:
    return int(getattr(shuffle, "_seed", 1)) == int(getattr(shuffle, "_seed2", 1)) == 0
