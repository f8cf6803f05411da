"""`ConfusionTable`: shows a confusion matrix as text and in notebooks."""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from fitflax.errors import MetricError

__all__ = ["ConfusionTable"]

_CELL = "padding: 2px 8px; text-align: right"


class ConfusionTable:
    """Shows a confusion matrix as a table, with a row per target and a column per prediction; notebooks shade cells by their fraction of the row.

    Args:
        matrix: `[classes, classes]`, as `ConfusionMatrix` computes it: `trainer.evaluate(...)["confusion_matrix"]`.
        labels: Names of the classes; by default their numbers.

    Raises:
        MetricError: `matrix` is not square, or `labels` has the wrong length.

    >>> ConfusionTable([[3, 1], [0, 4]], labels=["cat", "dog"])
    target / prediction  cat  dog
    cat                    3    1
    dog                    0    4
    """

    def __init__(self, matrix: Any, labels: Sequence[Any] | None = None) -> None:
        self.matrix = np.asarray(matrix)
        if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
            raise MetricError(f"ConfusionTable takes a matrix [classes, classes]. Received: an array of shape {list(self.matrix.shape)}.")
        self.labels = [str(label) for label in (range(len(self.matrix)) if labels is None else labels)]
        if len(self.labels) != len(self.matrix):
            raise MetricError(f"ConfusionTable(labels=...) takes a name for each of the {len(self.matrix)} classes. Received: {len(self.labels)} names.")

    def __repr__(self) -> str:
        rows = [["target / prediction", *self.labels], *([label, *map(_format, row)] for label, row in zip(self.labels, self.matrix, strict=True))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in rows)

    def _repr_html_(self) -> str:
        labels = [html.escape(label) for label in self.labels]
        head = "".join(f'<th style="{_CELL}">{label}</th>' for label in ["target / prediction", *labels])
        rows = []
        for label, row in zip(labels, self.matrix, strict=True):
            total = float(np.nansum(np.abs(row))) or 1.0
            cells = "".join(f'<td style="{_CELL}; background: rgba(59, 130, 246, {abs(value) / total:.2f})">{_format(value)}</td>' for value in row)
            rows.append(f'<tr><th style="{_CELL}">{label}</th>{cells}</tr>')
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _format(value: Any) -> str:
    return f"{float(value):.4g}"
