"""Shards: feeds of several processes, simulated by threads that communicate through a barrier, return equally many batches and drop nothing."""

import collections
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import LambdaCallback
from fitflax.data import Batcher, Feed, Position, Shard, adapt
from fitflax.data.adapt import Feeder
from fitflax.data.shards import ShardFeed, _describe, agree_on_shards, part_of_batch_size, position_in_shard
from fitflax.errors import ConfigError, DataError, RestoreError
from fitflax.loops.setup import _start_progress

SECONDS = 10
START = Position()


class Team:
    """Runs one function for each of several simulated processes and lets them exchange values."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_exchanges = 0
        self._barrier = threading.Barrier(count, timeout=SECONDS)
        self._values: list[Any] = [None] * count

    def run(self, work: Any) -> list[Any]:
        """Returns the result of each process, or the exception that it raised."""
        results: list[Any] = [None] * self.count

        def call(index: int) -> None:
            def exchange(value: Any) -> list[Any]:
                self._values[index] = value
                self._barrier.wait()
                found = list(self._values)
                self._barrier.wait()
                self.num_exchanges += index == 0
                return found

            try:
                results[index] = work(index, exchange)
            except Exception as error:  # noqa: BLE001
                results[index] = error

        threads = [threading.Thread(target=call, args=(index,)) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        return results


def make_feed(
    data: Any, index: int, exchange: Any, count: int, *, position: Position = START, used: Any = (), size: int | None = None, **options: Any
) -> ShardFeed:
    data = (lambda: iter(data_list)) if isinstance(data_list := data, list) else data  # A list of arrays would be several inputs.
    source = adapt(data, shuffle=False, **({} if size is None else {"batch_size": size}))
    source.shares = agree_on_shards(source, (index, count), index, exchange)
    return ShardFeed(
        source,
        Batcher(size=source.batch_size, pad=options.get("pads", True)),
        position_in_shard(START, used, source.shares),
        used=used,
        exchange=exchange,
        **options,
    )


def rows(fed: Any) -> list[float]:
    return fed.batch.x[fed.batch.mask].tolist()


def passes(feed: Feed, count: int = 1) -> list[Any]:
    given: list[Any] = []
    for _ in range(count):
        while (fed := feed.next()) is not None:
            given.append((rows(fed), fed.num_real, fed.own, fed.used, len(fed.batch.mask)))
    return given


def arrays(*sizes: int) -> list[np.ndarray]:
    return [np.arange(size) + 100.0 * number for number, size in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [(10, 3), (3, 10), (8, 8), (1, 40), (5, 5, 11)])
@pytest.mark.parametrize("kind", ["arrays", "function"])
def test_unequal_shards_return_equally_many_batches_and_every_example_once_per_pass(sizes, kind):
    parts = arrays(*sizes)

    def work(index: int, exchange: Any) -> Any:
        if kind == "arrays":
            return passes(make_feed(parts[index], index, exchange, len(sizes), size=2), 2)
        batches = [parts[index][begin : begin + 2] for begin in range(0, len(parts[index]), 2)]
        return passes(make_feed(batches, index, exchange, len(sizes)), 2)

    results = Team(len(sizes)).run(work)
    num_batches = -(-max(sizes) // 2)
    for index, given in enumerate(results):
        assert len(given) == 2 * num_batches
        assert [row for own, *_ in given for row in own] == parts[index].tolist() * 2
        assert {size for *_, size in given} == {2}
        assert given[-1][3] == sizes
    for each in zip(*results, strict=True):
        assert len({real for _, real, *_ in each}) == 1 and each[0][1] == sum(own for _, _, own, *_ in each)
        assert len({used for *_, used, _ in each}) == 1


@pytest.mark.filterwarnings("ignore:.*read:fitflax.errors.FitflaxWarning")
def test_a_feed_resumes_inside_a_pass_although_a_shard_has_ended():
    parts = arrays(12, 3)

    def whole(index: int, exchange: Any) -> Any:
        return passes(make_feed(lambda: iter(np.split(parts[index], len(parts[index]) // 3)), index, exchange, 2))

    for stop in range(1, 4):
        expected = Team(2).run(whole)

        def rest(index: int, exchange: Any, stop: int = stop, expected: Any = expected) -> Any:
            feed = make_feed(lambda: iter(np.split(parts[index], len(parts[index]) // 3)), index, exchange, 2, used=expected[0][stop - 1][3])
            return passes(feed)

        found = Team(2).run(rest)
        assert [[one[:3] for one in given] for given in found] == [[one[:3] for one in given[stop:]] for given in expected]


def test_the_processes_rarely_communicate():
    parts = arrays(4000, 3000)
    team = Team(2)
    team.run(lambda index, exchange: passes(make_feed(parts[index], index, exchange, 2, size=2)))
    assert team.num_exchanges < 2000 / 16 + 10


def test_batches_are_padded_to_the_largest_batch_of_all_processes():
    batches = [[np.zeros(3), np.zeros(3)], [np.ones(5), np.ones(2)]]
    results = Team(2).run(lambda index, exchange: passes(make_feed(batches[index], index, exchange, 2)))
    assert [[size for *_, size in given] for given in results] == [[5, 5], [5, 5]]
    assert results[0][1][0] == [0.0] * 3


def test_the_order_of_keys_in_a_batch_does_not_matter():
    def work(index: int, exchange: Any) -> Any:
        lengths = [2, 2, 2 - index]  # The last batch is padded, which sorts its keys.
        keys = "ab" if index else "ba"
        source = adapt(lambda: ({key: np.ones(length) for key in keys} for length in lengths))
        source.owns_batches = True  # Otherwise, the copy sorts the keys.
        source.shares = agree_on_shards(source, (index, 2), index, exchange)
        return [fed.num_real for fed in iter(ShardFeed(source, Batcher(), exchange=exchange).next, None)]

    assert Team(2).run(work) == [[4, 4, 3]] * 2


def test_a_one_shot_iterator_keeps_batches_that_were_read_but_not_used():
    iterators = [iter([np.full(2, value) for value in range(9)]), iter([np.full(2, value) for value in range(7)])]
    taken = []

    def work(index: int, exchange: Any) -> Any:
        feed = make_feed(iterators[index], index, exchange, 2)
        used = [rows(feed.next()) for _ in range(4)]
        feed.push_back()
        feed.close()
        taken.append(feed.source)
        return used, [triple.x.tolist() for triple in feed.source.open(Position(examples=feed.source.taken))]

    for (used, left), count in zip(Team(2).run(work), (9, 7), strict=True):
        assert len(used) == 4 and [one[0] for one in left] == list(range(3, count))


def test_later_calls_with_the_same_iterators_continue_their_positions():
    def work(index: int, exchange: Any) -> Any:
        source = adapt(iter([np.full(2, value) for value in range(6 - 4 * index)]))
        source.shares = agree_on_shards(source, (index, 2), index, exchange)
        feeder = Feeder(Batcher, pad=True, exchange=exchange)
        evaluate, given = feeder.evaluations(source, "val", 2), []
        for _ in range(2):  # In the second evaluation, the shard of process 1 has ended.
            feed = evaluate()
            given += [(fed.num_real, fed.position.examples) for fed in (feed.next(), feed.next())]
            feed.close()
        state = SimpleNamespace(live=None)
        session = SimpleNamespace(task=SimpleNamespace(feeder=feeder), state=state, next_position=lambda source: Position(examples=source.taken))
        progress = _start_progress(session, source, None, {})
        return given, progress.position.examples, progress.used

    expected = [(4, 2), (4, 4), (2, 6), (2, 8)], [(4, 2), (4, 4), (2, 4), (2, 4)]
    assert Team(2).run(work) == [(expected[0], 8, (8, 4)), (expected[1], 4, (8, 4))]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([[np.zeros(2)], lambda: iter([])], r"The shards of processes \[1\] yield no batches, but those of processes \[0\] do"),
        ([[np.zeros((2, 3))], [np.zeros((2, 4))]], r"must have the same structure, .* process 0 has x: float64\[3\]; process 1 has x: float64\[4\]"),
        ([[np.zeros(2)], [np.zeros(2, np.int32)]], "must have the same structure, example shapes, and dtypes"),
        ([[np.zeros(2)], [(np.zeros(2), np.zeros(2))]], "batches of all shards must have the same structure"),
    ],
)
def test_incompatible_shards_are_an_error_in_all_processes(data, message):
    for error in Team(2).run(lambda index, exchange: passes(make_feed(data[index], index, exchange, 2))):
        with pytest.raises(DataError, match=message):
            raise error


def test_an_error_in_one_process_is_an_error_in_all_processes_that_names_it():
    def fail() -> Any:
        yield np.zeros(2)
        raise RuntimeError("the disk is gone")

    results = Team(2).run(lambda index, exchange: passes(make_feed(fail if index else (lambda: iter([np.zeros(2)] * 9)), index, exchange, 2)))
    assert isinstance(results[1], RuntimeError)
    with pytest.raises(DataError, match="could not be read: process 1: RuntimeError: the disk is gone"):
        raise results[0]


def test_without_padding_shards_must_yield_batches_of_equal_size():
    for error in Team(2).run(lambda index, exchange: passes(make_feed([np.zeros(2)] * (1 + index), index, exchange, 2, pads=False))):
        with pytest.raises(DataError, match=r"must yield batches of equal size\. .*Received rows, by process: (\[\[2\], \[2\]\]|\[\[\], \[2\]\])"):
            raise error


def test_states_of_loaders_are_saved_for_each_process():
    class Loader:
        def __init__(self, count: int) -> None:
            self.count, self.at = count, 0

        def __iter__(self) -> Any:
            while self.at < self.count:
                self.at += 1
                yield np.full(2, self.at - 1)
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def begin(index: int, exchange: Any) -> Any:
        feed = make_feed(Loader(6 - 3 * index), index, exchange, 2, is_saved=True)
        fed = [feed.next() for _ in range(4)][-1]
        return fed.used, feed.joined_state(fed.position, is_alone=False), feed.joined_state(fed.position, is_alone=True)

    def resume(index: int, exchange: Any) -> Any:
        feed = make_feed(Loader(6 - 3 * index), index, exchange, 2, used=used, is_saved=True)
        feed.load_state_dict(state)
        return [own for own, *_ in passes(feed)]

    (used, state, alone), (_, other, _) = Team(2).run(begin)
    assert state == other and used == (8, 6)
    assert alone["shards"][0] and not alone["shards"][1]
    assert Team(2).run(resume) == [[[4, 4], [5, 5]], [[], []]]


def test_the_processes_agree_whether_the_data_can_be_read_again():
    def work(index: int, exchange: Any) -> list[bool]:
        feed = make_feed([np.zeros(2)] * 2, index, exchange, 2, is_saved=True)
        feed.source.can_reread, feed.source.can_reread_before = False, lambda bookmark: True
        bookmark = {"passes": 0, "examples": 0, "loader": {"at": 0}}
        return [(feed.load_state_dict({"shards": shards}), feed.can_reread)[1] for shards in ([bookmark, {}], [bookmark] * 2)]

    # A checkpoint that was saved after an exception has the state of one process.
    assert Team(2).run(work) == [[False, True]] * 2


def test_processes_with_the_same_part_must_read_the_same_data():
    def work(index: int, exchange: Any, *, differ: bool) -> Any:
        source = adapt(lambda: iter([np.full(2, index % 2 if differ else index // 2)]), shuffle=False)
        source.shares = agree_on_shards(source, (index // 2, 2), index, exchange)
        return passes(ShardFeed(source, Batcher(), exchange=exchange))

    good = Team(4).run(lambda index, exchange: work(index, exchange, differ=False))
    assert [given[0][:2] for given in good] == [([index // 2] * 2, 4) for index in range(4)]
    for error in Team(4).run(lambda index, exchange: work(index, exchange, differ=True)):
        with pytest.raises(DataError, match=r"process 1 has the same part of each batch \(part 0\) as another process"):
            raise error


def test_a_run_with_shards_resumes_with_the_same_number_of_shards():
    def find(index: int, exchange: Any) -> Any:
        return position_in_shard(Position(2, 5), (5, 7), agree_on_shards(adapt(np.zeros(9)), (index, 2), index, exchange))

    assert Team(2).run(find) == [Position(2, 5), Position(2, 7)]
    with pytest.raises(RestoreError, match=r"over 2 shards, one for each process. Received: the same data in all processes. Start 2 processes"):
        position_in_shard(Position(2, 5), (5, 7), None)
    assert position_in_shard(Position(2, 5), (), None) == Position(2, 5)


def test_a_run_without_shards_cannot_resume_with_shards_inside_a_pass():
    def find(index: int, exchange: Any, examples: int) -> Any:
        return position_in_shard(Position(2, examples), (), agree_on_shards(adapt(np.zeros(9)), (index, 2), index, exchange))

    assert Team(2).run(lambda index, exchange: find(index, exchange, 0)) == [Position(2)] * 2
    for error in Team(2).run(lambda index, exchange: find(index, exchange, 5)):
        with pytest.raises(RestoreError, match=r"in the middle of a pass, with the same data in all processes. Received: a shard for each process"):
            raise error


def test_batches_may_change_shape_only_in_all_processes_simultaneously():
    lengths = [[5, 5, 7, 5, 7], [5, 5, 7]]

    def work(index: int, exchange: Any, lengths: Any) -> Any:
        feed = make_feed([{"x": np.ones((2, length))} for length in lengths[index]], index, exchange, 2)
        return [(fed.batch.x["x"].shape, fed.own) for fed in iter(feed.next, None)]

    first, second = Team(2).run(lambda index, exchange: work(index, exchange, lengths))
    assert [shape for shape, _ in first] == [shape for shape, _ in second] == [(2, length) for length in lengths[0]]
    assert [own for _, own in second] == [2, 2, 2, 0, 0]
    for error in Team(2).run(lambda index, exchange: work(index, exchange, [[5, 5, 7, 5, 7], [5, 5, 5, 7, 7]])):
        with pytest.raises(DataError, match=r"must have the same structure, .* process 0 has x\['x'\]: float64\[7\]; process 1 has x\['x'\]: float64\[5\]"):
            raise error


@pytest.mark.filterwarnings("ignore:.*read:fitflax.errors.FitflaxWarning")
def test_a_loader_is_not_opened_again_for_the_shapes_of_a_shard_that_has_ended():
    opened = [0, 0]

    def batches(index: int) -> Any:
        opened[index] += 1
        yield from [np.zeros(2)] * (6 - 4 * index)

    def resume(index: int, exchange: Any) -> Any:
        return passes(make_feed(lambda: batches(index), index, exchange, 2, used=(8, 4)))

    assert [len(given) for given in Team(2).run(resume)] == [2, 2]
    assert opened == [1, 1]


@pytest.mark.filterwarnings("ignore:.*read:fitflax.errors.FitflaxWarning")
def test_reading_the_shapes_of_a_shard_that_has_ended_does_not_disturb_its_data():
    class Graphs:
        def __init__(self, count: int) -> None:
            self.count, self.calls = count, []

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, number: int) -> Any:
            return {"nodes": np.ones((3, 2)), "edges": np.ones(4)}, np.ones(2)

        def on_epoch_begin(self) -> None:
            self.calls.append("begin")

        def on_epoch_end(self) -> None:
            self.calls.append("end")

    shards = [Graphs(4), Graphs(1)]

    def resume(index: int, exchange: Any) -> Any:
        return [fed.own for fed in iter(make_feed(shards[index], index, exchange, 2, used=(4, 2)).next, None)]

    assert Team(2).run(resume) == [[2, 2], [0, 0]]
    assert [shard.calls for shard in shards] == [["begin", "end"]] * 2


def test_without_padding_batches_keep_their_sizes():
    batches = [np.zeros(4), np.zeros(4), np.zeros(2)]
    for given in Team(2).run(lambda index, exchange: passes(make_feed(batches, index, exchange, 2, pads=False))):
        assert [size for *_, size in given] == [4, 4, 2]


def test_reopening_a_feed_over_an_iterator_loses_no_batch():
    def work(index: int, exchange: Any) -> Any:
        feed = make_feed(iter([np.full(2, value) for value in range(12 - 5 * index)]), index, exchange, 2)
        given = [feed.next() for _ in range(6)]
        feed.close()
        feed.reopen()
        given += list(iter(feed.next, None))
        return [rows(fed)[:1] for fed in given], [fed.used for fed in given]

    for (numbers, used), count in zip(Team(2).run(work), (12, 7), strict=True):
        assert [number for one in numbers for number in one] == list(range(count))
        assert used == [(2 * step, min(2 * step, 14)) for step in range(1, 13)]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([(np.zeros(4), True), (np.zeros(4), False)], r"is a Shard only in processes \[0\]"),
        (
            [(np.zeros(4), True), (lambda: iter([np.zeros(2)]), True)],
            r"different kinds of data: process 0 has ArraySource \(can restart: True, endless: False\); process 1 has FunctionSource",
        ),
        (
            [(np.zeros(4), False), (np.zeros(5), False)],
            "different data: process 0 has num_examples=4, num_batches=1, batch_size=32; process 1 has num_examples=5",
        ),
    ],
)
def test_incompatible_data_is_an_error_in_all_processes(sources, message):
    def work(index: int, exchange: Any) -> Any:
        data, is_shard = sources[index]
        return agree_on_shards(adapt(data), (index, 2), index, exchange, is_shard=is_shard)

    for error in Team(2).run(work):
        with pytest.raises(DataError, match=message):
            raise error


def test_data_that_cannot_be_used_in_one_process_is_an_error_in_all_processes():
    def work(index: int, exchange: Any) -> Any:
        failure = DataError("There is nothing to work on") if index else None
        return agree_on_shards(None if index else adapt(np.zeros(4)), (index, 2), index, exchange, failure=failure)

    results = Team(2).run(work)
    assert str(results[0]) == "The data of some processes cannot be used: process 1: DataError: There is nothing to work on"
    assert "process" not in str(results[1])


def test_a_batch_is_divided_equally_between_the_parts():
    assert part_of_batch_size(None, 2) == 16
    with pytest.raises(ConfigError, match=r"batch_size is the total over all processes and must be a multiple of 2, the number of equal shards. Received: 33"):
        part_of_batch_size(33, 2)


def test_in_a_single_process_a_shard_equals_its_data():
    x, y = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32), np.zeros(20, np.int32)
    histories = []
    for data in (Shard((x, y)), (x, y)):
        trainer = fitflax.Trainer(nn.Dense(4))
        trainer.compile("sgd", "sparse_categorical_crossentropy")
        histories.append(trainer.fit(data, batch_size=8, epochs=2, validation_data=Shard((x, y)), verbose=0).history)
        assert trainer.predict(Shard(x)).shape[0] == 20
    assert histories[0] == histories[1]


@pytest.mark.slow
def test_the_last_part_of_a_shard_is_held_out_in_batches_of_validation_batch_size():
    trainer, sizes = fitflax.Trainer(nn.Dense(2)), []
    trainer.compile("sgd", "mse")
    count = LambdaCallback(on_test_batch_end=lambda batch, logs: sizes.append(batch))
    trainer.fit(Shard((np.ones((8, 4)), np.ones((8, 2)))), validation_split=0.5, validation_batch_size=2, batch_size=4, callbacks=[count], verbose=0)
    assert (trainer.step, sizes) == (1, [0, 1])


def test_batches_that_cannot_be_described_to_other_processes_are_an_error():
    with pytest.raises(DataError, match=r"The batches of a Shard must be arrays, or dicts, lists, and tuples of arrays\. Received: a OrderedDict\."):
        _describe({"image": collections.OrderedDict(left=np.ones((2, 3)))})
