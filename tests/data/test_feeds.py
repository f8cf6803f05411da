import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import LambdaCallback
from fitflax.data import Position, adapt
from fitflax.data.batch import Batcher
from fitflax.data.feeds import Feeder
from fitflax.errors import ConfigError, DataError, FitflaxWarning, LossError
from fitflax.parallel import DataParallel


def numbered(count: int = 20, rows: int = 2) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batch `i` holds nothing but `i`."""
    for number in range(count):
        yield np.full((rows, 1), number, np.float32), np.zeros((rows, 1), np.float32)


class Pass(nn.Module):
    """Returns its input; its parameter is never used up."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + self.param("zero", nn.initializers.zeros, ())


def seen_value(outputs: Any, targets: Any) -> Any:
    return outputs[:, 0]


def make_trainer(**options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Pass(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse", learning_rate=0.0, **options)
    return trainer


class Seen(LambdaCallback):
    """Notes which numbered batches were trained on."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        super().__init__(on_train_batch_end=self.note)

    def note(self, batch: int, logs: Any) -> None:
        self.numbers.append(round(logs.source.loss**0.5))


def numbers(trainer: fitflax.Trainer, data: Any, callbacks: Any = (), **options: Any) -> list[int]:
    seen = Seen()
    trainer.fit(data, callbacks=[seen, *callbacks], verbose=0, **options)
    return seen.numbers


# -- Feeder --


def test_the_full_shape_is_the_batch_size_rounded_up_to_the_devices():
    feeder = Feeder(functools.partial(Batcher, num_shards=4), pad=True)
    sizes = {rows: len(feeder.train(adapt(np.zeros(rows), batch_size=6), None, Position()).next().batch.mask) for rows in (3, 5, 6, 100)}
    assert sizes == {3: 4, 5: 8, 6: 8, 100: 8}


def test_evaluations_of_arrays_begin_anew_each_time():
    make = Feeder(Batcher, pad=True).evaluations(adapt(np.arange(6.0), batch_size=4, shuffle=False), "val", None)
    for _ in range(2):
        assert np.asarray(make().next().batch.x).tolist() == [0, 1, 2, 3]


def test_evaluations_of_a_function_ask_it_anew_each_time():
    make = Feeder(Batcher, pad=True).evaluations(adapt(numbered), "val", 2)
    for _ in range(2):
        assert make().next().batch.x[0, 0] == 0


def test_an_iterator_serves_one_evaluation_and_a_second_is_an_error():
    make = Feeder(Batcher, pad=True).evaluations(adapt(numbered()), "val", None)
    make().next()
    with pytest.raises(DataError, match=r"'val' is an iterator that has been used up.*validation_steps"):
        make()


def test_an_iterator_goes_on_where_steps_say_how_far():
    make = Feeder(Batcher, pad=True).evaluations(adapt(numbered()), "val", 2)
    assert [make().next().batch.x[0, 0] for _ in range(4)] == [0, 1, 2, 3]


def test_an_endless_evaluation_is_an_error_that_names_the_way_out():
    with pytest.raises(ConfigError, match=r"'val' never ends.*validation_steps"):
        Feeder(Batcher, pad=True).evaluations(adapt(itertools.cycle([np.zeros(2)])), "val", None)


def test_single_batches_take_the_shape_of_the_first_of_their_kind():
    feeder = Feeder(functools.partial(Batcher, num_shards=2), pad=True)
    shapes = [len(feeder.single(next(adapt(np.zeros(rows)).open(Position())), kind).batch.mask) for rows, kind in ((4, "a"), (1, "a"), (1, "b"))]
    assert shapes == [4, 4, 2]


# -- iterators that serve once, through fit --


def test_the_batch_that_fit_looks_at_first_is_trained_on_first():
    assert numbers(make_trainer(), numbered(), steps=3) == [0, 1, 2]


def test_a_generator_used_in_two_fits_loses_no_batch():
    trainer, generator = make_trainer(), numbered()
    assert numbers(trainer, generator, steps=2) == [0, 1]
    assert numbers(trainer, generator, epochs=2, steps_per_epoch=2) == [2, 3, 4, 5]
    assert next(generator)[0][0, 0] == 6


def test_a_stop_loses_no_batch_of_a_generator():
    trainer, generator = make_trainer(), numbered()
    stop = LambdaCallback(lambda checkpoint: trainer.stop(), every=fitflax.every(steps=2))
    assert numbers(trainer, generator, [stop], steps=9) == [0, 1]
    assert numbers(trainer, generator, steps=2) == [2, 3]


def test_compiling_again_loses_no_batch_of_a_generator():
    trainer, generator = make_trainer(), numbered()
    stop = LambdaCallback(lambda checkpoint: trainer.stop(), every=fitflax.every(steps=2))
    assert numbers(trainer, generator, [stop], steps=9) == [0, 1]
    trainer.compile("sgd", "mse", ["mae"], learning_rate=0.0)
    assert numbers(trainer, generator, steps=2) == [2, 3]


def test_a_fit_that_fails_before_its_first_step_loses_no_batch_of_a_generator():
    trainer, generator = make_trainer(), numbered()
    trainer.compile("sgd", lambda outputs, targets: outputs[:, 3:].sum(-1)[:1], learning_rate=0.0)
    with pytest.raises(LossError):
        trainer.fit(generator, steps=2, verbose=0)
    trainer.compile("sgd", "mse", learning_rate=0.0)
    assert numbers(trainer, generator, steps=2) == [0, 1]


def test_other_data_in_between_loses_no_batch_of_a_generator():
    trainer, generator = make_trainer(), numbered()
    stop = LambdaCallback(lambda checkpoint: trainer.stop(), every=fitflax.every(steps=2))
    assert numbers(trainer, generator, [stop], steps=9) == [0, 1]
    trainer.fit(np.zeros((2, 1)), np.zeros((2, 1)), verbose=0)
    assert numbers(trainer, generator, steps=2) == [2, 3]


def test_class_weights_of_the_second_fit_count_though_the_generator_goes_on():
    def labeled() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            yield np.array([[1.0], [3.0]], np.float32), np.array([0, 1])

    trainer = fitflax.Trainer(Pass(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", lambda outputs, targets: outputs[:, 0], learning_rate=0.0)
    generator = labeled()
    assert trainer.fit(generator, steps=1, verbose=0).history["loss"] == [2.0]
    assert trainer.fit(generator, steps=1, class_weight={0: 0.0}, verbose=0).history["loss"] == [3.0]


def test_an_iterator_that_ends_early_ends_the_run_with_a_reason_and_a_warning():
    trainer = make_trainer()
    with pytest.warns(FitflaxWarning, match="The data ended before the training did"):
        assert numbers(trainer, numbered(3), steps=9) == [0, 1, 2]
    assert trainer.stop_reason == "data_exhausted"
    assert trainer.step == 3


def test_an_iterator_with_no_batch_is_an_error():
    with pytest.raises(DataError, match="yields no batch"):
        make_trainer().fit(iter([]), steps=1, verbose=0)


def test_an_iterator_used_up_is_an_error():
    trainer, generator = make_trainer(), numbered(2)
    numbers(trainer, generator, epochs=1)
    with pytest.raises(DataError, match="yields no batch"):
        trainer.fit(generator, verbose=0)


def test_a_function_is_asked_anew_when_it_is_dry():
    assert numbers(make_trainer(), lambda: numbered(3), epochs=2, steps_per_epoch=4) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_one_shot_validation_set_serves_once():
    trainer = make_trainer()
    with pytest.raises(DataError, match="'val' is an iterator that has been used up"):
        trainer.fit(lambda: numbered(2), epochs=2, validation_data=numbered(2), verbose=0)


def test_a_one_shot_validation_set_goes_on_with_validation_steps():
    trainer = make_trainer(metrics=[seen_value])
    history = trainer.fit(lambda: numbered(2), epochs=3, validation_data=itertools.chain(numbered()), validation_steps=2, verbose=0)
    assert history.history["val_seen_value"] == [0.5, 2.5, 4.5]


def test_an_endless_validation_set_needs_validation_steps():
    with pytest.raises(ConfigError, match="validation_steps"):
        make_trainer().fit(lambda: numbered(2), validation_data=itertools.cycle(numbered(2)), verbose=0)


@pytest.mark.slow
def test_a_generator_may_fill_one_buffer_again_and_again():
    # On CPU JAX reads a NumPy array in place, if it is aligned, while the step is on its way; and the loop looks a batch ahead.
    class Slow(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            hidden = x
            for _ in range(6):
                hidden = nn.Dense(512)(hidden)
            return x[:, 0] + 0 * hidden[:, 0]

    def refilled() -> Iterator[np.ndarray]:
        raw = np.zeros(256 * 512 * 4 + 64, np.uint8)
        begin = -raw.ctypes.data % 64
        buffer = raw[begin : begin + 256 * 512 * 4].view(np.float32).reshape(256, 512)
        for number in range(8):
            buffer[:] = number
            yield buffer

    trainer = fitflax.Trainer(Slow(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", lambda outputs: outputs, learning_rate=0.0)
    assert trainer.fit(refilled, verbose=0).history["loss"] == [3.5]
    assert trainer.evaluate(refilled, verbose=0)["loss"] == 3.5
    np.testing.assert_array_equal(trainer.predict(refilled), np.repeat(np.arange(8.0), 256))


# -- data without an end --


def test_endless_data_needs_an_end():
    endless = itertools.cycle(numbered(3))
    for options in ({}, {"epochs": 2}):
        with pytest.raises(ConfigError, match="never ends, and nothing says where to stop"):
            make_trainer().fit(endless, verbose=0, **options)
    trainer = make_trainer()
    trainer.build(np.zeros((2, 1)))
    for method in (trainer.evaluate, trainer.predict):
        with pytest.raises(ConfigError, match="never ends"):
            method(endless)


@pytest.mark.parametrize("options", [{"steps": 4}, {"epochs": 2, "steps_per_epoch": 2}, {"steps_per_epoch": 4}, {"steps": 4, "epochs": 9}])
def test_endless_data_serves_as_far_as_it_is_asked(options: dict):
    assert numbers(make_trainer(), itertools.cycle(numbered(3)), **options) == [0, 1, 2, 0]


def test_endless_data_with_validation_and_without_epochs_warns_and_names_both_ways_out():
    with pytest.warns(FitflaxWarning, match=r"steps_per_epoch=, or validation_freq=every\(steps=...\)"):
        make_trainer().fit(itertools.cycle(numbered(3)), steps=2, validation_data=lambda: numbered(1), verbose=0)


# -- sizes --


def test_a_larger_later_batch_is_trained_on_as_well_with_a_warning():
    data = [next(numbered(1, rows)) for rows in (2, 5)]
    trainer = make_trainer(metrics={"one": lambda outputs, targets: outputs[:, 0] + 1})
    with pytest.warns(FitflaxWarning, match="A batch of 5 examples follows batches of 2"):
        trainer.fit(lambda: iter(data), verbose=0)
    assert trainer.step == 2
    assert trainer.history.history["one"] == [1.0]


def test_without_padding_each_size_is_its_own_and_must_divide_over_the_devices(devices):
    trainer = fitflax.Trainer(Pass(), parallel=DataParallel(devices(2)))
    trainer.compile("sgd", lambda outputs, targets: outputs.shape[0] * (outputs[:, 0] * 0 + 1), learning_rate=0.0, pad=False)
    history = trainer.fit(np.zeros((6, 1)), np.zeros((6, 1)), batch_size=4, verbose=0)
    # A replica's share is 2 rows, then 1: (4 * 2 + 2 * 1) / 6.
    assert history.history["loss"][0] == pytest.approx(10 / 6)
    with pytest.raises(DataError, match=r"A batch of 3 examples cannot be split over 2 devices with compile\(pad=False\)"):
        trainer.fit(np.zeros((7, 1)), np.zeros((7, 1)), batch_size=4, shuffle=False, verbose=0)


def test_a_list_of_ready_batches_comes_as_a_function():
    batches = list(numbered(3))
    assert numbers(make_trainer(), lambda: batches, epochs=2) == [0, 1, 2, 0, 1, 2]
