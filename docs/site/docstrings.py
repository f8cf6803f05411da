"""Docstrings as reStructuredText: Google's sections by Napoleon, and Markdown's tables as reStructuredText has them."""

from collections.abc import Iterator, Sequence
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

CONFIG = Config(napoleon_use_rtype=False, napoleon_use_ivar=True)


def process(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Rewrites a docstring in place. A property's is read as a function's: Napoleon would take what stands before its first colon for a type."""
    kind = "method" if what in {"property", "attribute"} else what
    lines[:] = GoogleDocstring(list(with_tables(lines)), CONFIG, app, kind, name, found, options).lines()


def with_tables(lines: Sequence[str]) -> Iterator[str]:
    """Yields `lines` with each table of Markdown as a `list-table`."""
    rest = list(lines)
    while rest:
        if not (rest[0].startswith("| ") and rest[1:] and rest[1].startswith("|--")):
            yield rest.pop(0)
            continue
        yield from (".. list-table::", "   :header-rows: 1", "")
        while rest and rest[0].startswith("|"):
            line = rest.pop(0)
            if not line.startswith("|--"):
                yield from (f"   {'  ' if number else '* '}- {cell.strip()}" for number, cell in enumerate(line.strip("|").split("|")))


def setup(app: Sphinx) -> None:
    """Connects the functions above."""
    app.connect("autodoc-process-docstring", process)
