"""Docstrings as reStructuredText: Google's sections by Napoleon, and Markdown's tables as reStructuredText has them."""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.ext.napoleon import Config, GoogleDocstring

# Modules before the names of classes, in the types of attributes.
PREFIX = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])")
# Defaults whose `repr` is no expression, or not the one that users write.
DEFAULTS = (
    (re.compile(r"<[^<>]*>|\b[A-Z]\w*\(\d+ arrays\)"), "..."),
    (re.compile(r"DenyList\(deny=('\w+')\)"), r"DenyList(\1)"),
)
NOT_MADE = {"fitflax.Checkpoint", "fitflax.Summary", "fitflax.callbacks.Phase", "fitflax.callbacks.TrainerView"}

CONFIG = Config(napoleon_use_rtype=False, napoleon_use_ivar=True)


def process(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Rewrites a docstring in place. A property's is read as a function's: Napoleon would take what stands before its first colon for a type."""
    kind = "method" if what in {"property", "attribute"} else what
    written = GoogleDocstring(list(with_tables(lines)), CONFIG, app, kind, name, found, options).lines()
    lines[:] = [PREFIX.sub("", line) if line.startswith(":vartype ") else line for line in written]


def signature(app: Sphinx, what: str, name: str, found: Any, options: Any, arguments: str | None, returned: str | None) -> tuple[str, str | None] | None:
    """Returns a signature as a user would write it; none for what users do not make."""
    if name in NOT_MADE:
        return "", None
    return (functools.reduce(lambda text, rule: rule[0].sub(rule[1], text), DEFAULTS, arguments), returned) if arguments else None


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
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", signature)
