"""Computes ratios from times, and verdicts from ratios. It runs nothing.

The times of a peer in a round are those of four stretches (timed calls): base, peer, peer, base. Its ratio is the sum of its two times over the sum of the
base's two, so a machine that slows down affects both equally. Two peers are compared by their ratios to the base in the same round.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

Round = tuple[float, float, float, float]  # Seconds: base, peer, peer, base.
Times = dict[str, dict[str, list[Round]]]  # By operation (train, evaluate, predict) and peer.

TRAIN_LIMITS = {"mlp": 1.15, "cnn": 1.02, "lm": 1.02, "wide": 1.02, "many_leaves": 1.05}
TINY_MICROSECONDS = 60.0
READ_LIMIT = 1.05
SCAN_LIMITS = {"tiny": 1.2, "mlp": 1.15}
AHEAD_OF_KERAS = {"tiny": 1.25, "mlp": 1.10}
NNX_LIMIT = 1.05  # Relative to `fit` of the same network in linen.
CALLBACK_LIMITS = {"fit+tensorboard": 1.03, "fit+saving": 1.05}
TOLERANCE = 1e-5
# A GPU multiplies float32 with a mantissa of ten bits (TF32), and another program may add in another order. Training then amplifies rounding errors.
GPU_TOLERANCE = 5e-3
ROUGH_TOLERANCE = 0.2
ACCURACY_TOLERANCE = 2e-3  # An example whose two best classes have nearly equal logits may be assigned either one.


class Spread(NamedTuple):
    """The median of the rounds, and the lowest and the highest round."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


class Claim(NamedTuple):
    """A limit and the measured value. If the control of the same run is larger than the limit, it replaces the limit, except in claims of being faster."""

    what: str
    limit: float
    found: Spread | None
    control: Spread | None
    unit: str = ""

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        bound = self.limit if self.control is None else max(self.limit, self.control.median)
        return "ok" if self.found.median <= bound else "over"


def ratios(times: Times, do: str, peer: str) -> list[float]:
    return [(second + third) / (first + fourth) for first, second, third, fourth in times.get(do, {}).get(peer, [])]


def ratio(times: Times, do: str, peer: str, over: str | None = None) -> Spread | None:
    """Returns a peer's time divided by the base's time, or by that of `over`; `None` if either was not measured."""
    found = ratios(times, do, peer)
    if over is not None:
        found = [mine / other for mine, other in zip(found, ratios(times, do, over), strict=False)]
    return spread(found) if found else None


def extra_us(times: Times, peer: str, steps: int) -> Spread | None:
    """Returns the microseconds per step that a peer takes beyond the base."""
    rounds = times.get("train", {}).get(peer, [])
    return spread([(second + third - first - fourth) / 2 / steps * 1e6 for first, second, third, fourth in rounds]) if rounds else None


def microseconds(times: Times, do: str, peer: str, steps: int, *, base: bool = False) -> float | None:
    """Returns the median time per step of all stretches of a peer, or of the base's stretches in its rounds."""
    rounds = times.get(do, {}).get(peer, [])
    stretches = [seconds for first, second, third, fourth in rounds for seconds in ((first, fourth) if base else (second, third))]
    return statistics.median(stretches) / steps * 1e6 if stretches else None


def fastest(times: Times, peers: Sequence[str]) -> str:
    """Returns the fastest measured peer, or the first one if none was measured."""
    measured = {peer: found.median for peer in peers if (found := ratio(times, "train", peer)) is not None}
    return min(measured, key=lambda peer: measured[peer]) if measured else peers[0]


def claims(workload: str, times: Times, steps: int) -> list[Claim]:
    """Returns all claims about a workload, with the measured values."""
    if workload == "digits":
        control = ratio(times, "train", "fit_again")
        return [Claim(f"{peer} / fit", limit, ratio(times, "train", peer), control) for peer, limit in CALLBACK_LIMITS.items()]
    control = ratio(times, "train", "control")
    ours = ("fit", *(["fit_iterator"] if "fit_iterator" in times.get("train", {}) else []))
    if workload == "tiny":
        control_us = extra_us(times, "control", steps)
        found = [Claim(f"{peer} - jit", TINY_MICROSECONDS, extra_us(times, peer, steps), control_us, "us") for peer in ours]
    else:
        found = [Claim(f"{peer} / jit", TRAIN_LIMITS[workload], ratio(times, "train", peer), control) for peer in ours]
    for do in ("evaluate", "predict"):
        found.append(Claim(f"{do}: fit / jit", READ_LIMIT, ratio(times, do, "fit"), ratio(times, do, "control")))
    if workload == "tiny":
        found.append(Claim("fit16 / jit, 2.5 times as fast", 1 / 2.5, ratio(times, "train", "fit16"), None))
    if workload in SCAN_LIMITS:
        found.append(Claim("fit16 / scan", SCAN_LIMITS[workload], ratio(times, "train", "fit16", "scan"), control))
    if "fit_nnx" in times.get("train", {}):
        found.append(Claim("fit_nnx / fit", NNX_LIMIT, ratio(times, "train", "fit_nnx", "fit"), control))
        found += [
            Claim(f"{'' if do == 'train' else f'{do}: '}fit_nnx / nnx", 1.0, ratio(times, do, "fit_nnx", "nnx"), None)
            for do in ("train", "evaluate", "predict")
        ]
    fastest_fit, keras = fastest(times, ("fit", "fit16")), fastest(times, ("keras", "keras16"))
    ahead = AHEAD_OF_KERAS.get(workload, 1.0)
    found.append(Claim(f"{fastest_fit} / {keras}, {ahead:.2f} times as fast", 1 / ahead, ratio(times, "train", fastest_fit, keras), None))
    return found


def disagreement(values: dict[str, float], base: dict[str, float], *, exact: bool, device: str = "cpu") -> str | None:
    """Returns how a peer's values differ from the base's after the same number of steps; `None` if both did the same work.

    For peers with their own shuffling, only the loss is compared, with a wide tolerance.
    """
    near = TOLERANCE if device == "cpu" else GPU_TOLERANCE
    tolerances = {"loss": near, "outputs": near, "accuracy": max(near, ACCURACY_TOLERANCE)} if exact else {"loss": ROUGH_TOLERANCE}
    wrong = [name for name in sorted(values) if name in tolerances and not abs(values[name] - base[name]) <= tolerances[name] * (1 + abs(base[name]))]
    return ", ".join(f"{name} is {values[name]:.7g} instead of {base[name]:.7g}" for name in wrong) or None


def as_json(value: Any) -> Any:
    """Returns a claim or spread as a JSON-compatible value."""
    if isinstance(value, Claim):
        return {name: as_json(part) for name, part in value._asdict().items()} | {"verdict": value.verdict}
    return value._asdict() if isinstance(value, Spread) else value
