"""What a notebook shows: output that is replaced while a cell runs, and figures without pyplot. It knows nothing of what is shown."""

import functools
import io
import re
import sys
import time
from typing import Any, TextIO

from typing_extensions import override

__all__ = ["Screen", "is_notebook", "shown"]

# A carriage return, a line's end, and the move a line up: what tqdm draws several bars with.
_MOVES = re.compile(r"(\r|\n|\x1b\[A)")


def is_notebook(stream: TextIO) -> bool:
    """Returns whether what is written to `stream` appears below a notebook's cell: it is what ipykernel puts in place of standard output.

    >>> is_notebook(io.StringIO())
    False
    """
    kernel = sys.modules.get("ipykernel.iostream")
    return kernel is not None and isinstance(stream, kernel.OutStream)


class Screen(io.TextIOBase):
    r"""A text file that is shown below a notebook's cell as a terminal would show it, in one output that is replaced.

    Standard output can only be added to, so that each drawing of a bar would be a line of its own, in the notebook's file as well.

    Args:
        seconds: How often it is replaced, at most.

    >>> screen = Screen(seconds=0.1)
    >>> screen.write("one\n 0 %\r99 %\x1b[A\rONE")
    20
    >>> screen.text
    'ONE\n99 %'
    """

    encoding = "utf-8"  # Without one, tqdm draws bars of ASCII.

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self._lines = [""]
        self._row = self._column = 0
        self._output: Any = None
        self._shown: str | None = None
        self._next = 0.0

    @property
    def text(self) -> str:
        """What is to be seen; lines that are empty at the end are left out."""
        return "\n".join(line.rstrip() for line in self._lines).rstrip("\n")

    @override
    def write(self, text: str) -> int:
        for part in _MOVES.split(text):
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
        """Shows the text, unless it was shown a moment ago. A long one is shown less often: all of it is sent each time."""
        now = time.monotonic()
        if now >= self._next and not self.closed:
            self._next = now + self.seconds * (1 + len(self._lines) / 100)
            self._show()

    @override
    def close(self) -> None:
        """Shows the text as it is at the end."""
        if not self.closed:
            self._show()
        super().close()

    def _show(self) -> None:
        text = self.text
        if text == (self._shown or ""):
            return
        self._shown, data = text, {"text/plain": text}
        if self._output is None:
            from IPython.display import display  # Whoever is in a notebook has it.

            self._output = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._output.update(data, raw=True)


def shown(figure: Any) -> Any:
    """Returns a matplotlib figure that a notebook shows as a picture, though it was made without pyplot, which alone tells notebooks how."""
    figure._repr_png_ = functools.partial(_png, figure)
    return figure


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
