"""A source over `tf.data.Dataset`. TensorFlow is never imported here: a user who passes a dataset has imported it."""

import sys
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from fitflax.data.batch import Position, Selection, Triple
from fitflax.data.resumable import Bookmark
from fitflax.data.sources import IterableSource
from fitflax.data.whole_batches import is_structure, leaf_paths
from fitflax.errors import DataError, warn
from fitflax.leaves import listed

__all__ = ["TensorFlowSource", "is_tensorflow_dataset"]

_INFINITE = -1
_SHUFFLE = "_ShuffleDataset"


def is_tensorflow_dataset(data: Any) -> bool:
    """Returns whether `data` is a `tf.data.Dataset`."""
    module = sys.modules.get("tensorflow")
    return module is not None and hasattr(module, "data") and isinstance(data, module.data.Dataset)


class TensorFlowSource(IterableSource):
    """Batches of a batched `tf.data.Dataset`, without ragged or sparse parts; other arguments as in `adapt`."""

    owns_batches = True  # TensorFlow's tensors are immutable.
    can_reread = False  # The random numbers of a pass depend on how many passes were started before.

    def __init__(self, dataset: Any, selection: Selection, *, inputs_only: bool = False) -> None:
        _check_spec(selection.split(dataset.element_spec, inputs_only=inputs_only))
        count = int(dataset.cardinality())
        if count == 0:
            raise DataError("The tf.data.Dataset is empty: it has 0 batches.")
        num_batches = count if count > 0 else None
        super().__init__(dataset.as_numpy_iterator, selection, inputs_only=inputs_only, num_batches=num_batches, is_endless=count == _INFINITE)
        self._dataset = dataset

    @override
    def reopen(self, position: Position, bookmark: Bookmark | None) -> Iterator[Triple]:
        random_nodes = list(_random_nodes(self._dataset))
        unseeded = [each for each in random_nodes if _is_unseeded(each)]
        if unseeded:
            shuffles = type(unseeded[0]).__name__ == _SHUFFLE
            what, instead = ("shuffles", "shuffle(..., seed=0)") if shuffles else ("draws random numbers", "Dataset.random(seed=0)")
            warn(
                f"The tf.data.Dataset {what} without a seed, so its order of examples cannot be repeated. "
                f"This run will differ from an uninterrupted one. Use {instead}."
            )
        if random_nodes:
            # The random numbers of a pass depend on the seed and on how many passes were started before.
            for _ in range(position.passes):
                self._dataset.as_numpy_iterator()
        return super().reopen(position, bookmark)


def _check_spec(spec: Triple) -> None:
    """Checks from its element spec that a dataset has dense arrays with a common leading axis of examples."""
    leaves = [leaf for name, part in zip(("x", "y", "sample_weight"), spec, strict=True) for leaf in leaf_paths(part, name)]
    kinds = {path: type(leaf).__name__.removesuffix("Spec") for path, leaf in leaves}
    ragged = [f"{path} is a {kind}" for path, kind in kinds.items() if kind in ("RaggedTensor", "SparseTensor")]
    if ragged:
        raise DataError(f"Batches must be dense arrays, but {listed(ragged)}. Use .padded_batch(n), .to_tensor(), or tf.sparse.to_dense().")
    shapes = {path: leaf.shape for path, leaf in leaves if hasattr(leaf, "shape")}
    inputs = {path: shape for path, shape in shapes.items() if path.startswith("x")}
    known = {tuple(shape[:1].as_list()) for shape in inputs.values() if shape.rank is not None and (not shape.rank or shape[0] is not None)}
    if len(inputs) < len(shapes) and (len(known) > 1 or is_structure(spec.x)):
        # Whether inputs are rows or are passed whole is only known from a batch.
        shapes = {path: shape for path, shape in shapes.items() if path not in inputs}
    scalars = [f"{path} is a single number" for path, shape in shapes.items() if shape.rank == 0]
    lengths = {path: shape[0] for path, shape in shapes.items() if shape.rank and shape[0] is not None}
    if scalars or len(set(lengths.values())) > 1:
        received = listed(scalars or [f"{path} has {length}" for path, length in lengths.items()])
        raise DataError(f"Every array must have a leading axis of examples, of the same length: {received}. Batch the tf.data.Dataset first: .batch(n).")


def _random_nodes(dataset: Any) -> Iterator[Any]:
    # There is no public API; if TensorFlow renames these attributes, nothing is found.
    if type(dataset).__name__ in (_SHUFFLE, "_RandomDataset"):
        yield dataset
    for parent in getattr(dataset, "_inputs", tuple)():
        yield from _random_nodes(parent)


def _is_unseeded(random_nodes: Any) -> bool:
    return int(getattr(random_nodes, "_seed", 1)) == int(getattr(random_nodes, "_seed2", 1)) == 0
