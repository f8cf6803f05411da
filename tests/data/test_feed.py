import functools
import itertools
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import LambdaCallback
from fitflax.data import Position, adapt
from fitflax.data.adapt import Feeder
from fitflax.data.feed import undisturbed
from fitflax.data.padding import Batcher
from fitflax.errors import ConfigError, DataError, FitflaxWarning, LossError
from fitflax.parallel import DataParallel


def numbered(count: int = 20, rows: int = 2) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches; batch `i` contains only `i`."""
    for number in range(count):
        yield np.full((rows, 1), number, np.float32), np.zeros((rows, 1), np.float32)


class Identity(nn.Module):
    """Returns its input; its parameter stays zero."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + self.param("zero", nn.initializers.zeros, ())


def seen_value(outputs: Any, targets: Any) -> Any:
    return outputs[:, 0]


def make_trainer(**options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(Identity(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse", learning_rate=0.0, **options)
    return trainer


class Seen(LambdaCallback):
    """Records the numbers of the batches that were trained on."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        super().__init__(on_train_batch_end=self.record)

    def record(self, batch: int, logs: Any) -> None:
        self.numbers.append(round(logs.source.loss**0.5))


def numbers(trainer: fitflax.Trainer, data: Any, callbacks: Any = (), **options: Any) -> list[int]:
    seen = Seen()
    trainer.fit(data, callbacks=[seen, *callbacks], verbose=0, **options)
    return seen.numbers


# -- Feeder --


def test_the_full_shape_is_the_batch_size_rounded_up_to_a_multiple_of_the_devices():
    feeder = Feeder(functools.partial(Batcher, num_shards=4), pad=True)
    sizes = {rows: len(feeder.train(adapt(np.zeros(rows), batch_size=6), None, Position()).next().batch.mask) for rows in (3, 5, 6, 100)}
    assert sizes == {3: 4, 5: 8, 6: 8, 100: 8}


def test_each_evaluation_of_arrays_starts_from_the_beginning():
    make = Feeder(Batcher, pad=True).evaluations(adapt(np.arange(6.0), batch_size=4, shuffle=False), "val", None)
    for _ in range(2):
        assert np.asarray(make().next().batch.x).tolist() == [0, 1, 2, 3]


def test_each_evaluation_of_a_function_calls_it_again():
    make = Feeder(Batcher, pad=True).evaluations(adapt(numbered), "val", 2)
    for _ in range(2):
        assert make().next().batch.x[0, 0] == 0


def test_an_iterator_can_be_evaluated_once_and_a_second_evaluation_is_an_error():
    make = Feeder(Batcher, pad=True).evaluations(adapt(numbered()), "val", None)
    make().next()
    with pytest.raises(DataError, match=r"'val' is an iterator that has been used up.*validation_steps"):
        make()


def test_an_iterator_that_was_read_in_part_cannot_be_evaluated_to_its_end():
    source, feeder = adapt(numbered()), Feeder(Batcher, pad=True)
    feeder.evaluations(source, "eval", 1)().next()
    with pytest.raises(DataError, match=r"'eval' is an iterator that has been .*read in part.*validation_steps= in fit, steps= elsewhere\.$"):
        feeder.evaluations(source, "eval", None)()


def test_an_iterator_continues_in_the_next_evaluation_if_steps_are_given():
    make = Feeder(Batcher, pad=True).evaluations(adapt(numbered()), "val", 2)
    assert [make().next().batch.x[0, 0] for _ in range(4)] == [0, 1, 2, 3]


def test_an_endless_evaluation_is_an_error_that_suggests_validation_steps():
    with pytest.raises(ConfigError, match=r"'val' never ends.*validation_steps"):
        Feeder(Batcher, pad=True).evaluations(adapt(itertools.cycle([np.zeros(2)])), "val", None)


def test_single_batches_are_padded_to_the_shape_of_the_first_of_their_kind():
    feeder = Feeder(functools.partial(Batcher, num_shards=2), pad=True)
    shapes = [len(feeder.single(next(adapt(np.zeros(rows)).open(Position())), kind).batch.mask) for rows, kind in ((4, "a"), (1, "a"), (1, "b"))]
    assert shapes == [4, 4, 2]


# -- one-shot iterators in fit --


def test_the_batch_that_fit_inspects_first_is_the_first_to_be_trained_on():
    assert numbers(make_trainer(), numbered(), steps=3) == [0, 1, 2]


def test_a_generator_used_in_two_calls_of_fit_loses_no_batch():
    trainer, generator = make_trainer(), numbered()
    assert numbers(trainer, generator, steps=2) == [0, 1]
    assert numbers(trainer, generator, epochs=2, steps_per_epoch=2) == [2, 3, 4, 5]
    assert next(generator)[0][0, 0] == 6


def test_stopping_loses_no_batch_of_a_generator():
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


def test_training_on_other_data_in_between_loses_no_batch_of_a_generator():
    trainer, generator = make_trainer(), numbered()
    stop = LambdaCallback(lambda checkpoint: trainer.stop(), every=fitflax.every(steps=2))
    assert numbers(trainer, generator, [stop], steps=9) == [0, 1]
    trainer.fit(np.zeros((2, 1)), np.zeros((2, 1)), verbose=0)
    assert numbers(trainer, generator, steps=2) == [2, 3]


def test_class_weights_of_a_second_fit_apply_although_the_generator_continues():
    def labeled() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            yield np.array([[1.0], [3.0]], np.float32), np.array([0, 1])

    trainer = fitflax.Trainer(Identity(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", lambda outputs, targets: outputs[:, 0], learning_rate=0.0)
    generator = labeled()
    assert trainer.fit(generator, steps=1, verbose=0).history["loss"] == [2.0]
    assert trainer.fit(generator, steps=1, class_weight={0: 0.0}, verbose=0).history["loss"] == [3.0]


def test_an_iterator_that_ends_early_ends_the_run_with_a_reason_and_a_warning():
    trainer = make_trainer()
    with pytest.warns(FitflaxWarning, match="The data ended before the run did, so training stops early"):
        assert numbers(trainer, numbered(3), steps=9) == [0, 1, 2]
    assert trainer.stop_reason == "data_exhausted"
    assert trainer.step == 3


def test_an_iterator_with_no_batch_is_an_error():
    with pytest.raises(DataError, match="yields no batch"):
        make_trainer().fit(iter([]), steps=1, verbose=0)


def test_an_exhausted_iterator_is_an_error():
    trainer, generator = make_trainer(), numbered(2)
    numbers(trainer, generator, epochs=1)
    with pytest.raises(DataError, match="yields no batch"):
        trainer.fit(generator, verbose=0)


def test_a_function_is_called_again_when_its_iterator_is_exhausted():
    assert numbers(make_trainer(), lambda: numbered(3), epochs=2, steps_per_epoch=4) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_one_shot_validation_set_can_be_used_only_once():
    trainer = make_trainer()
    with pytest.raises(DataError, match="'val' is an iterator that has been used up"):
        trainer.fit(lambda: numbered(2), epochs=2, validation_data=numbered(2), verbose=0)


@pytest.mark.slow
def test_a_one_shot_validation_set_continues_with_validation_steps():
    trainer = make_trainer(metrics=[seen_value])
    history = trainer.fit(lambda: numbered(2), epochs=3, validation_data=itertools.chain(numbered()), validation_steps=2, verbose=0)
    assert history.history["val_seen_value"] == [0.5, 2.5, 4.5]


def test_an_endless_validation_set_needs_validation_steps():
    with pytest.raises(ConfigError, match="validation_steps"):
        make_trainer().fit(lambda: numbered(2), validation_data=itertools.cycle(numbered(2)), verbose=0)


@pytest.mark.slow
def test_a_generator_may_reuse_one_buffer():
    # On CPU, JAX reads an aligned NumPy array in place while a step runs asynchronously, and the loop reads one batch ahead.
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


# -- endless data --


def test_endless_data_requires_a_number_of_steps():
    endless = itertools.cycle(numbered(3))
    for options in ({}, {"epochs": 2}):
        with pytest.raises(ConfigError, match=r"This data never ends\. Pass steps=, or both steps_per_epoch= and epochs="):
            make_trainer().fit(endless, verbose=0, **options)
    trainer = make_trainer()
    trainer.build(np.zeros((2, 1)))
    for method in (trainer.evaluate, trainer.predict):
        with pytest.raises(ConfigError, match="never ends"):
            method(endless)


@pytest.mark.parametrize("options", [{"steps": 4}, {"epochs": 2, "steps_per_epoch": 2}, {"steps_per_epoch": 4}, {"steps": 4, "epochs": 9}])
def test_endless_data_is_read_for_the_requested_number_of_steps(options: dict):
    assert numbers(make_trainer(), itertools.cycle(numbered(3)), **options) == [0, 1, 2, 0]


def test_endless_data_with_validation_but_without_epochs_warns_and_names_both_fixes():
    with pytest.warns(FitflaxWarning, match=r"steps_per_epoch= or validation_freq=every\(steps=...\)"):
        make_trainer().fit(itertools.cycle(numbered(3)), steps=2, validation_data=lambda: numbered(1), verbose=0)


# -- sizes --


def test_a_larger_later_batch_is_also_trained_on_with_a_warning():
    data = [next(numbered(1, rows)) for rows in (2, 5)]
    trainer = make_trainer(metrics={"one": lambda outputs, targets: outputs[:, 0] + 1})
    with pytest.warns(FitflaxWarning, match="A batch of 5 examples follows batches of 2"):
        trainer.fit(lambda: iter(data), verbose=0)
    assert trainer.step == 2
    assert trainer.history.history["one"] == [1.0]


def test_without_padding_batches_keep_their_size_and_must_be_divisible_by_the_devices(devices):
    trainer = fitflax.Trainer(Identity(), parallel=DataParallel(devices(2)))
    trainer.compile("sgd", lambda outputs, targets: outputs.shape[0] * (outputs[:, 0] * 0 + 1), learning_rate=0.0, pad=False)
    history = trainer.fit(np.zeros((6, 1)), np.zeros((6, 1)), batch_size=4, verbose=0)
    # Each replica gets 2 rows, then 1: (4 * 2 + 2 * 1) / 6.
    assert history.history["loss"][0] == pytest.approx(10 / 6)
    with pytest.raises(DataError, match=r"With compile\(pad=False\), .* a multiple of 2 \(devices: 2, accumulate_steps: 1\)\. Received: 3 examples"):
        trainer.fit(np.zeros((7, 1)), np.zeros((7, 1)), batch_size=4, shuffle=False, verbose=0)


def test_a_list_of_batches_is_passed_as_a_function():
    batches = list(numbered(3))
    assert numbers(make_trainer(), lambda: batches, epochs=2) == [0, 1, 2, 0, 1, 2]


# -- global random generators --


def draws() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def test_the_global_generators_are_restored():
    random.seed(3)
    np.random.seed(3)
    expected = draws()
    random.seed(3)
    np.random.seed(3)
    with undisturbed():
        assert draws() == expected
        draws()
    assert draws() == expected


def test_the_global_generators_are_restored_after_an_error():
    random.seed(3)
    np.random.seed(3)
    with pytest.raises(KeyError), undisturbed():
        first = draws()
        raise KeyError
    assert draws() == first


def test_pytorchs_generator_is_restored():
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    with undisturbed():
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), inside)


def test_a_partially_imported_library_is_ignored(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    with undisturbed():
        pass
