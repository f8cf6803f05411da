"""How batches that are passed whole are distinguished from rows, how their examples are counted, and how a feed combines them."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.data import Batcher, Feed, Position, adapt
from fitflax.data.batch import Selection, Triple, count_examples, form_of, full_mask, is_structure, num_examples
from fitflax.data.padding import Scalar, boxed, joined, unboxed, without_padding
from fitflax.errors import ConfigError, DataError


class Named(NamedTuple):
    a: Any
    b: Any = None


@flax.struct.dataclass
class Flaxen:
    a: Any
    b: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    a: Any
    b: Any = None


@dataclasses.dataclass
class Unknown:
    a: Any
    b: Any = None


@jax.tree_util.register_pytree_node_class
class Own:
    def __init__(self, a: Any, b: Any = None) -> None:
        self.a, self.b = a, b

    def tree_flatten(self) -> Any:
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Own":
        return cls(*children)


KINDS = [Named, Flaxen, Registered, Own]
each_kind = pytest.mark.parametrize("kind", KINDS)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


# -- structures are one value --


@each_kind
def test_a_structure_is_one_value(kind: Any):
    value = kind(ones(3), ones(3))
    assert is_structure(value) and is_structure({"inside": [value]})
    assert Selection().split(value) == (value, (), None)
    assert Selection().split((value, 1)) == (value, 1, None)
    y, weights = ones(2), ones(2)
    assert Selection().split([value, y, weights]) == (value, y, weights)


def test_builtin_containers_leaves_and_unregistered_classes_are_not_structures():
    assert not any(map(is_structure, [None, 1.0, ones(2), (ones(2),), [ones(2)], {"a": ones(2)}, Unknown(1), "text"]))


@each_kind
def test_a_structure_of_rows_is_in_memory_data(kind: Any):
    x = kind(np.arange(10.0), {"c": np.arange(20).reshape(10, 2)})
    source = adapt(x, np.arange(10), batch_size=4, shuffle=False)
    assert source.num_examples == 10 and source.num_batches == 3
    last = list(source.open(Position()))[-1]
    assert isinstance(last.x, kind) and last.x.a.tolist() == [8, 9] and last.x.b["c"].tolist() == [[16, 17], [18, 19]] and last.y.tolist() == [8, 9]
    alone = next(iter(adapt(x, batch_size=4, shuffle=False, inputs_only=True).open(Position())))
    assert isinstance(alone.x, kind) and alone.y == ()
    together = next(iter(adapt((x, np.arange(10)), batch_size=4, shuffle=False).open(Position())))
    assert isinstance(together.x, kind) and together.y.tolist() == [0, 1, 2, 3]
    head, tail = adapt(x, np.arange(10), batch_size=4).divide(0.3)
    assert (head.num_examples, tail.num_examples) == (7, 3)


def test_inputs_and_targets_are_selected_from_a_frozen_dict_by_key():
    table = flax.core.freeze({"image": ones(6, 2), "label": np.arange(6)})
    triple = next(iter(adapt(table, selection=Selection("image", "label"), shuffle=False, batch_size=6).open(Position())))
    assert triple.x.shape == (6, 2) and triple.y.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_structure_that_yields_batches_is_iterated():
    @flax.struct.dataclass
    class Loader:
        rows: Any

        def __iter__(self) -> Iterator[Any]:
            yield self.rows, self.rows

    assert [triple.y.tolist() for triple in adapt(Loader(ones(2))).open(Position())] == [[1, 1]]


@each_kind
def test_a_structure_with_leaves_that_are_not_arrays_is_an_error(kind: Any):
    with pytest.raises(DataError, match=rf"`data` is a pytree \(a {kind.__name__}\) with leaves that are not arrays"):
        adapt(kind(ones(3), "text"))


@each_kind
def test_a_structure_without_common_rows_is_an_error_that_says_how_to_pass_it(kind: Any):
    with pytest.raises(DataError, match=r"x.* has 3, x.* has 4. To pass graphs, .* a function that yields batches: \(x, y\)"):
        adapt(kind(ones(3), ones(4)), ones(2))
    with pytest.raises(DataError, match="To pass a list of batches, use a function"):
        adapt([kind(ones(3)), kind(ones(3))])


def test_a_list_is_inputs_if_in_memory_and_a_tuple_if_yielded():
    in_memory = next(iter(adapt([ones(4), ones(4)], shuffle=False).open(Position())))
    assert type(in_memory.x) is list and in_memory.y == ()
    yielded = next(iter(adapt(lambda: iter([[ones(4), ones(4)]])).open(Position())))
    assert yielded.x.shape == yielded.y.shape == (4,)


# -- whole inputs --


@pytest.mark.parametrize(
    ("x", "y", "weights"),
    [
        (Named(ones(5), ones(7)), ones(2), None),
        ({"tokens": ones(9), "offsets": ones(3)}, ones(2), None),
        ((ones(9), ones(3)), ones(2), None),
        (Named(ones(5), np.float32(1)), ones(2), None),
        (Named(ones(5), ones(5)), ones(2), None),
        ({"graph": Named(ones(5), ones(5))}, {"one": ones(2), "two": ones(2, 3)}, None),
        (Named(ones(5), ones(7)), (), ones(2)),
        (Named(jnp.ones(5), jnp.ones(7)), jnp.ones(2), None),
    ],
    ids=["lengths", "dict", "tuple", "number", "another length", "inside a dict", "weights", "of JAX"],
)
def test_inputs_without_a_common_axis_are_whole_and_targets_or_weights_give_the_count(x: Any, y: Any, weights: Any):
    form = form_of(x, y, weights)
    assert form.rows == 2 and form.real.tolist() == [True, True] and form.is_counted


@pytest.mark.parametrize(
    ("x", "y"), [(ones(4), ones(4)), (Named(ones(4), ones(4, 2)), ones(4)), (Named(ones(4), ones(4)), ()), ({"a": ones(4)}, ()), ((ones(4), ones(4)), ones(4))]
)
def test_inputs_with_as_many_rows_as_the_targets_are_rows(x: Any, y: Any):
    assert form_of(x, y, None) == (4, None, True)


@pytest.mark.parametrize(
    ("x", "y", "weights", "message"),
    [
        (ones(4), ones(3), None, "same number of examples"),
        ({"a": ones(4), "b": ones(4)}, ones(3), None, "same number of examples"),
        ((ones(4), ones(4)), ones(3), None, "same number of examples"),
        (ones(4), ones(4), ones(3), "same number of examples"),
        (np.float32(1), ones(3), None, "must have a leading axis"),
        (Named(ones(4), ones(5)), np.float32(1), None, r"must have a leading axis of examples: batch\['y'\]"),
        (Named(ones(4), ones(5)), (ones(2), ones(3)), None, "same number of examples"),
        (Named(ones(4), ones(5)), ones(2), ones(3), "same number of examples"),
        (Named(ones(4), ones(5)), (), None, "x.a has 4, x.b has 5. For graphs, or other inputs that the module takes whole"),
        (Named(ones(4), np.float32(1)), (), None, "x.b has no axis"),
        ({"a": ones(4), "b": ones(5)}, (), None, "targets or weights must give the number of examples"),
        ([1.0, 2.0], ones(2), None, "Put single examples into batches"),
        ({"a": ones(4), "b": [1, 2]}, ones(2), None, "Put single examples into batches"),
    ],
)
def test_an_obvious_mistake_is_still_an_error(x: Any, y: Any, weights: Any, message: str):
    with pytest.raises(DataError, match=message):
        Batcher()(Triple(x, y, weights))


def test_an_example_with_only_zero_weights_is_padding_if_the_inputs_are_whole():
    weights = np.array([[1, 0], [0, 0], [0, 2], [0, 0]], np.float32)
    fed = Batcher()(Triple(Named(ones(5), ones(7)), ones(4, 2), weights))
    assert fed.batch.mask.tolist() == [True, False, True, False] and fed.num_real == 2 and fed.num_rows == 4
    assert fed.position == Position(examples=2) and count_examples(Triple(Named(ones(5), ones(7)), ones(4, 2), weights)) == 2
    rows = Batcher()(Triple(Named(ones(4), ones(4)), ones(4, 2), weights))
    assert rows.batch.mask.all() and rows.num_real == 4


def test_class_weights_of_zero_do_not_make_padding():
    fed = Batcher(class_weight={0: 0.0, 1: 3.0})(Triple(Named(ones(5), ones(7)), np.array([0, 1, 1]), np.array([1.0, 1.0, 0.0])))
    assert fed.batch.mask.tolist() == [True, True, False] and fed.batch.weights.tolist() == [0, 3, 0]


def test_a_batch_of_only_padding_advances_the_position():
    fed = Batcher()(Triple(Named(ones(5), ones(7)), ones(2), np.zeros(2, np.float32)))
    assert not fed.batch.mask.any() and fed.position.examples == count_examples(Triple(Named(ones(5), ones(7)), ones(2), np.zeros(2))) == 1


def test_a_batch_of_no_examples_is_an_error():
    with pytest.raises(DataError, match="a batch of 0 examples"):
        Batcher()(Triple(Named(ones(5), ones(7)), ones(0, 2), None))


def test_scalars_have_an_axis_while_batches_are_combined_but_not_in_a_step():
    tree = {"n": np.float32(3), "rows": ones(2)}
    combined = joined([boxed(tree), boxed(tree)])
    assert combined["n"].value.tolist() == [3, 3] and combined["rows"].shape == (4,)
    assert unboxed({"n": Scalar(jnp.ones((5, 1)))})["n"].shape == (5,)
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(boxed(tree))] == ["['n']", "['rows']"]


def test_outputs_keep_only_the_rows_of_real_examples():
    outputs = {"one": np.arange(4), "several": np.arange(8)}
    found = without_padding(outputs, np.array([True, False, True, False]))
    assert found["one"].tolist() == [0, 2] and found["several"].tolist() == [0, 1, 4, 5]


def test_num_examples_of_a_structure_names_its_fields():
    with pytest.raises(DataError, match=r"x\.a has 3, x\.b has 4"):
        num_examples(Named(ones(3), ones(4)), name="x")


# -- one batch per device --


def graph(number: int, real: int = 2) -> tuple[Any, Any, Any]:
    return Named(np.full(5, number), np.full((3, 2), number)), np.full(4, number), (np.arange(4) < real).astype(np.float32)


def test_as_many_batches_as_devices_are_concatenated():
    feed = Feed(adapt(lambda: iter([graph(number, number + 1) for number in range(3)])), Batcher(num_shards=2))
    first, second, end = feed.next(), feed.next(), feed.next()
    assert end is None and first is not None and second is not None
    assert first.batch.x.a.tolist() == [0] * 5 + [1] * 5 and first.batch.x.b.shape == (6, 2) and first.batch.y.tolist() == [0] * 4 + [1] * 4
    assert first.batch.mask.tolist() == [True, False, False, False, True, True, False, False]
    assert (first.num_real, first.position, first.num_rows) == (3, Position(examples=3), 8)
    assert second.batch.x.a.tolist() == [2] * 10 and second.batch.mask.tolist() == [True, True, True, False] + [False] * 4
    assert (second.num_real, second.position) == (3, Position(examples=6))


def test_without_combining_each_batch_is_filled_with_padding():
    source = adapt(lambda: iter([graph(number, number + 1) for number in range(3)]))
    feed = Feed(source, Batcher(num_shards=2, combines=False))
    for number in range(3):
        fed = feed.next()
        assert fed.batch.x.a.tolist() == [number] * 10 and fed.batch.mask.tolist() == [index <= number for index in range(4)] + [False] * 4
    assert fed.position == Position(examples=6) and feed.next() is None and source.together == 1


def test_without_padding_the_mask_is_the_shared_full_mask():
    fed = Batcher(num_shards=2)(Triple(*graph(0)[:2], None), more=lambda: Triple(*graph(1)[:2], None))
    assert fed.batch.mask is full_mask(8) and fed.batch.weights is None


@pytest.mark.parametrize(("index", "numbers"), [(0, [0, 1]), (1, [2, 2])])
def test_a_process_gets_the_batches_of_its_own_devices(index: int, numbers: list[int]):
    batches = iter([Triple(*graph(number)) for number in (1, 2)])
    fed = Batcher(num_shards=4, part=(index, 2))(Triple(*graph(0)), more=lambda: next(batches, None))
    assert fed.batch.x.a.tolist() == [number for number in numbers for _ in range(5)]
    assert fed.real.reshape(4, 4).sum(axis=1).tolist() == [2, 2, 2, 0] and fed.num_rows == 16 and fed.num_real == 6
    assert fed.batch.mask.tolist() == fed.real.reshape(2, 8)[index].tolist()


def test_a_position_inside_a_pass_is_found_again_by_the_count_of_examples():
    data = [graph(number, real) for number, real in enumerate([1, 3, 0, 2, 4, 1])]
    for kind in (lambda: iter(data), iter(data)):
        feed = Feed(adapt(kind), Batcher(num_shards=2))
        positions = [feed.next().position for _ in range(2)]
        assert positions == [Position(examples=4), Position(examples=7)]  # The batch of only padding counts as one example.
    with pytest.warns(UserWarning, match="cannot seek"):
        again = Feed(adapt(lambda: iter(data)), Batcher(num_shards=2), Position(examples=7)).next()
    assert again is not None and again.batch.x.a.tolist() == [4] * 5 + [5] * 5


def test_batches_that_are_pushed_back_are_returned_again_in_order():
    source = adapt(iter([graph(number) for number in range(5)]))
    feed = Feed(source, Batcher(num_shards=2))
    feed.next()
    feed.next()
    feed.push_back()
    assert source.taken == 4 and feed.position == Position(examples=4)
    other = Feed(source, Batcher(num_shards=3))
    assert other.next().batch.x.a.tolist() == [2] * 5 + [3] * 5 + [4] * 5


def test_next_like_returns_complete_groups_of_batches():
    feed = Feed(adapt(lambda: iter([graph(number) for number in range(5)])), Batcher(num_shards=2))
    first = feed.next()
    assert [fed.batch.x.a[0] for fed in feed.next_like(first.batch, 9)] == [2, 4]
    assert feed.next() is None and feed.next() is not None


def test_the_number_of_batches_of_a_loader_becomes_the_number_of_steps_once_known():
    loader = type("Loader", (), {"__iter__": lambda self: iter([graph(number) for number in range(5)]), "__len__": lambda self: 5})()
    source = adapt(loader)
    assert source.all_batches == 5
    Feed(source, Batcher(num_shards=2)).next()
    assert source.all_batches == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"why_not_whole": "in training: {}".format, "is_training": True}, ConfigError, "in training: True"),
        ({"accumulate_steps": 2}, ConfigError, "accumulate_steps=2"),
        ({"pad": False, "num_shards": 2}, DataError, r"needs 2 batches, one for each device, but this one has 1.* leave out compile\(pad=False\)"),
        ({"pad": False, "num_shards": 2, "combines": False}, DataError, r"has 1\. Use one device, or leave out compile\(pad=False\)"),
    ],
)
def test_unsupported_options_for_whole_batches_are_errors(options: dict[str, Any], error: Any, message: str):
    with pytest.raises(error, match=f"the module receives each batch whole.*{message}"):
        Batcher(**options)(Triple(*graph(0)))


def test_a_whole_batch_without_targets_can_be_predicted():
    fed = Batcher(num_shards=2, must_count=False)(Triple(graph(0)[0], (), None))
    assert not fed.is_counted and fed.real.tolist() == [True, False]


def test_an_iterator_that_restarts_after_its_end_is_not_read_again():
    class Again:
        left = iter([graph(0), graph(1), graph(2)])

        def __iter__(self) -> "Again":
            return self

        def __next__(self) -> Any:
            item = next(self.left, None)
            if item is None:
                self.left = iter([graph(7)])
                raise StopIteration
            return item

    feed = Feed(adapt(Again), Batcher(num_shards=2))
    assert [feed.next().num_real for _ in range(2)] == [4, 2] and feed.next() is None
