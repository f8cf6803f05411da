"""The tables of docs/losses-and-metrics.md name all losses and metrics, with the directions that the code declares and correct formulas."""

import pathlib
import re

import numpy as np
import pytest

from fitflax import losses, metrics

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "losses-and-metrics.md"


def rows(heading):
    """Returns the cells of the table under a heading; bars inside a cell are escaped."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in section.splitlines() if line.startswith("| `")]
    return [([name.strip("` ") for name in cells[0].split(",")], [cell.strip() for cell in cells[1:]]) for cells in table]


def test_the_table_of_losses_names_all_of_them():
    assert sorted(name for names, _ in rows("Losses") for name in names) == losses.names()


def test_the_table_of_metrics_names_all_that_are_not_losses():
    assert sorted(name for names, _ in rows("Metrics") for name in names) == sorted(set(metrics.names()) - set(losses.names()))


@pytest.mark.parametrize(("names", "cells"), rows("Metrics"), ids=lambda value: str(value)[:30])
def test_the_table_gives_the_direction_that_a_metric_declares(names, cells):
    assert {metrics.get(name).direction or "neither" for name in names} == {cells[-1]}


def log_softmax(z):
    return z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def label_score(z, t):
    return np.take_along_axis(z, t[:, None], -1)[:, 0]


def cosine(z, t):
    return (z * t).sum(-1) / np.sqrt((z**2).sum(-1) * (t**2).sum(-1))


def binary_crossentropy(z, t):
    return t * np.log1p(np.exp(-z)) + (1 - t) * np.log1p(np.exp(z))


def binary_focal(z, t):
    return ((1 - t * sigmoid(z) - (1 - t) * sigmoid(-z)) ** 2 * binary_crossentropy(z, t)).mean(-1)


def cross(z, t):
    return -(t * log_softmax(z)).sum(-1)


def multiclass_sparsemax(z, t):
    low, high = z.min(-1, keepdims=True) - 1, z.max(-1, keepdims=True)
    for _ in range(60):  # the threshold, by halving the interval
        middle = (low + high) / 2
        above = np.maximum(z - middle, 0).sum(-1, keepdims=True) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(z > low, z**2 - low**2, 0).sum(-1) / 2 + 0.5 - label_score(z, t)


def dice(p, t):
    # For one pixel: the rows here have no axis of pixels.
    return 1 - (p * t + 1) / ((p + t) / 2 + 1)


FORMULAS = {
    "mse": lambda z, t: ((z - t) ** 2).mean(-1),
    "mae": lambda z, t: abs(z - t).mean(-1),
    "mape": lambda z, t: 100 * (abs(z - t) / abs(t)).mean(-1),
    "msle": lambda z, t: ((np.log1p(np.maximum(z, 1e-7)) - np.log1p(np.maximum(t, 1e-7))) ** 2).mean(-1),
    "huber": lambda z, t: np.where(abs(z - t) <= 1, (z - t) ** 2 / 2, abs(z - t) - 0.5).mean(-1),
    "log_cosh": lambda z, t: np.log(np.cosh(z - t)).mean(-1),
    "cosine_similarity": lambda z, t: -cosine(z, t),
    "hinge": lambda z, t: np.maximum(1 - np.where(t == 0, -1, t) * z, 0).mean(-1),
    "squared_hinge": lambda z, t: (np.maximum(1 - np.where(t == 0, -1, t) * z, 0) ** 2).mean(-1),
    "categorical_hinge": lambda z, t: np.maximum(((1 - t) * z).max(-1) - (t * z).sum(-1) + 1, 0),
    "kl_divergence": lambda z, t: (t * (np.log(t) - log_softmax(z))).sum(-1),
    "poisson": lambda z, t: (np.exp(z) - t * z).mean(-1),
    "binary_crossentropy": lambda z, t: binary_crossentropy(z, t).mean(-1),
    "binary_focal_crossentropy": binary_focal,
    "categorical_crossentropy": cross,
    "categorical_focal_crossentropy": lambda z, t: -(0.25 * (1 - np.exp(log_softmax(z))) ** 2 * t * log_softmax(z)).sum(-1),
    "sparse_categorical_crossentropy": lambda z, t: -label_score(log_softmax(z), t),
    "squared_error": lambda z, t: ((z - t) ** 2).mean(-1),
    "l2_loss": lambda z, t: ((z - t) ** 2).mean(-1) / 2,
    "huber_loss": lambda z, t: FORMULAS["huber"](z, t),
    "cosine_distance": lambda z, t: 1 - cosine(z, t),
    "hinge_loss": lambda z, t: np.maximum(1 - t * z, 0).mean(-1),
    "perceptron_loss": lambda z, t: np.maximum(-t * z, 0).mean(-1),
    "sparsemax_loss": lambda z, t: np.where((s := (1 - 2 * t) * z) >= 1, s, np.where(s <= -1, 0, (s + 1) ** 2 / 4)).mean(-1),
    "multiclass_hinge_loss": lambda z, t: np.maximum(np.where(np.eye(5)[t], -np.inf, z).max(-1) + 1 - label_score(z, t), 0),
    "multiclass_perceptron_loss": lambda z, t: z.max(-1) - label_score(z, t),
    "multiclass_sparsemax_loss": multiclass_sparsemax,
    "sigmoid_binary_cross_entropy": lambda z, t: binary_crossentropy(z, t).mean(-1),
    "sigmoid_focal_loss": binary_focal,
    "softmax_cross_entropy": cross,
    "softmax_cross_entropy_with_integer_labels": lambda z, t: -label_score(log_softmax(z), t),
    "poly_loss_cross_entropy": lambda z, t: cross(z, t) + 2 * (t * (1 - np.exp(log_softmax(z)))).sum(-1),
    "ranking_softmax_loss": cross,
    "kl_divergence_with_log_targets": lambda z, t: (np.exp(t) * (t - z)).sum(-1),
    "generalized_kl_divergence": lambda z, t: (t * (np.log(t) - z) + np.exp(z) - t).sum(-1),
    "dice_loss": lambda z, t: dice(np.exp(log_softmax(z)), t).mean(-1),
    "binary_dice_loss": lambda z, t: 1 - ((sigmoid(z) * t).sum(-1) + 1) / ((sigmoid(z) + t).sum(-1) / 2 + 1),
}


def targets_that_fit(words, rng):
    """Returns targets for a cell of the table's last column."""
    labels = rng.integers(0, 5, 20)
    for word, targets in (
        ("-1 or 1 only", rng.integers(0, 2, (20, 5)) * 2.0 - 1),
        ("0 or 1", rng.integers(0, 2, (20, 5)).astype(float)),
        ("one-hot", np.eye(5)[labels]),
        ("integer labels", labels),
        ("log probabilities", np.log(rng.dirichlet(np.ones(5), 20))),
        ("probabilities", rng.dirichlet(np.ones(5), 20)),
        ("counts", rng.poisson(2.0, (20, 5)).astype(float)),
        ("≥ 0", rng.gamma(2.0, size=(20, 5))),
    ):
        if word in words:
            return targets
    return rng.normal(size=(20, 5))


@pytest.mark.parametrize(("names", "cells"), rows("Losses"), ids=lambda value: value[0])
@pytest.mark.mostly_slow
def test_a_loss_equals_the_formula_in_the_table(names, cells):
    rng = np.random.default_rng(0)
    z, t = rng.normal(size=(20, 5)) * 2, targets_that_fit(cells[-1], rng)
    for name in names:
        np.testing.assert_allclose(losses.get(name)(z, t), FORMULAS[names[0]](z, t), rtol=2e-5, atol=1e-6)
