import collections
import gc
import itertools
import multiprocessing
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.callbacks import LambdaCallback
from fitflax.data import Batcher, Feed, Position, adapt
from fitflax.data.batch import Selection
from fitflax.data.torch_loader import TorchSource, torch_batch
from fitflax.errors import ConfigError, DataError, RestoreError
from tests.data.same_training import (
    BATCH,
    CANNOT_SEEK,
    NO_ORDER,
    ROWS,
    X,
    Y,
    assert_resumes,
    assert_resumes_twice,
    assert_same,
    make_trainer,
    of_arrays,
    outcome,
    run,
    warned,
)
from tests.run_script import differences, rows_of, state_of

torch = pytest.importorskip("torch")
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset  # noqa: E402

# Python and JAX warn about the fork with which PyTorch starts workers; these workers do not use JAX.
forks = [pytest.mark.filterwarnings(f"ignore:{text}") for text in (r"os\.fork\(\) was called", ".*multi-threaded, use of fork")]


def tensors(rows: int = ROWS) -> Any:
    return TensorDataset(torch.from_numpy(X[:rows]), torch.from_numpy(Y[:rows]))


def loader(rows: int = ROWS, **options: Any) -> Any:
    return DataLoader(tensors(rows), batch_size=BATCH, **options)


def seeded(seed: int = 1) -> Any:
    return torch.Generator().manual_seed(seed)


class Stream(IterableDataset):
    """Yields single examples and reports no length or a wrong one."""

    def __init__(self, length: int | None = None) -> None:
        if length is not None:
            self.__class__ = type("Sized", (Stream,), {"__len__": lambda self: length})

    def __iter__(self):
        return iter(list(zip(X, Y, strict=True)))


def first(data: Any, **options: Any) -> Any:
    return next(adapt(data, **options).open(Position()))


# -- training --


@pytest.mark.slow
def test_a_data_loader_trains_like_arrays():
    assert_same(outcome(loader()), of_arrays())


@pytest.mark.parametrize("make", [lambda: lambda: loader(), lambda: DataLoader(Stream(), batch_size=BATCH)], ids=["function", "iterable data set"])
@pytest.mark.slow
def test_a_function_that_makes_loaders_and_an_iterable_data_set_train_like_arrays(make):
    assert_same(outcome(make()), of_arrays())


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@forks[0]
@forks[1]
def test_workers_train_like_arrays_and_terminate(persistent, tmp_path):
    assert_same(outcome(loader(num_workers=2, persistent_workers=persistent)), of_arrays())
    gc.collect()
    assert multiprocessing.active_children() == []
    options = {"num_workers": 2, "persistent_workers": persistent}
    assert_resumes(tmp_path, lambda: loader(shuffle=True, generator=seeded(), **options), 4, CANNOT_SEEK.format(4))


@pytest.mark.slow
@forks[0]
@forks[1]
def test_workers_of_a_pass_that_ends_early_terminate():
    gc.collect()  # Persistent workers of another test end with its trainer.
    data = loader(num_workers=2)
    trainer = make_trainer()
    trainer.fit(data, steps=1, verbose=0)
    trainer.evaluate(data, steps=1, verbose=0)
    trainer.predict(data, steps=1)
    assert multiprocessing.active_children() == []
    feed = Feed(adapt(data), Batcher())
    feed.next()
    assert len(multiprocessing.active_children()) == 2
    feed.close()
    assert multiprocessing.active_children() == []


