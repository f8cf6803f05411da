"""`History`: the logs of all epochs, which every run records."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase
from fitflax.callbacks.notebook import shown
from fitflax.errors import ConfigError, did_you_mean
from fitflax.logs import Logs, row_of


class History(Callback):
    """Records the logs of every epoch. `fit` returns one. It is saved in checkpoints, so a resumed run has the rows of all its epochs.

    >>> history = History()
    >>> history.on_train_begin({})
    >>> history.on_epoch_end(0, {"loss": 0.5})
    >>> history.history, history.epoch
    ({'loss': [0.5]}, [0])
    """

    phase = Phase.RECORD

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"History({self.history})"

    @property
    def history(self) -> dict[str, list[float]]:
        """`{key: values}`. Epochs that did not log a key, such as those without validation, have no value in its list."""
        keys = dict.fromkeys(key for row in self.rows for key in row["logs"])
        return {key: [row["logs"][key] for row in self.rows if key in row["logs"]] for key in keys}

    @property
    def epoch(self) -> list[int]:
        """The epoch index of each row, from 0."""
        return [row["epoch"] for row in self.rows]

    @property
    def steps(self) -> list[int]:
        """The number of finished steps at the end of each row's epoch."""
        return [row["step"] for row in self.rows]

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with a row per epoch, the index `epoch`, and the columns `step` and all keys, with NaN for missing values.

        Raises:
            ImportError: pandas is not installed.

        >>> history = History()
        >>> history.on_epoch_end(0, {"loss": 0.5})
        >>> history.to_pandas()["loss"].tolist()
        [0.5]
        """
        import pandas as pd

        table = pd.DataFrame([{"epoch": row["epoch"], "step": row["step"], **row["logs"]} for row in self.rows])
        return table.set_index("epoch") if self.rows else table

    def plot(self, keys: str | Sequence[str] | None = None) -> Any:
        """Returns a `matplotlib.figure.Figure` with a plot for each training key, which includes the values of validation sets, over epochs from 1.

        The figure is made without pyplot. A notebook shows it if it is the last value of a cell; `figure.savefig(path)` saves it.

        Args:
            keys: A key such as `"loss"`, or several; by default all keys whose values are numbers.

        Raises:
            ConfigError: A key was not logged.
            ImportError: matplotlib is not installed.

        >>> history = History()
        >>> history.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.75})
        >>> [axes.get_title() for axes in history.plot().axes]
        ['loss']
        """
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        lines = self._lines()
        wanted = list(lines) if keys is None else [keys] if isinstance(keys, str) else list(keys)
        for key in wanted:
            if key not in lines:
                raise ConfigError(f"History has no numbers named {key!r}.{did_you_mean(key, lines)} Logged keys: {list(lines)}.")
        columns = min(3, max(1, len(wanted)))
        shape = math.ceil(len(wanted) / columns) or 1, columns
        figure = Figure(figsize=(4.5 * shape[1], 3.2 * shape[0]), layout="constrained")
        for place, key in enumerate(wanted):
            axes = figure.add_subplot(*shape, place + 1)
            for name, points in lines[key].items():
                axes.plot([epoch for epoch, _ in points], [value for _, value in points], marker="." if len(points) < 20 else "", label=name)
            axes.set_title(key)
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
            if len(lines[key]) > 1:
                axes.legend()
        return shown(figure)

    def _lines(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        """Returns the lines of each plot, by its training key, such as `{"loss": {"loss": points, "val_loss": points}}`."""
        points: dict[str, list[tuple[int, float]]] = {}
        for row in self.rows:
            for key, value in row["logs"].items():
                if isinstance(value, int | float):
                    points.setdefault(key, []).append((row["epoch"] + 1, float(value)))
        lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for key in points:
            of_sets = [key.removeprefix(f"{name}_") for name in self.params.get("validation_sets") or ("val",) if key.startswith(f"{name}_")]
            owner = next((other for other in of_sets if other in points), key)
            lines.setdefault(owner, {})[key] = points[key]
        return lines

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self.rows = []

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        step = getattr(getattr(self, "trainer", None), "step", 0)
        self.rows.append({"epoch": epoch, "step": step, "logs": row_of(logs, only_recorded=True)})

    @override
    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        self.on_epoch_end(epoch, logs)
        self.rows[-1]["step"] = step

    @override
    def close(self) -> None:
        # A notebook keeps the history that a cell returns. Without this, it would also keep the trainer's state.
        vars(self).pop("trainer", None)

    @property
    @override
    def state_key(self) -> str:
        return "History"  # Also for subclasses, so that the rows always have this key in checkpoints.

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows)} if self.rows else {}  # A shallow copy is enough, because rows never change.

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = [{"epoch": int(row["epoch"]), "step": int(row["step"]), "logs": dict(row["logs"])} for row in state["rows"]]
