"""Pages of the site that are no Markdown files: examples, notebooks and plots; and `index.html`, which leads to the home page."""

import ast
import json
import pathlib
import re
from typing import Any

from sphinx.application import Sphinx

from benchmarks import plots

PLOT = re.compile(r"^<!--\s*plot:\s*(?P<name>[\w-]+)\s*-->$", re.MULTILINE)
# Makes the examples' pages part of the page that says <!-- examples -->.
EXAMPLES = "```{toctree}\n:hidden:\n:glob:\n\n../examples/*\n../examples/pretrained/*\n../examples/configuration/*\n../examples/cluster/*\n```"
FORWARD = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={page}"><title>{title}</title><a href="{page}">{title}</a>\n'


def setup(app: Sphinx) -> None:
    """Connects the functions below."""
    app.connect("source-read", read)
    app.connect("build-finished", forward)


def read(app: Sphinx, document: str, source: list[str]) -> None:
    """Makes Markdown of a file that is none, and puts the plots into one that is."""
    path = pathlib.Path(app.env.doc2path(document))
    if path.suffix == ".py":
        source[0] = script(path.name, source[0])
    elif path.suffix == ".ipynb":
        source[0] = notebook(source[0])
    else:
        source[0] = PLOT.sub(lambda match: f"```{{raw}} html\n{plots.figure(match['name'])}\n```", source[0]).replace("<!-- examples -->", EXAMPLES)


def script(name: str, text: str) -> str:
    """Returns the page of an example: what its docstring says, how to run it, and its code."""
    paragraphs = about(text)
    if len(paragraphs) > 1:  # A module that others import is not run.
        paragraphs[1] = f"```bash\n{paragraphs[1]}\n```"
    code = text.split('"""\n', 1)[1].strip("\n")
    return "\n\n".join([f"# {name}", *paragraphs, f"```python\n{code}\n```"])


def about(text: str) -> list[str]:
    """Returns the paragraphs of an example's docstring: what it is, how to run it, and what else there is to say."""
    return (ast.get_docstring(ast.parse(text)) or "").split("\n\n")


def notebook(text: str) -> str:
    """Returns a notebook's cells as Markdown; the notebooks of the repository have no outputs."""
    return "\n\n".join(map(cell, json.loads(text)["cells"]))


def cell(found: dict[str, Any]) -> str:
    """Returns one cell of a notebook as Markdown."""
    source = "".join(found["source"])
    return f"```python\n{source}\n```" if found["cell_type"] == "code" else source


def forward(app: Sphinx, error: Exception | None) -> None:
    """Writes `index.html`: the home page lies where its file lies in the repository."""
    if error is None and app.builder.format == "html":
        text = FORWARD.format(page=app.builder.get_target_uri(app.config.root_doc), title=app.config.html_title)
        (pathlib.Path(app.outdir) / "index.html").write_text(text, encoding="utf-8")