def test_validation_on_a_shuffling_loader_does_not_change_training():
    def trained(**options: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        trainer = make_trainer()
        # PyTorch's global generator determines the order of training, and the validation loader draws from it as well.
        history = trainer.fit(loader(shuffle=True), epochs=3, verbose=0, **options)
        return {**state_of(trainer), "loss": [loss.hex() for loss in history.history["loss"]]}

    assert_same(trained(validation_data=loader(shuffle=True)), trained())


# -- resuming --


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.mostly_slow
def test_a_loader_that_does_not_shuffle_is_read_up_to_the_position(k, tmp_path):
    assert_resumes(tmp_path, loader, k, *([CANNOT_SEEK.format(k % 3 * BATCH)] if k % 3 else []))


@pytest.mark.parametrize("k", [2, 3, 4, 6])
@pytest.mark.slow
def test_a_loader_with_its_own_generator_resumes_in_the_original_order(k, tmp_path):
    messages = [CANNOT_SEEK.format(k % 3 * BATCH)] if k % 3 else []
    assert_resumes(tmp_path, lambda: loader(shuffle=True, generator=seeded()), k, *messages)


def test_a_run_that_is_resumed_twice_keeps_the_order_of_its_generator(tmp_path):
    def make() -> Any:
        return loader(shuffle=True, generator=seeded())

    uninterrupted = run(tmp_path / "never", make(), 8)
    with warned(CANNOT_SEEK.format(BATCH)):
        for steps in (4, 6, 8):
            resumed = run(tmp_path / "stopped", make(), steps)
    assert_same(resumed, uninterrupted)


@pytest.mark.slow
def test_a_run_differs_if_the_state_of_its_generator_is_not_restored(tmp_path):
    """The control experiment: a new process starts with the generator's first order."""
    uninterrupted = run(tmp_path / "never", loader(shuffle=True, generator=seeded()), 8)
    run(tmp_path / "stopped", loader(shuffle=True, generator=seeded()), 3)
    trained = make_trainer()
    trained.restore(tmp_path / "stopped")
    trained.fit(loader(shuffle=True, generator=seeded()), steps=5, verbose=0)
    assert differences(state_of(trained), {key: value for key, value in uninterrupted.items() if key != "history"})


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(tensors(), batch_size=BATCH, sampler=RandomSampler(tensors(), generator=seeded())),
        lambda: DataLoader(tensors(), batch_sampler=BatchSampler(RandomSampler(tensors(), generator=seeded()), BATCH, False)),
    ],
    ids=["sampler", "batch sampler"],
)
@pytest.mark.slow
def test_the_generator_may_belong_to_a_sampler(make, tmp_path):
    assert_resumes(tmp_path, make, 4, CANNOT_SEEK.format(BATCH))


@pytest.mark.slow
def test_a_function_may_make_loaders_with_a_shared_generator_or_new_ones(tmp_path):
    def shared() -> Any:
        generator = seeded()
        return lambda: loader(shuffle=True, generator=generator)

    for name, make in (("shared", shared), ("new", lambda: lambda: loader(shuffle=True, generator=seeded()))):
        assert_resumes(tmp_path / name / "between", make, 3)
        assert_resumes(tmp_path / name / "inside", make, 4, CANNOT_SEEK.format(BATCH))


@pytest.mark.parametrize("k", [3, 4])
@pytest.mark.mostly_slow
def test_shuffling_without_a_generator_warns_that_the_order_cannot_be_repeated(k, tmp_path):
    run(tmp_path, loader(shuffle=True), k)
    with warned(f"The DataLoader shuffles without its own generator, {NO_ORDER}", *([CANNOT_SEEK.format(BATCH)] if k % 3 else [])):
        run(tmp_path, loader(shuffle=True), 6)


def test_shuffling_without_a_generator_does_not_warn_without_a_resume(tmp_path):
    trainer = make_trainer()
    with warned():
        for _ in range(2):
            trainer.fit(loader(shuffle=True), steps=4, verbose=0)


def test_shuffling_without_a_generator_does_not_warn_if_a_pass_is_opened_for_its_state(tmp_path):
    class Rows(TensorDataset):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data = DataLoader(Rows(*tensors().tensors), batch_size=BATCH, shuffle=True)
    with warned():
        run(tmp_path, data, 9, callbacks=[LambdaCallback(on_epoch_begin=lambda epoch, logs: None)])


