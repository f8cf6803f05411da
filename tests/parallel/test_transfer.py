"""Batches and outputs of several steps in one call, and how many steps are in flight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.data.batch import full_mask
from fitflax.leaves import aligned_memory, is_aligned
from fitflax.parallel import DataParallel, Sharded
from fitflax.parallel.transfer import MAX_SHORT_STEPS, InFlight
from fitflax.state import Batch


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("kind", ["views", "arrays", "jax"])
def test_batches_fed_together_are_the_same_batches_one_after_another(number, kind, devices):
    strategy = DataParallel(devices(number))
    whole = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4 * 6, 2)
    make = {"views": lambda x: x, "arrays": np.copy, "jax": jnp.asarray}[kind]
    batches = [Batch(make(whole[6 * step : 6 * step + 6]), (), full_mask(6)) for step in range(4)]
    for count, is_whole in ((3, False), (4, False), (3, kind == "views"), (4, kind == "views")):
        fed = strategy.feed_group(batches[:count], 4, (whole[: 6 * count], (), None) if is_whole else None)
        x, mask = (np.asarray(leaf) if number == 1 else np.moveaxis(np.asarray(leaf), 1, 0) for leaf in (fed.x, fed.mask))
        np.testing.assert_array_equal(x[:count].reshape(-1, 2), whole[: 6 * count])
        assert mask.shape[0] == x.shape[0] == 4 and mask.all()
    short = batches[1]._replace(mask=np.arange(6) < 4)
    mask = np.asarray(strategy.feed_group([batches[0], short], 2).mask)
    assert (mask if number == 1 else np.moveaxis(mask, 1, 0)).reshape(2, 6).sum(axis=1).tolist() == [6, 4]


@pytest.mark.parametrize(("rows", "offset", "is_copied"), [(6, 0, False), (6, 16, False), (6000, 0, False), (6000, 16, True)])
def test_batches_in_one_piece_are_copied_only_if_they_are_large_and_a_cpu_would_copy_them(rows, offset, is_copied, devices):
    whole = aligned_memory(32 * rows, offset=offset).view(np.float32).reshape(4 * rows, 2)
    whole[...] = np.arange(8 * rows).reshape(4 * rows, 2)
    batches = [Batch(whole[rows * step : rows * step + rows], (), full_mask(rows)) for step in range(4)]
    strategy = DataParallel(devices(1))
    x = strategy.feed_group(batches, 4, (whole, (), None)).x
    assert np.shares_memory(x, whole) is not is_copied and (offset == 16) == (not is_aligned(whole))
    assert is_aligned(x) or rows == 6
    np.testing.assert_array_equal(x, whole.reshape(4, rows, 2))
    stacked = strategy.feed_group(batches, 4).x
    assert is_aligned(stacked) and not np.shares_memory(stacked, whole)


def test_several_devices_get_views_because_they_copy_their_parts(devices):
    whole = aligned_memory(2**18, offset=16).view(np.float32).reshape(1024, 64)
    batches = [Batch(whole[256 * step : 256 * step + 256], (), full_mask(256)) for step in range(4)]
    strategy = Sharded({"data": 2}, devices=devices(2))
    assert np.shares_memory(strategy.feed_group(batches, 4, (whole, (), None)).x, whole)


@pytest.mark.parametrize("aligned", [True, False])
def test_a_cpu_uses_aligned_batches_without_another_copy(aligned, devices):
    whole = aligned_memory(2**18, offset=0 if aligned else 16).view(np.float32).reshape(1024, 64)
    whole[...] = 1.0
    placed = jax.device_put(whole, devices(1)[0])
    assert (placed.unsafe_buffer_pointer() == whole.ctypes.data) is aligned


@pytest.mark.parametrize("number", [1, 2])
def test_outputs_of_several_steps_are_joined_in_the_order_of_their_batches(number, devices):
    strategy = DataParallel(devices(number))
    outputs = np.arange(3 * 4).reshape(3, 4)  # Steps, rows.
    split = outputs if number == 1 else np.moveaxis(outputs.reshape(3, number, 2), 1, 0)
    assert strategy.join(split, steps=2).tolist() == [*range(8)]


def test_more_steps_are_in_flight_if_they_are_short():
    now, waited = [0.0], list[int]()

    class Step:
        def __init__(self, number: int, seconds: float) -> None:
            self.number, self.seconds = number, seconds

        def wait(self) -> None:
            waited.append(self.number)
            now[0] += self.seconds

    def dispatch(numbers: range, seconds: float, kind: str) -> None:
        for number in numbers:
            steps.make_room(kind)
            steps.add(Step(number, seconds), num_bytes=1)

    steps = InFlight(8, 32, clock=lambda: now[0])
    dispatch(range(100), 0.0, "short")
    assert waited == [3, 11, 27, 43, 59, 75]  # 4 of 8, 8 of 16, then 16 of 32.
    waited.clear()
    dispatch(range(100, 130), 1.0, "long")
    assert waited == list(range(92, 130, 4))[: len(waited)] and len(waited) > 7  # Another kind starts with 8 in flight, and stays there.
    alone = InFlight(2, clock=lambda: now[0])
    for number in range(5):
        alone.make_room("short")
        alone.add(Step(number, 0.0), num_bytes=1)
    assert len(alone._pending) <= 2


def test_steps_that_failed_are_forgotten_after_the_next_wait():
    class Step:
        def __init__(self, *, fails: bool) -> None:
            self.fails = fails

        def wait(self) -> None:
            if self.fails:
                raise RuntimeError("failed")

    steps, found = InFlight(2), []
    for number in range(20):
        found.append(steps.make_room())
        steps.add(Step(fails=number < 2), num_bytes=1)
    assert found == [True, True, False] + [True] * 17 and len(steps._pending) <= 2


def test_a_step_that_fails_on_the_devices_ends_its_own_run_and_no_other(devices, monkeypatch):
    class Failed:
        def wait(self) -> None:
            raise RuntimeError("failed")

    def fail(results):
        raise RuntimeError("in this run")

    def fit() -> None:
        for _ in range(MAX_SHORT_STEPS):
            strategy.in_flight.add(Failed(), num_bytes=1)
        trainer.fit(x, x, batch_size=2, verbose=0)

    strategy, x = DataParallel(devices(1)), np.ones((32, 2), np.float32)
    trainer = fitflax.Trainer(nn.Dense(2), parallel=strategy)
    trainer.compile("sgd", "mse")
    fit()
    assert trainer.step == 16
    monkeypatch.setattr(jax, "block_until_ready", fail)  # As if a result of an earlier step of the run had failed.
    with pytest.raises(RuntimeError, match="in this run"):
        fit()
