"""The learning-rate finder: how the loss goes while the rate grows from step to step."""

import dataclasses
import math
from typing import Any

import numpy as np

from fitflax.callbacks.notebook import shown
from fitflax.data import Feed
from fitflax.errors import DataError, FitflaxError
from fitflax.loops.session import Session
from fitflax.optimizers import set_learning_rate
from fitflax.steps.task import NOTHING

__all__ = ["LearningRateCurve", "find_learning_rate"]

# What the average that tells divergence keeps of the steps before; and how far the curve looks to both sides, as a part of all steps.
_MEMORY = 0.9
_WIDTH = 0.05
# A loss that has risen by so many times the best one, and above the first one, will not come down again.
_DIVERGED = 3.0
# The smallest loss is had shortly before training falls apart; so much less than its rate is safe.
_SAFETY = 10.0


@dataclasses.dataclass(frozen=True, eq=False)
class LearningRateCurve:
    """The loss after a step with each learning rate, from small rates to large ones.

    Attributes:
        rates: float64 `[n]`, ascending.
        losses: The loss of the next batch after the update with that rate, float64 `[n]`.
        smoothed: A line fitted to the losses around each rate, weighted by a Gaussian over the logarithm of the rate, at that rate; float64 `[n]`.
        suggestion: Where the smoothed loss falls fastest over the logarithm of the rate, but at most a tenth of the rate at which it is smallest; `None` if
            it never falls.

    >>> rates = np.geomspace(1e-4, 1, 50)
    >>> curve = LearningRateCurve.of(rates, 2 - np.tanh(100 * rates) + 10 * rates**2)
    >>> 1e-3 < curve.suggestion < 2e-2
    True
    """

    rates: np.ndarray[Any, Any]
    losses: np.ndarray[Any, Any]
    smoothed: np.ndarray[Any, Any]
    suggestion: float | None

    @classmethod
    def of(cls, rates: np.ndarray[Any, Any], losses: np.ndarray[Any, Any]) -> "LearningRateCurve":
        """Returns the curve of these losses, with its suggestion."""
        smoothed, slopes = _fitted(np.log(rates), losses)
        lowest = int(np.argmin(smoothed))
        steepest = int(np.argmin(slopes[: lowest + 1]))
        falls = lowest > 0 and slopes[steepest] < 0
        return cls(rates, losses, smoothed, float(min(rates[steepest], rates[lowest] / _SAFETY)) if falls else None)

    def plot(self) -> Any:
        """Returns a `matplotlib.figure.Figure` of the losses over the rates, with the suggestion; made without pyplot.

        Raises:
            ImportError: matplotlib is not installed.

        >>> LearningRateCurve.of(np.array([1e-3, 1e-2, 1e-1]), np.array([2.0, 1.0, 3.0])).plot().axes[0].get_xscale()
        'log'
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, color="0.75", label="loss after a step")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C1", linestyle="--", label=f"suggestion {self.suggestion:.2g}")
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        low, first = float(min(self.losses.min(), self.smoothed.min())), float(self.smoothed[0])
        margin = max(first - low, abs(first) * 0.05)
        axes.set_ylim(low - margin / 10, first + margin)  # What has diverged would press the rest flat.
        axes.grid(alpha=0.3)
        axes.legend()
        return shown(figure)


def _fitted(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns value and slope, at each point, of the line that fits those around it best (Cleveland, 1979, with Gaussian weights)."""
    places = np.arange(len(x))
    width = max(_WIDTH * len(x), 1.0)
    weights = np.exp(-0.5 * ((places[:, None] - places) / width) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    mean_x, mean_y = weights @ x, weights @ y
    from_mean = x - mean_x[:, None]
    spread = (weights * from_mean**2).sum(axis=1)
    slopes = (weights * from_mean * (y - mean_y[:, None])).sum(axis=1) / np.where(spread > 0, spread, 1.0)
    return mean_y + slopes * (x - mean_x), slopes


def find_learning_rate(session: Session, feed: Feed, *, lowest: float, highest: float, steps: int) -> LearningRateCurve:
    """Trains a session's state with rates that grow by the same factor from step to step, until the loss diverges.

    Args:
        session: What is trained; nobody else's.
        feed: The batches; they begin anew when they end.
        lowest: The first rate.
        highest: The last one.
        steps: How many rates.

    Raises:
        OptimizerError: The rate cannot be set.
        DataError: There is no batch.
    """
    program, live = session.need_compiled("find_learning_rate"), session.need_state("find_learning_rate")
    rates, losses = np.geomspace(lowest, highest, steps), []
    sums, best, average = program.empty_sums(train=True), math.inf, 0.0
    for index in range(steps + 1):
        fed = feed.next() or feed.next()
        if fed is None:
            raise DataError("The data yields no batch.")
        state = live.borrow()
        if index < steps:
            live.replace(dataclasses.replace(state, opt_state=set_learning_rate(state.opt_state, float(rates[index]))), live.step)
        trained = program.train(live.take(), sums, fed, keep=NOTHING)
        live.advance(trained.state)
        sums = trained.sums
        if index == 0:
            continue
        losses.append(trained.values.loss)
        if not math.isfinite(losses[-1]):
            losses.pop()
            break
        average = _MEMORY * average + (1 - _MEMORY) * losses[-1]
        trend = average / (1 - _MEMORY ** len(losses))
        best = min(best, trend)
        if trend > max(best + _DIVERGED * abs(best), losses[0]):
            break
    if not losses:
        raise FitflaxError(f"The loss is not finite after one step with a learning rate of {lowest:g}. trainer.hunt_nan(...) says where that begins.")
    return LearningRateCurve.of(rates[: len(losses)], np.array(losses))