@pytest.mark.slow
def test_a_distributed_sampler_receives_the_pass_number(tmp_path):
    def make() -> Any:
        sampler = torch.utils.data.DistributedSampler(tensors(), num_replicas=1, rank=0, seed=3)
        return DataLoader(tensors(), batch_size=BATCH, sampler=sampler)

    source = adapt(make())
    orders = [np.concatenate([triple.x for triple in source.open(Position(number))]).tolist() for number in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert_resumes(tmp_path, make, 4, CANNOT_SEEK.format(BATCH))


def test_a_shorter_loader_on_a_resume_is_an_error(tmp_path):
    run(tmp_path, loader(), 2)
    with pytest.raises(DataError, match="had used 8 examples of this pass, but the data ends after 4"), warned(CANNOT_SEEK.format(8)):
        run(tmp_path, loader(rows=4), 6)


def test_a_different_batch_size_on_a_resume_is_an_error_that_names_both(tmp_path):
    run(tmp_path, loader(), 2)
    with pytest.raises(RestoreError, match="batch_size was 4 and is now 5"):
        run(tmp_path, DataLoader(tensors(), batch_size=5), 6)


def test_a_loader_with_more_generators_on_a_resume_is_an_error(tmp_path):
    run(tmp_path, loader(shuffle=True, generator=seeded()), 3)
    other = DataLoader(tensors(), batch_size=BATCH, sampler=RandomSampler(tensors(), generator=seeded()), generator=seeded())
    with pytest.raises(DataError, match="had 1 generators, but this one has 2"):
        run(tmp_path, other, 6)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "generator": None}], ids=["in order", "shuffled", "with a generator"])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.mostly_slow
