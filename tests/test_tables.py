"""The tables of docs/losses_and_metrics.md name all losses and metrics, with the direction that the code declares, and formulas that hold."""

import pathlib
import re

import numpy as np
import pytest

from fitflax import losses, metrics

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "losses_and_metrics.md"


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
    assert {metrics.get(name).direction for name in names} == {cells[-1]}


def log_softmax(z):
    return z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))


FORMULAS = {
    "mse": lambda z, t: ((z - t) ** 2).mean(-1),
    "mae": lambda z, t: abs(z - t).mean(-1),
    "huber": lambda z, t: np.where(abs(z - t) <= 1, (z - t) ** 2 / 2, abs(z - t) - 0.5).mean(-1),
    "binary_crossentropy": lambda z, t: (t * np.log1p(np.exp(-z)) + (1 - t) * np.log1p(np.exp(z))).mean(-1),
    "categorical_crossentropy": lambda z, t: -(t * log_softmax(z)).sum(-1),
    "sparse_categorical_crossentropy": lambda z, t: -np.take_along_axis(log_softmax(z), t[:, None], -1)[:, 0],
}


@pytest.mark.parametrize("names", [names for names, _ in rows("Losses")], ids=lambda names: names[0])
def test_a_loss_is_the_formula_of_the_table(names):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(20, 5)) * 2
    targets = {
        "categorical_crossentropy": np.eye(5)[rng.integers(0, 5, 20)],
        "sparse_categorical_crossentropy": rng.integers(0, 5, 20),
        "binary_crossentropy": rng.integers(0, 2, (20, 5)).astype(float),
    }
    t = targets.get(names[0], rng.normal(size=(20, 5)))
    for name in names:
        np.testing.assert_allclose(losses.get(name)(z, t), FORMULAS[names[0]](z, t), rtol=2e-5, atol=1e-6)
