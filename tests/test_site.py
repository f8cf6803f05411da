"""The documentation site: it builds without warnings and without a network, no link in it is broken, and each public name is on it."""

import html.parser
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse
import zlib

import pytest

from tests.test_layout import PUBLIC_MODULES

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "site"))

import docstrings  # noqa: E402
import names  # noqa: E402
import pages  # noqa: E402

# What a browser fetches by itself. The reader follows an `a`.
LOADING = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Page(html.parser.HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found.get("id") or "", found.get("name") or ""}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in LOADING and found.get(LOADING[tag]):
            self.loads.append(found[LOADING[tag]])


def is_elsewhere(target: str) -> bool:
    return bool(urllib.parse.urlparse(target).netloc)


def broken_links(site: pathlib.Path) -> list[str]:
    parsed = {path: Page(path) for path in site.rglob("*.html")}
    faults = []
    for path, page in parsed.items():
        for target in [*page.links, *page.loads]:
            parts = urllib.parse.urlparse(target)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if not there.is_file() or (there in parsed and urllib.parse.unquote(parts.fragment) not in parsed[there].anchors):
                faults.append(f"{path.relative_to(site)}: {target}")
    return sorted(set(faults))


def described(site: pathlib.Path) -> set[str]:
    """Returns the names that have entries in the reference, according to Sphinx's inventory."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(packed).decode().splitlines()
    return {line.split(" ", 1)[0] for line in lines if " py:" in line}


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_has_no_broken_links_or_missing_names(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-c", "docs/site", "-d", tmp_path / "doctrees", ".", site]
    built = subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    assert not broken_links(site)
    assert not [f"{path.name}: {target}" for path in site.rglob("*.html") for target in Page(path).loads if is_elsewhere(target)], "loaded from elsewhere"
    assert sorted(set(names.public()) - described(site)) == [], "without an entry in docs/api"
    assert (site / "index.html").is_file() and "fitflax.Trainer" in (site / "docs" / "api" / "trainer.html").read_text(encoding="utf-8")


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.html").write_text('<h1 id="top">B</h1><a href="../c.html#x">good</a><a href="#top">good</a><img src="d.png">')
    (tmp_path / "c.html").write_text(
        '<p id="x">C</p><a href="a/b.html#none">no anchor</a><a href="e.html">no page</a><a href="https://example.org/">elsewhere</a>'
    )
    assert broken_links(tmp_path) == ["a/b.html: d.png", "c.html: a/b.html#none", "c.html: e.html"]


def test_every_public_name_has_a_directive_in_the_reference():
    assert set(PUBLIC_MODULES) < set(names.MODULES)
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    directives = set(re.findall(r"^\.\. [\w:]+:: (fitflax[\w.]*)$", text, re.MULTILINE))
    others = {"fitflax.__version__", *(path for path in names.public() if path.startswith("fitflax.errors."))}  # An attribute, and members of a module.
    assert set(names.public()) - others <= directives
    assert directives <= set(names.public())


def test_code_that_names_a_public_object_is_linked_and_other_code_is_not():
    linked = {
        "trainer.fit(x, y)": "fitflax.Trainer.fit",
        "Trainer(rngs=...)": "fitflax.Trainer",
        "ModelCheckpoint": "fitflax.callbacks.ModelCheckpoint",
        "callbacks.Callback": "fitflax.callbacks.Callback",
        "CheckpointStore.best": "fitflax.checkpoints.CheckpointStore.best",
        "mean_squared_error": "fitflax.losses.mean_squared_error",
        "hunt_nan": "fitflax.Trainer.hunt_nan",
        "every(steps=10)": "fitflax.every",
        "fitflax.losses": "fitflax.losses",
    }
    assert {text: names.path_of(text) for text in linked} == linked
    for text in ("fit", "every", "learning_rate", "loss", "names", "Dense", "trainer.wrong", "x[0]", "a b", "__init__", "ModelCheckpoint.wrong"):
        assert names.path_of(text) is None
    assert names.path_of("fit", "fitflax.Trainer") == "fitflax.Trainer.fit"


def test_tables_in_docstrings_become_list_tables():
    lines = ["before", "", "| a | b |", "|---|---|", "| `c` | d |", "", "| no table"]
    table = [".. list-table::", "   :header-rows: 1", "", "   * - a", "     - b", "   * - `c`", "     - d"]
    assert list(docstrings.with_tables(lines)) == ["before", "", *table, "", "| no table"]


def test_signatures_are_shown_as_users_write_them():
    shown = {
        "(a: int = 1)": "(a: int = 1)",
        "(mutable: Any = DenyList(deny='params'))": "(mutable: Any = DenyList('params'))",
        "(total: Array = <factory>, axes: AxisNames = AxisNames(0 arrays))": "(total: Array = ..., axes: AxisNames = ...)",
    }
    assert {text: docstrings.signature(None, "class", "a.B", None, None, text, None)[0] for text in shown} == shown
    assert docstrings.signature(None, "class", "fitflax.Checkpoint", None, None, "(run)", None) == ("", None)
    assert docstrings.NOT_MADE.issubset(names.public())


def test_examples_become_pages():
    text = '"""Does it.\n\npython examples/a.py [--steps 1]\n\nAnd more.\n"""\n\nimport a\n'
    page = "# a.py\n\nDoes it.\n\n```bash\npython examples/a.py [--steps 1]\n```\n\nAnd more.\n\n```python\nimport a\n```"
    assert pages.script("a.py", text) == page
    cells = '{"cells": [{"cell_type": "markdown", "source": ["# A\\n", "b"]}, {"cell_type": "code", "source": ["x"]}]}'
    assert pages.notebook(cells) == "# A\nb\n\n```python\nx\n```"