@pytest.mark.slow
def test_a_stateful_data_loader_seeks(options, tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        given = dict(options)
        if "generator" in given:
            given["generator"] = seeded()
        # Without a generator, the loader's state holds one that is seeded from the global generator.
        torch.manual_seed(next(seeds))
        return stateful.StatefulDataLoader(tensors(), batch_size=BATCH, **given)

    for k in (2, 3, 4):
        seeds = itertools.chain((1, 1), itertools.repeat(99))  # The resumed process has a different seed.
        assert_resumes(tmp_path / str(k), make, k)


class Positioned(Stream):
    """Also has a state, but reports the beginning between a load and the next batch, like streams of Hugging Face."""

    def __init__(self) -> None:
        self.row = self.begin = 0

    def __iter__(self):
        self.row, self.begin = self.begin, 0
        while self.row < ROWS:
            self.row += 1
            yield X[self.row - 1], Y[self.row - 1]

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["row"]


class Rows:
    """An iterator with a state."""

    def __init__(self) -> None:
        self.row = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.row == ROWS:
            raise StopIteration
        self.row += 1
        return X[self.row - 1], Y[self.row - 1]

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.row = state["row"]


class OfRows(Stream):
    """Has no state, but its iterators have one."""

    def __iter__(self):
        return Rows()


def saving_feed(data: Any, position: Position = Position(), *saved: Any) -> Feed:  # noqa: B008
    """Returns a feed that takes a state before each batch."""
    feed = Feed(adapt(data), Batcher(size=BATCH), position, is_saved=True, clock=lambda: 0.0)
    if saved:
        feed.load_state_dict(*saved)
    return feed


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("data_set", "is_read"), [(Stream, True), (Positioned, False), (OfRows, False)], ids=["without a state", "with a state", "with a state of its iterator"]
)
@pytest.mark.parametrize("num_workers", [0, 2])
@forks[0]
@forks[1]
def test_a_stateful_data_loader_seeks_in_an_iterable_data_set_that_has_a_state(num_workers, data_set, is_read, tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        gc.collect()  # A forked worker must not inherit the workers of another loader.
        return stateful.StatefulDataLoader(data_set(), batch_size=BATCH, num_workers=num_workers)

    assert_resumes(tmp_path, make, 2, *([CANNOT_SEEK.format(2 * BATCH)] if is_read else []), steps=5)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
def test_a_count_of_batches_that_an_earlier_version_saved_is_not_used():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(Stream(), batch_size=BATCH)
    next(iter(loader))
    state = {**loader.state_dict(), "_num_yielded": 2}  # Counted twice by torchdata.
    saved = {"passes": 0, "examples": BATCH, "loader": {"loader": state, "generators": [], "inside": [], "is_kept": False, "epochs": []}}
    with warned(CANNOT_SEEK.format(BATCH)):
        fed = saving_feed(stateful.StatefulDataLoader(Stream(), batch_size=BATCH), Position(0, BATCH), saved).next()
    np.testing.assert_array_equal(fed.batch.x, X[BATCH : 2 * BATCH])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
def test_the_state_of_a_loader_is_not_used_by_one_that_cannot_seek():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    feed = saving_feed(stateful.StatefulDataLoader(Positioned(), batch_size=BATCH))
    feed.next()
    state = feed.state_dict(feed.position)
    assert state["examples"] == BATCH
    with warned(CANNOT_SEEK.format(BATCH)):
        fed = saving_feed(DataLoader(Positioned(), batch_size=BATCH), feed.position, state).next()
    np.testing.assert_array_equal(fed.batch.x, X[BATCH : 2 * BATCH])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("steps", [1000, None])
def test_without_workers_states_are_taken_after_a_resume_for_any_snapshot_every_n_steps(steps):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return stateful.StatefulDataLoader(Positioned(), batch_size=BATCH, snapshot_every_n_steps=steps)

    feed = saving_feed(make())
    feed.next()
    again = saving_feed(make(), feed.position, feed.state_dict(feed.position))
    again.next()
    assert again.state_dict(again.position)["examples"] == again.position.examples == 2 * BATCH


# -- the epoch of a data set --


class Reshuffled(IterableDataset):
    """Yields the examples in an order that depends on its epoch, like many data sets on disk."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(ROWS)
        return iter(list(zip(X[order], Y[order], strict=True)))


def shuffled_stream(*, buffer: int | None = 5, shards: int = 2) -> Any:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": X, "y": Y}).to_iterable_dataset(num_shards=shards)
    return (stream if buffer is None else stream.shuffle(seed=1, buffer_size=buffer)).with_format("torch")


def test_a_data_set_receives_the_number_of_the_pass_like_a_hand_written_loop():
    def batches() -> Any:
        for epoch in range(3):
            data_set = Reshuffled()
            data_set.set_epoch(epoch)
            yield from [(x.numpy(), y.numpy()) for x, y in DataLoader(data_set, batch_size=BATCH)]

    assert_same(trained_state(lambda: DataLoader(Reshuffled(), batch_size=BATCH), epochs=3), trained_state(batches, epochs=3, steps_per_epoch=3))


def test_data_sets_that_pytorch_joins_or_cuts_receive_the_number_of_the_pass():
    class Rows(Dataset):
        epoch = -1

        def __len__(self) -> int:
            return 2

        def __getitem__(self, row: int) -> Any:
            return np.full(1, self.epoch, np.float32)

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    joined = torch.utils.data.ConcatDataset([torch.utils.data.Subset(Rows(), [0]), Rows()])
    stacked = torch.utils.data.StackDataset(a=Rows())
    chained = torch.utils.data.ChainDataset([Reshuffled(), Reshuffled()])
    assert next(adapt(DataLoader(joined, batch_size=3), inputs_only=True).open(Position(7))).x.tolist() == [[7]] * 3
    assert next(adapt(DataLoader(stacked, batch_size=1), inputs_only=True).open(Position(7))).x["a"].tolist() == [[7]]
    adapt(DataLoader(chained, batch_size=3)).open(Position(7))
    assert [part.epoch for part in chained.datasets] == [7, 7]


@pytest.mark.parametrize("k", [2, 3, 4, 7])
@pytest.mark.mostly_slow
def test_a_data_set_with_an_epoch_is_read_up_to_the_position_of_its_pass(k, tmp_path):
    assert_resumes(tmp_path, lambda: DataLoader(Reshuffled(), batch_size=BATCH), k, *([CANNOT_SEEK.format(k % 3 * BATCH)] if k % 3 else []))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("buffer", [None, 5], ids=["in order", "shuffled with a buffer"])
@pytest.mark.parametrize("k", [2, 3, 4, 6, 7])
@pytest.mark.mostly_slow
def test_a_stateful_data_loader_over_a_stream_resumes_with_all_batches(k, buffer, tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    keys = {"inputs": "x", "targets": "y"}
    # The state of a stream omits the rows in its shuffle buffer.
    messages = [CANNOT_SEEK.format(k % 3 * BATCH)] if k % 3 and buffer else []
    assert_resumes(tmp_path, lambda: stateful.StatefulDataLoader(shuffled_stream(buffer=buffer), batch_size=BATCH), k, *messages, keys=keys)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize("k", [8, 9])
def test_a_stateful_data_loader_over_a_stream_that_maps_batches_keeps_all_rows_in_a_second_resume(k):
    stateful, datasets = pytest.importorskip("torchdata.stateful_dataloader"), pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": np.arange(80.0), "y": np.arange(80.0)})

    def make() -> Any:
        stream = table.to_iterable_dataset(num_shards=3).map(lambda rows: rows, batched=True, batch_size=7)
        return stateful.StatefulDataLoader(stream.with_format("torch"), batch_size=BATCH)

    assert_resumes_twice(make, k, 20, range(6), inputs="x", targets="y")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.slow
@pytest.mark.parametrize(("k", "buffer"), [(2, None), (3, None), (4, 5)])
@forks[0]
@forks[1]
def test_persistent_workers_over_a_stream_resume_with_all_batches(k, buffer, tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        gc.collect()  # A forked worker must not inherit the workers of another loader.
        return stateful.StatefulDataLoader(shuffled_stream(buffer=buffer), batch_size=BATCH, num_workers=2, persistent_workers=True)

    # A stream with a buffer is one shard, so one of the workers yields all batches.
    messages = [CANNOT_SEEK.format(k % 3 * BATCH)] if k % 3 and buffer else []
    assert_resumes(tmp_path, make, k, *messages, keys={"inputs": "x", "targets": "y"})


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
def test_a_stream_whose_epoch_the_user_chose_resumes_in_the_middle(tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    options = {"keys": {"inputs": "x", "targets": "y"}}

    def run_with(root: Any, steps: int) -> dict[str, Any]:
        loader = stateful.StatefulDataLoader(shuffled_stream(buffer=None, shards=5), batch_size=BATCH)
        choose = LambdaCallback(on_epoch_begin=lambda epoch, logs: loader.dataset.set_epoch(10 + epoch))
        return run(root, loader, steps, callbacks=[choose], **options)

    uninterrupted = run_with(tmp_path / "never", 8)
    run_with(tmp_path / "stopped", 4)
    assert_same(run_with(tmp_path / "stopped", 8), uninterrupted)


@pytest.mark.parametrize("steps_per_epoch", [2, 3])
def test_an_epoch_that_begins_inside_a_pass_resumes_with_the_number_of_that_pass(steps_per_epoch, tmp_path):
    def run_with(root: Any, steps: int) -> dict[str, Any]:
        loader = DataLoader(Reshuffled(), batch_size=BATCH)
        choose = LambdaCallback(on_epoch_begin=lambda epoch, logs: loader.dataset.set_epoch(10 + epoch))
        return run(root, loader, steps, steps_per_epoch=steps_per_epoch, callbacks=[choose])

    uninterrupted = run_with(tmp_path / "never", 8)
    run_with(tmp_path / "stopped", steps_per_epoch)
    with warned(CANNOT_SEEK.format(min(steps_per_epoch * BATCH, ROWS))):
        resumed = run_with(tmp_path / "stopped", 8)
    assert_same(resumed, uninterrupted)


def test_an_epoch_that_a_callback_sets_replaces_the_number_of_the_pass():
    used: list[int] = []

    class Recorded(Reshuffled):
        def __iter__(self):
            used.append(self.epoch)
            return super().__iter__()

    data = DataLoader(Recorded(), batch_size=BATCH)
    choose = LambdaCallback(on_epoch_begin=lambda epoch, logs: data.dataset.set_epoch(10 + epoch))
    trainer = make_trainer()
    trainer.fit(data, epochs=3, callbacks=[choose], verbose=0)
    assert used == [0, 10, 11, 12]  # The first batch was read only for its shapes.
    trainer.fit(data, epochs=2, callbacks=[choose], verbose=0)
    assert used[4:] == [3, 10, 11]


def stateful_loader(**options: Any) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(tensors(), batch_size=BATCH, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata
@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(shuffle=True, generator=seeded()),
        lambda: stateful_loader(shuffle=True),
        lambda: stateful_loader(shuffle=True, generator=seeded()),
        lambda: loader(shuffle=True),
        lambda: DataLoader(Reshuffled(), batch_size=BATCH, generator=seeded()),
        lambda: loader(shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True),
        lambda: stateful_loader(shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True),
    ],
    ids=["generator", "stateful", "stateful with a generator", "global generator", "epoch", "persistent workers", "stateful with persistent workers"],
)
@forks[0]
@forks[1]
def test_a_callback_that_leaves_the_data_alone_in_on_epoch_begin_changes_no_number(make, tmp_path):
    def run_twice(root: Any, steps: int, **options: Any) -> dict[str, Any]:
        torch.manual_seed(1)
        data = make()
        first = run(root, data, steps, **options)
        trainer = make_trainer()
        trainer.fit(data, epochs=1, verbose=0)
        history = trainer.fit(data, epochs=2, verbose=0, **options)
        return {"first": first, "second": {**state_of(trainer), "history": rows_of(history)}}

    options = {"callbacks": [LambdaCallback(on_epoch_begin=lambda epoch, logs: None)]}
    expected = run_twice(tmp_path / "without", 8)
    assert_same(run_twice(tmp_path / "with", 8, **options), expected)
    if make().generator is not None or hasattr(make(), "load_state_dict"):  # Otherwise a resume cannot repeat the order.
        for k in (3, 4):
            torch.manual_seed(1)
            run(tmp_path / str(k), make(), k, **options)
            torch.manual_seed(99)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="This data source cannot seek")
                assert_same(run(tmp_path / str(k), make(), 8, **options), expected["first"])


@pytest.mark.parametrize("has_length", [True, False])
def test_an_epoch_that_a_callback_sets_applies_if_an_epoch_has_as_many_steps_as_a_pass(has_length):
    seen: list[int] = []

    class Epochs(Dataset if has_length else IterableDataset):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, row: int) -> Any:
            seen.append(self.epoch)
            return X[row], Y[row]

        def __iter__(self) -> Any:
            return (self[row] for row in range(2 * BATCH))

    if has_length:
        Epochs.__len__ = lambda self: 2 * BATCH  # type: ignore[attr-defined]
    data = DataLoader(Epochs(), batch_size=BATCH)
    choose = LambdaCallback(on_epoch_begin=lambda epoch, logs: data.dataset.set_epoch(10 + epoch))
    make_trainer().fit(data, epochs=3, steps_per_epoch=2, callbacks=[choose], verbose=0)
    assert seen[-6 * BATCH :] == [epoch for epoch in (10, 11, 12) for _ in range(2 * BATCH)]


# -- batches --


def test_a_batch_that_pytorch_collates_into_a_list_becomes_a_tuple():
    triple = first(DataLoader(TensorDataset(*(torch.from_numpy(part) for part in (X, Y, Y[:, 0]))), batch_size=BATCH))
    assert [type(part) for part in triple] == [np.ndarray] * 3
    np.testing.assert_array_equal(triple.weights, Y[:BATCH, 0])


def test_nested_lists_become_tuples_and_named_tuples_stay():
    Pair = collections.namedtuple("Pair", "a b")
    assert Selection().split(torch_batch(Pair(torch.zeros(2), torch.ones(2)))).y == ()  # One value, as in JAX.
    item = [[torch.zeros(2), [torch.ones(2)]], {"y": Pair(torch.zeros(2), [torch.zeros(2)])}]
    (a, (b,)), targets = torch_batch(item)
    assert (a.tolist(), b.tolist()) == ([0, 0], [1, 1])
    assert isinstance(targets["y"], Pair) and isinstance(targets["y"].b, tuple)


def test_inputs_and_targets_are_picked_from_dicts_by_key():
    class Named(Dataset):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, row: int) -> dict[str, Any]:
            return {"image": X[row], "label": Y[row], "id": "text"}

    options = {"keys": {"inputs": "image", "targets": "label"}}
    assert_same(outcome(DataLoader(Named(), batch_size=BATCH), **options), of_arrays())


def test_an_iterator_of_a_loader_yields_the_same_batches():
    assert_same(trained_state(lambda: iter(loader()), epochs=1), trained_state(loader, epochs=1))


def trained_state(make: Any, **options: Any) -> dict[str, Any]:
    trainer = make_trainer()
    history = trainer.fit(make(), verbose=0, **options)
    return {**state_of(trainer), "history": rows_of(history)}


def test_tensors_become_arrays_without_a_copy():
    tensor = torch.zeros(3)
    torch_batch(tensor)[0] = 5
    assert tensor[0] == 5


def test_tensors_that_require_gradients_or_are_bfloat16_are_converted():
    assert torch_batch(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    halves = torch_batch(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert halves.dtype == jnp.bfloat16 and halves.tolist() == [1.5, -2.0]
    assert first((torch.ones(4, 3, requires_grad=True), torch.ones(4))).x.shape == (4, 3)


def test_a_sparse_tensor_is_an_error():
    with pytest.raises(DataError, match=r"A tensor of dtype torch\.float32 and layout torch\.sparse_coo cannot be converted to an array"):
        torch_batch(torch.zeros(2, 2).to_sparse())


def test_text_is_an_error_that_names_it():
    class Texts(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, row: int) -> Any:
            return X[row], "text"

    with pytest.raises(DataError, match=r"y\[0\] must hold numbers, but its dtype is <U4"):
        make_trainer().fit(DataLoader(Texts(), batch_size=2), verbose=0)


def test_a_loader_of_single_examples_is_an_error():
    with pytest.raises(DataError, match="Put single examples into batches first"):
        make_trainer().fit(DataLoader(TensorDataset(torch.zeros(4), torch.zeros(4)), batch_size=None), verbose=0)


def test_a_batch_of_four_elements_is_an_error():
    with pytest.raises(DataError, match=r"a tuple of 4 elements\. Nest several inputs"):
        make_trainer().fit(DataLoader(TensorDataset(*[torch.zeros(4)] * 4), batch_size=2), verbose=0)


# -- what is known about a loader --


def test_a_loader_reports_its_number_of_batches_but_not_of_examples():
    source = adapt(loader())
    assert isinstance(source, TorchSource)
    assert (source.num_batches, source.batch_size, source.num_examples, source.shuffles, source.knows_length) == (3, BATCH, None, None, False)


def test_a_loader_with_fewer_rows_than_a_batch_is_not_mostly_padding():
    assert adapt(DataLoader(tensors(), batch_size=64)).batch_size == ROWS


@pytest.mark.parametrize("length", [None, 3], ids=["no length", "a wrong length"])
def test_an_iterable_data_set_is_not_asked_for_its_length(length):
    source = adapt(DataLoader(Stream(length), batch_size=BATCH))
    assert (source.num_batches, source.batch_size) == (None, BATCH)
    assert sum(len(triple.x) for triple in source.open(Position())) == ROWS


def test_only_batches_collated_by_pytorch_are_not_copied():
    assert adapt(loader()).owns_batches
    assert not adapt(DataLoader(tensors(), batch_size=2, collate_fn=lambda rows: rows)).owns_batches
    assert not adapt(DataLoader(tensors(), batch_size=None)).owns_batches


def test_batches_from_a_custom_collate_fn_may_be_larger_than_the_batch_size():
    def both(rows: Any) -> Any:
        x, y = torch.utils.data.default_collate(rows)
        return torch.cat([x, x]), torch.cat([y, y])

    with warned():
        feed = Feed(adapt(DataLoader(tensors(), batch_size=BATCH, collate_fn=both)), Batcher(size=BATCH))
        assert [len(feed.next().batch.mask) for _ in range(3)] == [8, 8, 8]


def test_a_bare_data_set_is_an_error_that_says_to_wrap_it():
    for data in (tensors(), Stream()):
        fault = rf"a PyTorch dataset \(a {type(data).__name__}\), which yields single examples\. Pass a loader: DataLoader\(data, batch_size=32\)"
        with pytest.raises(DataError, match=fault):
            adapt(data)


def test_an_empty_loader_is_an_error():
    with pytest.raises(DataError, match="The DataLoader is empty: it has 0 batches"):
        adapt(DataLoader(tensors(rows=2), batch_size=4, drop_last=True))


@pytest.mark.parametrize("given", [{"y": Y}, {"batch_size": 3}, {"drop_remainder": True}], ids=lambda given: next(iter(given)))
def test_arguments_for_in_memory_arrays_cannot_be_passed_with_a_loader(given):
    with pytest.raises(ConfigError, match=rf"{next(iter(given))} can only be passed with in-memory arrays\. `data` is a DataLoader"):
        adapt(loader(), **given)


def test_a_pass_draws_from_the_generator_only_when_its_first_batch_is_requested():
    generator = seeded()
    begin = generator.get_state()
    opened = adapt(loader(shuffle=True, generator=generator)).open(Position())
    assert torch.equal(generator.get_state(), begin)
    next(opened)
    assert not torch.equal(generator.get_state(), begin)


def test_a_pass_yields_every_example_once():
    seen = np.concatenate([triple.x for triple in itertools.islice(adapt(loader(shuffle=True)).open(Position()), 9)])
    np.testing.assert_array_equal(np.sort(seen, axis=0), np.sort(X, axis=0))
