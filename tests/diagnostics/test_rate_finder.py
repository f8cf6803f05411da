"""`Trainer.find_learning_rate`: what it suggests, and that the trainer does not change."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax import optimizers
from fitflax.diagnostics import LearningRateCurve
from fitflax.errors import ConfigError, DataError, FitflaxError, FitflaxWarning, NotReadyError, OptimizerError
from fitflax.parallel import DataParallel
from tests.run_script import differences, leaves_of

ONE = DataParallel(jax.devices()[:1])


class Quadratic(nn.Module):
    """On examples `sqrt(curvature)`, the mean loss is `sum(curvature * w**2) / 2`: gradient descent is stable below `2 / max(curvature)`."""

    size: int

    @nn.compact
    def __call__(self, x):
        return x * self.param("w", nn.initializers.ones, (self.size,))


def quadratic(curvature):
    trainer = fitflax.Trainer(Quadratic(len(curvature)), parallel=ONE)
    trainer.compile("sgd", lambda outputs, targets: 0.5 * (outputs**2).sum(axis=-1))
    x = np.tile(np.sqrt(np.asarray(curvature, np.float32)), (64, 1))
    return trainer, (x, np.zeros((64, 1), np.float32))


@pytest.mark.parametrize("curvature", [[1.0], [100.0], [0.01], [100.0, 1.0], [1000.0, 1.0, 1.0, 1.0]])
@pytest.mark.mostly_slow
def test_on_a_quadratic_it_suggests_a_stable_rate_and_repeats_are_bit_for_bit_identical(curvature):
    trainer, data = quadratic(curvature)
    curves = [trainer.find_learning_rate(*data, lowest=1e-7, highest=1e3) for _ in range(3)]
    limit = 2 / max(curvature)
    assert limit / 100 < curves[0].suggestion < limit
    for curve in curves[1:]:
        assert curve.suggestion == curves[0].suggestion
        assert curve.losses.tobytes() == curves[0].losses.tobytes() and curve.smoothed.tobytes() == curves[0].smoothed.tobytes()
    # It ends where the loss diverges, or at the highest rate.
    assert np.all(np.diff(curves[0].rates) > 0) and np.isfinite(curves[0].losses).all()
    assert len(curves[0].rates) == len(curves[0].losses) == len(curves[0].smoothed) <= 100


def test_a_run_with_the_suggested_rate_learns():
    trainer, (x, y) = quadratic([30.0, 3.0])
    suggestion = trainer.find_learning_rate(x, y).suggestion
    trainer.build((x, y))
    trainer.learning_rate = suggestion
    losses = trainer.fit(x, y, epochs=30, verbose=0).history["loss"]
    assert losses[-1] < 0.2 * losses[0] and sorted(losses, reverse=True) == losses


def test_the_losses_are_measured_after_a_step_with_each_rate():
    trainer, (x, y) = quadratic([1.0])
    curve = trainer.find_learning_rate(x, y, lowest=0.1, highest=0.4, steps=3)
    weight, losses = 1.0, []
    for rate in (0.1, 0.2, 0.4):
        weight *= 1 - rate
        losses.append(0.5 * weight**2)
    np.testing.assert_allclose(curve.rates, [0.1, 0.2, 0.4])
    np.testing.assert_allclose(curve.losses, losses, rtol=1e-6)


def network(optimizer="adam", **options):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            h = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(h))

    trainer = fitflax.Trainer(Net(), parallel=ONE)
    trainer.compile(optimizer, "sparse_categorical_crossentropy", ["accuracy"], **options)
    return trainer


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 4)).astype(np.float32), RNG.integers(0, 3, 40).astype(np.int32)


@pytest.mark.slow
def test_the_trainer_does_not_change():
    trainer, control = network(learning_rate=0.01), network(learning_rate=0.01)
    for each in (trainer, control):
        each.fit(X, Y, batch_size=8, steps=3, verbose=0)
    np.random.seed(7)
    drawn, _ = np.random.rand(), np.random.seed(7)
    trainer.find_learning_rate(X, Y, batch_size=8, steps=12)
    assert np.random.rand() == drawn
    assert trainer.step == 3 and trainer.learning_rate == pytest.approx(0.01)
    for each in (trainer, control):
        each.fit(X, Y, batch_size=8, steps=3, verbose=0)
    assert differences(leaves_of(trainer.state), leaves_of(control.state)) == []


@pytest.mark.slow
def test_a_trainer_without_a_state_has_none_afterwards_and_trains_as_usual():
    trainer, control = network(), network()
    trainer.find_learning_rate(X, Y, batch_size=8, steps=5)
    with pytest.raises(NotReadyError):
        trainer.state  # noqa: B018 (reading it is what fails)
    for each in (trainer, control):
        each.fit(X, Y, batch_size=8, verbose=0)
    assert differences(leaves_of(trainer.state), leaves_of(control.state)) == []


@pytest.mark.slow
def test_data_that_ends_starts_again():
    assert len(network().find_learning_rate(lambda: [(X[:8], Y[:8])], steps=7, highest=1e-3).rates) == 7


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx), lambda tx: optimizers.freeze(tx, "Dense_0")])
def test_the_rate_is_found_wherever_it_is_nested(wrap):
    assert len(network(wrap(optimizers.get("sgd"))).find_learning_rate(X, Y, steps=4).rates) == 4


def test_a_loss_that_never_falls_has_no_suggestion():
    rates = np.geomspace(1e-6, 1, 50)
    assert LearningRateCurve.of(rates, 1 + rates).suggestion is None


def test_noise_before_the_loss_falls_is_not_mistaken_for_the_fall():
    rates = np.geomspace(1e-7, 10, 100)
    clean = 2.3 - 1.5 / (1 + (3e-3 / rates) ** 2) + np.minimum(rates, 1) ** 2 * 5
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 0.1, 100)
        assert 2e-4 < LearningRateCurve.of(rates, clean + noise).suggestion < 2e-2


def test_the_plot_has_the_curve_and_the_suggestion():
    rates = np.geomspace(1e-4, 1, 50)
    curve = LearningRateCurve.of(rates, 2 - np.tanh(100 * rates) + 10 * rates**2)
    axes = curve.plot().axes[0]
    assert [line.get_label() for line in axes.lines] == ["loss after a step", "smoothed", f"suggestion {curve.suggestion:.2g}"]
    assert axes.get_ylim()[1] < 4  # The diverged part does not flatten the rest.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lowest": 0}, ConfigError, "requires 0 < lowest < highest, both finite"),
        ({"lowest": 1.0, "highest": 0.1}, ConfigError, "requires 0 < lowest < highest"),
        ({"highest": float("nan")}, ConfigError, "requires 0 < lowest < highest"),
        ({"steps": 0}, ConfigError, "steps"),
    ],
)
def test_bad_arguments_are_errors(options, error, message):
    with pytest.raises(error, match=message):
        network().find_learning_rate(X, Y, **options)


@pytest.mark.slow
def test_each_unsupported_use_is_one_clear_error():
    with pytest.raises(NotReadyError, match="find_learning_rate requires a compiled trainer"):
        fitflax.Trainer(nn.Dense(3)).find_learning_rate(X, Y)
    with pytest.raises(OptimizerError, match="The learning rate cannot be set, because it is a constant in this optimizer"):
        network(optax.adam(1e-3)).find_learning_rate(X, Y)
    with pytest.raises(OptimizerError, match="a schedule computes it"):
        network(learning_rate=optax.constant_schedule(0.1)).find_learning_rate(X, Y)
    with pytest.raises(ConfigError, match="cannot take an iterator, because it would consume your data"):
        network().find_learning_rate(iter([(X, Y)]))
    with pytest.raises(DataError, match="yields no batch"):
        network().find_learning_rate(list)
    with (
        pytest.raises(FitflaxError, match=r"not finite after one step with a learning rate of 1e-07\. Call trainer\.hunt_nan"),
        pytest.warns(FitflaxWarning, match="has NaN or infinity"),
    ):
        network().find_learning_rate(np.where(X > 0, np.inf, X), Y)


def test_a_loss_that_returns_one_number_works_with_full_batches():
    trainer = fitflax.Trainer(nn.Dense(1), parallel=ONE)
    trainer.compile("sgd", lambda outputs, targets: ((outputs[:, 0] - targets) ** 2).mean())
    assert len(trainer.find_learning_rate(X, Y.astype(np.float32), batch_size=16, steps=5, highest=1e-3, drop_remainder=True).rates) == 5


def test_if_the_loss_falls_until_it_diverges_the_suggestion_is_well_below_that_rate():
    rates = np.geomspace(1e-4, 1, 100)
    curve = LearningRateCurve.of(rates, np.where(rates < 0.1, 1 - 3 * rates, 100 * rates))
    assert curve.suggestion == pytest.approx(rates[np.argmin(curve.smoothed)] / 10)


def test_the_state_of_a_global_generator_that_the_data_uses_is_restored():
    def batches():
        for _ in range(3):
            rows = np.random.permutation(40)[:8]
            yield X[rows], Y[rows]

    np.random.seed(7)
    drawn, _ = np.random.rand(), np.random.seed(7)
    network().find_learning_rate(batches, steps=4, highest=1e-3)
    assert np.random.rand() == drawn


def test_data_without_a_batch_is_an_error_before_anything_changes():
    trainer, data = quadratic([1.0, 2.0])
    trainer.build(data)
    before = jax.device_get(trainer.state.params)
    with pytest.raises(DataError, match="yields no batch"):
        trainer.find_learning_rate(lambda: iter([]), steps=3)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(trainer.state.params)))
