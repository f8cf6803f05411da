"""The learning-rate finder: the loss while the learning rate grows from step to step."""

import dataclasses
import math
from typing import Any

import numpy as np

from fitflax.callbacks.notebook import shown
from fitflax.data import Feed
from fitflax.errors import DataError, FitflaxError
from fitflax.loops.session import Session
from fitflax.optimizers import set_learning_rate
from fitflax.steps.outputs import NOTHING

# The decay of the average loss that detects divergence; and the width of the smoothing, as a fraction of all steps.
_DECAY = 0.9
_WIDTH = 0.05
# Training has diverged if the average loss exceeds the lowest average by more than this many times its magnitude, and exceeds the first loss.
_DIVERGENCE_FACTOR = 3.0
# The loss is smallest shortly before training diverges, so the suggestion is at most that rate divided by this factor.
_SAFETY_FACTOR = 10.0


@dataclasses.dataclass(frozen=True, eq=False)
class LearningRateCurve:
    """The loss after a step with each learning rate, from small to large ones.

    Attributes:
        rates: float64 `[n]`, ascending.
        losses: The loss of the next batch after the update with that rate, float64 `[n]`.
        smoothed: At each rate, the value of a line fitted to the losses over the logarithm of the rate, with Gaussian weights; float64 `[n]`.
        suggestion: The rate at which the smoothed loss falls fastest over the logarithm of the rate, but at most a tenth of the rate at which it is smallest;
            `None` if it never falls.

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
        smoothed, slopes = _fit_locally(np.log(rates), losses)
        lowest = int(np.argmin(smoothed))
        steepest = int(np.argmin(slopes[: lowest + 1]))
        falls = lowest > 0 and slopes[steepest] < 0
        return cls(rates, losses, smoothed, float(min(rates[steepest], rates[lowest] / _SAFETY_FACTOR)) if falls else None)

    def plot(self) -> Any:
        """Returns a `matplotlib.figure.Figure` of losses over rates, with the suggestion; it does not use pyplot.

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
        axes.set_ylim(low - margin / 10, first + margin)  # Diverged losses would flatten the rest of the plot.
        axes.grid(alpha=0.3)
        axes.legend()
        return shown(figure)


def _fit_locally(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns value and slope, at each point, of a line fitted to its neighbors (Cleveland, 1979, with Gaussian weights)."""
    indices = np.arange(len(x))
    width = max(_WIDTH * len(x), 1.0)
    weights = np.exp(-0.5 * ((indices[:, None] - indices) / width) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    mean_x, mean_y = weights @ x, weights @ y
    from_mean = x - mean_x[:, None]
    spread = (weights * from_mean**2).sum(axis=1)
    slopes = (weights * from_mean * (y - mean_y[:, None])).sum(axis=1) / np.where(spread > 0, spread, 1.0)
    return mean_y + slopes * (x - mean_x), slopes


def find_learning_rate(session: Session, feed: Feed, *, lowest: float, highest: float, steps: int) -> LearningRateCurve:
    """Trains a session's state, used only here, with `steps` rates that grow by a constant factor from `lowest` to `highest`, until the loss diverges."""
    program, live = session.task.need_compiled("find_learning_rate"), session.state.need("find_learning_rate")
    rates, losses = np.geomspace(lowest, highest, steps), list[float]()
    used = list[float]()
    sums, best, average = program.empty_sums(train=True), math.inf, 0.0
    for index in range(steps + 1):
        fed = feed.next() or feed.next()
        if fed is None:
            raise DataError("The data yields no batches. Check that it is not empty.")
        state = live.borrow()
        if index < steps:
            live.replace(dataclasses.replace(state, opt_state=set_learning_rate(state.opt_state, float(rates[index]))), live.step)
        trained = program.train(live.take(), sums, fed, keep=NOTHING)
        live.advance(trained.state)
        sums = trained.sums
        if index == 0:
            continue
        loss = trained.values.loss
        if not math.isfinite(loss):
            if trained.values.has_no_weight:
                continue
            break
        losses.append(loss)
        used.append(rates[index - 1])
        average = _DECAY * average + (1 - _DECAY) * losses[-1]
        trend = average / (1 - _DECAY ** len(losses))
        best = min(best, trend)
        if trend > max(best + _DIVERGENCE_FACTOR * abs(best), losses[0]):
            break
    if not losses:
        raise FitflaxError(f"The loss is not finite after one step with a learning rate of {lowest:g}. Call trainer.hunt_nan(...) to find the cause.")
    return LearningRateCurve.of(np.array(used), np.array(losses))
