"""Names of fitflax become links to the reference: in the code of pages, in docstrings, and in signatures.

Pages are written for readers of the repository, too, so they say `trainer.fit(...)` and nothing of links. What is linked is a name that can be no other thing:
a public class, a method after `trainer.`, a function by its full name or by one with an underscore. Words such as `fit`, `loss` or `every` are linked in
docstrings alone, and only where the class has such a member.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

SUBMODULES = (
    *("adapters", "callbacks", "checkpoints", "data", "diagnostics", "errors", "integrations", "integrations.mlflow", "integrations.optuna"),
    *(
        "integrations.ray",
        "integrations.torch_layers",
        "integrations.tracker",
        "integrations.wandb",
        "losses",
        "metrics",
        "optimizers",
        "parallel",
        "parallel.processes",
        "sklearn",
    ),
)
MODULES = ("fitflax", *(f"fitflax.{name}" for name in SUBMODULES))
# What users meet and cannot import from a public module: its path here is where it is defined.
MET = ("fitflax.state.Batch", "fitflax.triggers.Trigger")

DOTTED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*")
CALL = re.compile(r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)\([^()]*(\([^()]*\)[^()]*)?\)")
# Pages whose tables have other libraries' names in the first column, and whole lines of code in the last: only the one in between is linked.
COMPARING = {"docs/coming-from", "docs/from-keras"}


@functools.cache
def public() -> dict[str, Any]:
    """Returns all public names by their paths, such as `fitflax.callbacks.ModelCheckpoint`."""
    found = {name: importlib.import_module(name) for name in MODULES}
    found |= {f"{module}.{name}": getattr(importlib.import_module(module), name) for module in MODULES for name in importlib.import_module(module).__all__}
    found |= {path: getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in MET}
    return found


@functools.cache
def by_definition() -> dict[str, str]:
    """Returns the public path of what is defined at a path."""
    return {f"{value.__module__}.{value.__qualname__}": path for path, value in public().items() if hasattr(value, "__qualname__")}


@functools.cache
def by_last_part() -> dict[str, str]:
    """Returns the public path by the last part of it, where that is of one thing alone."""
    paths: dict[str, list[str]] = {}
    for path, value in public().items():
        if not inspect.ismodule(value):
            paths.setdefault(path.rpartition(".")[2], []).append(path)
    return {name: found[0] for name, found in paths.items() if len(found) == 1}


def path_of(text: str, owner: str | None = None) -> str | None:
    """Returns the path in the reference of what a piece of code names, or `None`.

    Args:
        text: The code, such as `trainer.fit(x, y)` or `ModelCheckpoint`.
        owner: The path of the class in whose docstring it stands, if it does.
    """
    match = CALL.fullmatch(text)
    name = match["name"] if match else text
    if not DOTTED.fullmatch(name) or "__" in name:
        return None
    first, _, rest = name.partition(".")
    if owner and not rest and member(owner, name):
        return f"{owner}.{name}"
    if name in public():
        return name
    if first == "trainer":
        return f"fitflax.Trainer.{rest}" if member("fitflax.Trainer", rest) else None
    known = f"fitflax.{name}"
    if rest and known in public():
        return known
    if first in by_last_part() and (first[0].isupper() or "_" in first.strip("_") or (match and first in {"every", "at", "first", "serial"})):
        whole = by_last_part()[first]
        return whole if not rest else f"{whole}.{rest}" if member(whole, rest) else None
    if not rest and "_" in name and member("fitflax.Trainer", name) and callable(getattr(public()["fitflax.Trainer"], name)):
        return f"fitflax.Trainer.{name}"
    return None


def member(owner: str, name: str) -> bool:
    """Returns whether the reference has an entry for `name` of the class `owner`."""
    return not name.startswith("_") and inspect.isclass(public().get(owner)) and name in documented(owner)


@functools.cache
def documented(owner: str) -> set[str]:
    """Returns the members of a class that have docstrings of their own."""
    return {name for name, value in vars(public()[owner]).items() if getattr(value, "__doc__", None) and (callable(value) or isinstance(value, property))}


def link(path: str, text: str, document: str) -> pending_xref:
    """Returns code that links to the reference, if it has an entry for `path`."""
    reference = pending_xref("", refdomain="py", reftype="obj", reftarget=path, refexplicit=False, refwarn=False, refdoc=document)
    reference["py:module"] = reference["py:class"] = None
    reference += nodes.literal("", text, classes=["xref", "py", "py-obj"])
    return reference


def name_role(role: str, raw: str, text: str, line: int, inliner: Inliner, options: Any = None, content: Any = ()) -> tuple[list[nodes.Node], list[Any]]:
    """What single backticks are in docstrings: code, and a link where it is a name."""
    environment = inliner.document.settings.env
    owner = ".".join(filter(None, (environment.ref_context.get("py:module"), environment.ref_context.get("py:class"))))
    path = path_of(text, owner if inspect.isclass(public().get(owner)) else None)
    return [link(path, text, environment.docname) if path else nodes.literal("", text)], []


class LinkNames(SphinxTransform):
    """Links the names in the code of pages; those in headings, in links and on the pages of examples stay as they are."""

    default_priority = 500

    def apply(self, **options: Any) -> None:
        """Changes the document that is being read."""
        if self.env.docname in COMPARING:
            for table in self.document.findall(nodes.table):
                table["classes"].append("code-last")
        for literal in list(self.document.findall(nodes.literal)):
            path = path_of(literal.astext())
            around = list(parents(literal))
            is_left_out = self.env.docname in COMPARING and any(isinstance(parent, nodes.entry) and parent.parent.index(parent) != 1 for parent in around)
            if path and not is_left_out and not any(isinstance(parent, nodes.reference | nodes.title | pending_xref) for parent in around):
                literal.parent.replace(literal, link(path, literal.astext(), self.env.docname))


def parents(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yields what `node` stands in, from the inside."""
    while node.parent is not None:
        node = node.parent
        yield node


def find_elsewhere(app: Sphinx, environment: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> nodes.reference | None:
    """Resolves names in signatures and `Raises`, which say where a class is defined, or its last part alone."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    path = by_definition().get(target) or by_last_part().get(target.rpartition(".")[2])
    if path is None or path == target:
        return None
    domain = environment.domains.python_domain
    return domain.resolve_xref(environment, node["refdoc"], app.builder, "obj", path, node, content)


def setup(app: Sphinx) -> None:
    """Connects the functions above."""
    app.add_role("name", name_role)
    app.add_transform(LinkNames)
    app.connect("missing-reference", find_elsewhere)
