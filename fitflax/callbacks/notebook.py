"""Output in notebooks: text that is updated while a cell runs, and figures without pyplot."""

import functools
import html
import io
import itertools
import math
import re
import sys
import time
from typing import Any, TextIO

from typing_extensions import override

# A carriage return, a newline, and the escape code for a line up, with which tqdm draws several bars.
_CURSOR_MOVES = re.compile(r"(\r|\n|\x1b\[A)")
_PRE = '<pre style="margin: 0; line-height: 1.3; white-space: pre-wrap; word-break: normal">'
_PRE_WIDE = '<pre style="margin: 0; line-height: 1.2; white-space: pre; width: max-content">'
# The layout of the plot: margins for labels, the size of the axes, and colors that are visible on light and dark pages.
_LEFT, _TOP, _WIDTH, _HEIGHT = 48, 18, 320, 90
_COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444")
_MAX_POINTS = 300


def is_notebook(stream: TextIO) -> bool:
    """Returns whether `stream` is a notebook's output: the object that ipykernel uses as standard output."""
    kernel = sys.modules.get("ipykernel.iostream")
    return kernel is not None and isinstance(stream, kernel.OutStream)


class Curves:
    """A small plot of losses, as SVG."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[float, float]]] = {}

    def __bool__(self) -> bool:
        return any(len(points) > 1 for points in self._points.values())

    def add(self, name: str, step: int, value: float) -> None:
        """Adds a point, or replaces the one at the same step. Ignores values that are not finite. When there are many points, every other one is dropped."""
        points = self._points.setdefault(name, [])
        if not math.isfinite(value):
            return
        if points and points[-1][0] >= step:
            points.pop()
        points.append((step, value))
        if len(points) > _MAX_POINTS:
            del points[1:-1:2]

    def svg(self) -> str:
        """Returns the plot."""
        places = [point for points in self._points.values() for point in points]
        (left, right), (low, high) = ((min(values), max(values)) for values in zip(*places, strict=True))
        width, height = (right - left) or 1.0, (high - low) or 1.0
        parts, legend = [], _LEFT
        for color, (name, points) in zip(itertools.cycle(_COLORS), self._points.items(), strict=False):
            scaled = [(_LEFT + (x - left) / width * _WIDTH, _TOP + (high - y) / height * _HEIGHT) for x, y in points]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in scaled)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
            parts.append(f'<text x="{legend}" y="11" fill="{color}">{html.escape(name)}</text>')
            legend += 8 * len(name) + 12
        bottom = _TOP + _HEIGHT
        parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{_LEFT + _WIDTH}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>')
        for x, y, anchor, text in (
            (_LEFT - 4, _TOP + 8, "end", f"{high:.3g}"),
            (_LEFT - 4, bottom, "end", f"{low:.3g}"),
            (_LEFT, bottom + 13, "start", f"{left:g}"),
            (_LEFT + _WIDTH, bottom + 13, "end", f"step {right:g}"),
        ):
            parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor">{text}</text>')
        size = f'width="{_LEFT + _WIDTH + 8}" height="{bottom + 18}"'
        return f'<svg {size} xmlns="http://www.w3.org/2000/svg" style="font: 11px sans-serif; display: block">{"".join(parts)}</svg>'


class Screen(io.TextIOBase):
    r"""A text file that a notebook displays below a cell, like a terminal, in one output that is updated.

    A notebook's standard output is append-only: each refresh of a bar would add a line to it, and to the notebook's file. `seconds` is the minimum time between
    two updates.

    >>> screen = Screen(seconds=0.1)
    >>> screen.write("one\n 0 %\r99 %\x1b[A\rONE")
    20
    >>> screen.text
    'ONE\n99 %'
    """

    encoding = "utf-8"  # Without it, tqdm draws bars in ASCII.

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self._lines = [""]
        self._row = self._column = 0
        self._output: Any = None
        self._shown: str | None = None
        self._next = 0.0
        self.curves = Curves()

    @property
    def text(self) -> str:
        """The visible text, without empty lines at the end."""
        return "\n".join(line.rstrip() for line in self._lines).rstrip("\n")

    @override
    def write(self, text: str) -> int:
        for part in _CURSOR_MOVES.split(text):
            if part == "\r":
                self._column = 0
            elif part == "\n":
                self._row, self._column = self._row + 1, 0
                if self._row == len(self._lines):
                    self._lines.append("")
            elif part == "\x1b[A":
                self._row = max(self._row - 1, 0)
            elif part:
                line, end = self._lines[self._row], self._column + len(part)
                self._lines[self._row] = line[: self._column].ljust(self._column) + part + line[end:]
                self._column = end
        return len(text)

    @override
    def flush(self) -> None:
        """Updates the output, unless it was updated a moment ago. Long texts are updated less often, because all of the text is sent each time."""
        now = time.monotonic()
        if now >= self._next and not self.closed:
            self._next = now + self.seconds * (1 + len(self._lines) / 100)
            self._show()

    @override
    def close(self) -> None:
        """Updates the output for the last time."""
        if not self.closed:
            self._show()
        super().close()

    def _show(self) -> None:
        text = self.text
        if text == (self._shown or ""):
            return
        self._shown, data = text, {"text/plain": text}
        if self.curves:
            data["text/html"] = f"{_PRE}{html.escape(text)}</pre>{self.curves.svg()}"
        if self._output is None:
            from IPython.display import display  # Always installed in a notebook.

            self._output = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._output.update(data, raw=True)


def print_table(text: str) -> None:
    """Displays a wide table in a notebook, in a box that scrolls instead of wrapping long lines."""
    from IPython.display import display

    data = {"text/plain": text, "text/html": f'<div style="overflow-x: auto">{_PRE_WIDE}{html.escape(text)}</pre></div>'}
    display(data, raw=True)  # type: ignore[no-untyped-call]


def shown(figure: Any) -> Any:
    """Makes notebooks display a matplotlib figure that was made without pyplot, and returns it."""
    figure._repr_png_ = functools.partial(_png, figure)
    return figure


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
