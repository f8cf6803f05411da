"""`History`: one row of logs per epoch, part of every run."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase
from fitflax.logs import Logs

__all__ = ["History"]


class History(Callback):
    """Records the logs of every epoch; `fit` returns one. Saved in checkpoints, so that a resumed run has the rows of all its epochs.

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
        """`{key: values}`; an epoch that did not log a key, as one without validation, has no value in its list."""
        keys = dict.fromkeys(key for row in self.rows for key in row["logs"])
        return {key: [row["logs"][key] for row in self.rows if key in row["logs"]] for key in keys}

    @property
    def epoch(self) -> list[int]:
        """The index of each row's epoch."""
        return [row["epoch"] for row in self.rows]

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self.rows = []

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        values = {**logs, **{key: value for key, value in getattr(logs, "earlier", {}).items() if key not in logs}}
        if isinstance(logs, Logs):
            values = {key: value for key, value in values.items() if logs.is_recorded(key)}
        self.rows.append({"epoch": epoch, "logs": values})

    @override
    def load_closing(self, step: int, epoch: int, logs: Logs) -> None:
        self.on_epoch_end(epoch, logs)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rows": [{"epoch": row["epoch"], "logs": dict(row["logs"])} for row in self.rows]} if self.rows else {}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = [{"epoch": int(row["epoch"]), "logs": dict(row["logs"])} for row in state["rows"]]
