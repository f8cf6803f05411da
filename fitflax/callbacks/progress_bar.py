"""`ProgressBar`: shows progress as a live bar in a terminal or notebook, and as plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase
from fitflax.callbacks.notebook import Screen, is_notebook
from fitflax.errors import CallbackError
from fitflax.logs import Logs, default_direction


class ProgressBar(Callback):
    r"""Shows progress with tqdm: a bar for each epoch, which stays, and one for each validation, which disappears.

    The bar shows the latest values that are available without waiting for the device. If the output is not a terminal or notebook but a file or pipe, each
    epoch is two plain lines, as in Keras. At the end of a run, a line shows how its time was spent.

    Args:
        refresh_seconds: The minimum interval between two updates of the bar; 0 updates it after each batch.
        file: The output; standard output by default.

    Raises:
        CallbackError: `refresh_seconds` is negative.

    >>> import io
    >>> bar = ProgressBar(file=io.StringIO())
    >>> bar.on_epoch_begin(0, {})
    >>> bar.on_epoch_end(0, {"loss": 0.5})
    >>> print(bar.file.getvalue(), end="")
    Epoch 1
    0/0 - 0s - 0s/step - loss: 0.5000
    """

    phase = Phase.RECORD
    main_process_only = True
    may_prefetch = True

    def __init__(self, *, refresh_seconds: float = 0.1, file: TextIO | None = None) -> None:
        if not refresh_seconds >= 0:
            raise CallbackError(f"ProgressBar(refresh_seconds=...) must be at least 0. Received: {refresh_seconds!r}.")
        self.refresh_seconds = refresh_seconds
        self.may_skip_batches = refresh_seconds > 0
        self.file = file
        self.is_plain: bool | None = None
        self._bar: Any = None
        self._test_bar: Any = None
        self._screen: Screen | None = None
        self._in_fit = False
        self._epoch = 0
        self._steps = 0
        self._first_step = 0  # The run's first step.
        self._announced: int | None = None  # The epoch whose name was printed last.
        self._epoch_begin, self._epoch_first = time.monotonic(), 0  # The time and the step in the epoch at which this run began the epoch.
        self._test_begin, self._test_batches = time.monotonic(), 0  # The time at which the evaluation began, and its finished batches.
        self._shown: Any = None
        self._next_refresh = 0.0

    @property
    def _stream(self) -> TextIO | Screen:
        # Read at each call, because pytest and notebooks replace standard output.
        return self._screen or self.file or sys.stdout

    @property
    def _is_live(self) -> bool:
        if self.is_plain is not None:
            return not self.is_plain
        return self._screen is not None or bool(getattr(self._stream, "isatty", lambda: False)())

    def _open(self) -> None:
        """Opens a new output in a notebook, one for each call of `fit`, `evaluate` or `predict`."""
        self.close()
        if not self.is_plain and is_notebook(self.file or sys.stdout):
            self._screen = Screen(seconds=self.refresh_seconds)

    def _make_bar(self, description: str, total: int | None, *, leave: bool, position: int = 0) -> Any:
        from tqdm import tqdm  # Imported here, to keep `import fitflax` fast.

        return tqdm(
            total=total,
            desc=description,
            file=self._stream,
            leave=leave,
            position=position,
            dynamic_ncols=True,
            mininterval=0,
            miniters=0,
            unit=" batch",
            bar_format="{desc}: {n_fmt}/{total_fmt} |{bar:20}| {elapsed}<{remaining} {rate_fmt}{postfix}" if total else None,
        )

    def _epoch_name(self) -> str:
        epochs = self.params.get("epochs")
        return f"Epoch {self._epoch + 1}" + (f"/{epochs}" if epochs else "")

    def _line(self, text: str) -> None:
        stream = self._stream
        stream.write(f"{text}\n")
        stream.flush()

    @staticmethod
    def _finish(bar: Any, text: str) -> str:
        """Draws a bar for the last time. If its values do not fit the terminal, returns them as text for separate lines."""
        fits = _fitting(text, _available_width(bar)) == text
        bar.set_postfix_str(text if fits else "", refresh=False)
        bar.refresh()
        return "" if fits else _lines(text, bar.format_dict["ncols"])

    # -- training --

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._in_fit, self._announced = True, None
        self._first_step = self.trainer.step
        # For a resume inside an epoch, which does not call `on_epoch_begin`.
        self._epoch_begin, self._epoch_first = time.monotonic(), int(self.params.get("first_step_in_epoch") or 0)
        self._steps = self._epoch_first
        self._open()
        if self.params.get("resumed_step") is not None:
            begin = "; nothing is left to do" if self.params.get("is_done") else f", epoch {int(self.params.get('first_epoch') or 0) + 1}"
            self._line(f"Resumed at step {self.params['resumed_step']}{begin}.")
        if self.params.get("note"):
            self._line(self.params["note"])

    @override
    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any]) -> None:
        self._epoch_begin, self._epoch_first = time.monotonic(), 0
        self._begin_epoch(epoch, 0)
        if not self._is_live:
            self._announced = epoch
            self._line(self._epoch_name())

    def _begin_epoch(self, epoch: int, steps: int) -> None:
        self._epoch, self._steps = epoch, steps
        if self._is_live:
            self._bar = self._make_bar(self._epoch_name(), self.params.get("steps"), leave=True)
            self._bar.initial = steps
            self._shown, self._next_refresh = None, 0.0

    @override
    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if self._bar is None and self._is_live:
            self._begin_epoch(int(self.params.get("first_epoch") or 0), self._epoch_first)
        self._steps = batch + 1
        if self._bar is None:
            return
        now = time.monotonic()
        if now < self._next_refresh:
            return
        self._next_refresh = now + self.refresh_seconds
        self._bar.n = self._steps
        # Usually the values of the last refresh, because those of this step are not finished on the device yet.
        ready = next((source for source in (logs.source, self._shown) if source is not None and source.is_ready), None)
        if ready is not None:
            values = ready.metrics()
            self._bar.set_postfix_str(_fitting(_text(values), _available_width(self._bar)), refresh=False)
            self._add_to_plot(values)
        self._shown = logs.source
        self._bar.refresh()

    def _add_to_plot(self, values: Mapping[str, Any]) -> None:
        if self._screen is None:
            return
        for key, value in values.items():
            if default_direction(key) == "min" and isinstance(value, int | float):
                self._screen.curves.add(key, self.trainer.step, value)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self._bar is not None:
            self._bar.n = self._steps
            if not self.params.get("steps"):
                self._bar.total = self._steps
            self._add_to_plot(logs)
            overflow = self._finish(self._bar, _text(logs))
            self._close_bars()
            if overflow:
                self._line(overflow)
        elif not self._is_live:
            self._epoch = epoch
            if self._announced != epoch:  # A resume began inside the epoch.
                self._line(self._epoch_name())
            num_steps = self._steps - self._epoch_first
            self._line(_keras_line(self._steps, self.params.get("steps") or self._steps, time.monotonic() - self._epoch_begin, num_steps, logs))

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        has_begun, self._in_fit = self._in_fit, False
        self._close_bars()
        if self.trainer.stop_reason:
            self._line(f"Stopped at step {self.trainer.step}: {self.trainer.stop_reason}.")
        steps, spent = self.trainer.step - self._first_step, self.params.get("time_spent")
        if has_begun and steps and spent is not None:
            self._line(_summary(steps, spent))
        self.close()

    # -- evaluation and prediction --

    @override
    def on_test_begin(self, logs: Mapping[str, Any]) -> None:
        self._begin_test("  validation" if self._in_fit else "Evaluation")

    def _begin_test(self, name: str) -> None:
        self._test_begin, self._test_batches = time.monotonic(), 0
        if not self._in_fit:
            self._open()
        if self._is_live:
            if self._bar is not None:
                self._bar.n = self._steps
                self._bar.refresh()
            self._test_bar = self._make_bar(name, self.params.get("test_steps"), leave=not self._in_fit, position=1 if self._in_fit else 0)
            self._next_refresh = 0.0

    @override
    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        self._advance_test(batch)

    def _advance_test(self, batch: int) -> None:
        self._test_batches = batch + 1
        if self._test_bar is None:
            return
        self._test_bar.n = batch + 1
        now = time.monotonic()
        if now >= self._next_refresh:
            self._next_refresh = now + self.refresh_seconds
            self._test_bar.refresh()

    @override
    def on_test_end(self, logs: Logs) -> None:
        if self._in_fit:
            if self._test_bar is not None:
                self._test_bar.close()
                self._test_bar = None
        elif self._test_bar is not None:
            overflow = self._finish(self._test_bar, _text(logs))
            self._close_bars()
            if overflow:
                self._line(overflow)
            self.close()
        else:
            batches, seconds = self._test_batches, time.monotonic() - self._test_begin
            self._line(_keras_line(batches, self.params.get("test_steps") or batches, seconds, batches, logs))

    @override
    def on_predict_begin(self, logs: Mapping[str, Any]) -> None:
        self._begin_test("Prediction")

    @override
    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        self._advance_test(batch)

    @override
    def on_predict_end(self, logs: Mapping[str, Any]) -> None:
        if self._test_bar is not None:
            self._test_bar.refresh()
            self.close()

    @override
    def close(self) -> None:
        self._close_bars()
        if self._screen is not None:
            self._screen.close()
            self._screen = None

    def _close_bars(self) -> None:
        for bar in (self._test_bar, self._bar):
            if bar is not None:
                bar.close()
        self._bar = self._test_bar = None


def _text(logs: Mapping[str, Any]) -> str:
    """Returns values in one line, with four significant digits and without arrays."""
    shown = {key: value for key, value in logs.items() if not getattr(value, "ndim", 0)}
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, int | float) else f"{key} {value}" for key, value in shown.items())


def _available_width(bar: Any) -> float:
    """Returns the number of characters that fit after a bar in the terminal."""
    shape = {**bar.format_dict, "postfix": ""}
    return shape["ncols"] - 1 - len(bar.format_meter(**{**shape, "ncols": None})) - len(", ") if shape["ncols"] else math.inf


def _fitting(text: str, room: float) -> str:
    """Returns as many of the first values as fit.

    >>> _fitting("loss 0.6651, accuracy 0.5819", 20)
    'loss 0.6651'
    """
    values = text.split(", ")
    while len(", ".join(values)) > room and values:
        values.pop()
    return ", ".join(values)


def _lines(text: str, width: int) -> str:
    """Returns values in indented lines, wrapped between values.

    >>> print(_lines("loss 0.6651, accuracy 0.5819, val_loss 0.6604", 32))
      loss 0.6651, accuracy 0.5819,
      val_loss 0.6604
    """
    lines: list[str] = []
    for value in text.split(", "):
        if lines and len(f"{lines[-1]}, {value},") < width:
            lines[-1] += f", {value}"
        else:
            lines.append(f"  {value}")
    return ",\n".join(lines)


def _keras_line(done: int, total: int, seconds: float, num_steps: int, logs: Mapping[str, Any]) -> str:
    """Returns an epoch's line in the form of Keras's `verbose=2`."""
    each = seconds / num_steps if num_steps else 0.0
    pace = f"{each:.0f}s" if each >= 1 or not each else f"{each * 1e3:.0f}ms" if each >= 1e-3 else f"{each * 1e6:.0f}us"
    shown = [f"{key}: {_keras_number(value)}" for key, value in logs.items() if not getattr(value, "ndim", 0)]
    return " - ".join([f"{done}/{total}", f"{seconds:.0f}s", f"{pace}/step", *shown])


def _keras_number(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.4f}" if abs(value) > 1e-3 else f"{value:.4e}"


def _summary(steps: int, spent: Any) -> str:
    """Returns a line that shows how the time of a run was spent."""
    stepping, total = spent.stepping, spent.total
    rate = spent.examples / max(stepping + spent.seconds["data"], 1e-9)
    parts = {"stepping": stepping, **spent.seconds}
    names = {"data": "waiting for data", "callbacks": "in callbacks"}
    times = ", ".join(f"{seconds:.1f} s {names.get(what, what)}" for what, seconds in parts.items() if seconds >= 0.05)
    return f"{steps} steps in {total:.1f} s{f' ({times})' if times else ''}, {rate:,.0f} examples/s while training."
