"""README.md and docs/: every Python block runs, and every relative link has a target."""

import dataclasses
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Iterable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# README.md even if it is missing, so that a project without one fails.
RUN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = sorted({*RUN, *ROOT.glob("*.md")})

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})[ ]*(?P<language>[\w+-]*)")
NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>\S.*?)\s*-->")
FILE = re.compile(r"<!--\s*file:\s*(?P<name>\w+\.py)\s*-->")
NEEDS = re.compile(r"<!--\s*needs:\s*(?P<module>\w+)\s*-->")
LINK = re.compile(r"\]\(\s*<?(?P<target>[^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(?P<target>[^\s>]+)>?", re.MULTILINE)
HTML_LINK = re.compile(r"<(?:a|img)\b[^>]*?(?:href|src)=\"(?P<target>[^\"]+)\"")


@dataclasses.dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int  # of the first line of code, from 1
    not_run: str | None  # why, or None
    needs: str | None = None  # a module that it needs to run
    file: str | None = None  # the module that holds the code, which later blocks import


def blocks(text: str) -> Iterator[Block]:
    """Yields the fenced blocks of a Markdown text, those inside lists without their indentation."""
    before = ""  # the last line that is not blank
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        opening = FENCE.match(line)
        if opening is None:
            before = line.strip() or before
            continue
        code = []
        for _, inner in lines:
            closing = FENCE.match(inner)
            if closing is not None and closing["fence"].startswith(opening["fence"]) and not closing["language"]:
                break
            code.append(inner.removeprefix(opening["indent"]))
        else:
            raise ValueError(f"line {number}: a block that is never closed")
        excuse, needs, file = NOT_RUN.fullmatch(before), NEEDS.fullmatch(before), FILE.fullmatch(before)
        yield Block(
            opening["language"],
            "\n".join(code) + "\n",
            number + 1,
            excuse["reason"] if excuse else None,
            needs["module"] if needs else None,
            file["name"] if file else None,
        )
        before = ""


# A row of a table whose last column is a line of code.
ROW = re.compile(r"^\| (?P<there>.+?) \| (?P<here>.*?) ?\| `(?P<line>.+)` \|$", re.MULTILINE)


def run_rows(page: str, rows: Iterable[re.Match[str]], directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the rows' lines in order, in the namespace of the page's first block; each has its own name in tracebacks."""
    script = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.chdir(directory)
    exec(compile(next(blocks(page)).code, "setup", "exec"), script.__dict__)
    for row in rows:
        exec(compile(row["line"].replace(r"\|", "|"), row["there"], "exec"), script.__dict__)


def links(text: str) -> list[str]:
    """Returns the targets of all links and images outside code."""
    for block in blocks(text):
        text = text.replace(block.code, "\n") if block.code.strip() else text
    text = re.sub(r"`[^`\n]+`", "", text)
    return [match["target"] for pattern in (LINK, REFERENCE, HTML_LINK) for match in pattern.finditer(text)]


def relative(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


# The pages that newcomers read first run in every test run.
QUICK = {"README.md", "docs/checkpoints.md"}


@pytest.mark.parametrize("path", [path if relative(path) in QUICK else pytest.param(path, marks=pytest.mark.slow) for path in RUN], ids=relative)
def test_python_blocks_run(path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """They run in order, in one namespace for each file, as a script would; what they print is captured."""
    # A real module named `__main__`, because classes look up their module (dataclasses, and so linen modules), and for `if __name__ == "__main__":`.
    script = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for block in blocks(path.read_text(encoding="utf-8")):
        has_all = block.needs is None or importlib.util.find_spec(block.needs) is not None
        if block.file is not None:
            monkeypatch.setitem(sys.modules, pathlib.Path(block.file).stem, None)  # Removed again after the test.
            del sys.modules[pathlib.Path(block.file).stem]
            (tmp_path / block.file).write_text(block.code, encoding="utf-8")
        elif block.language in {"python", "py"} and block.not_run is None and has_all:
            # Blank lines before the code make the line numbers in tracebacks those of the file.
            exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), script.__dict__)


@pytest.mark.parametrize("path", LINKED, ids=relative)
def test_relative_links_lead_to_files(path: pathlib.Path):
    targets = [target.partition("#")[0] for target in links(path.read_text(encoding="utf-8")) if not re.match(r"[a-z][a-z0-9+.-]*:", target)]
    broken = [target for target in targets if target and not (path.parent / target).exists()]
    assert not broken, f"{relative(path)}: {broken}"


def test_blocks_are_found_with_their_language_line_and_excuse():
    text = "a\n```python\nx = 1\n```\n\n<!-- not run: needs a GPU -->\n\n```python\ny\n```\n- item\n  ```bash\n  make\n  ```\n````markdown\n```\n````\n"
    text += "<!-- file: a.py -->\n```python\nz\n```\n"
    assert list(blocks(text)) == [
        Block("python", "x = 1\n", 3, None),
        Block("python", "y\n", 9, "needs a GPU"),
        Block("bash", "make\n", 13, None),
        Block("markdown", "```\n", 16, None),
        Block("python", "z\n", 20, None, file="a.py"),
    ]


def test_links_are_found_only_outside_code():
    text = 'See [a](docs/a.md#top) and ![b](b.png "title").\n```python\nx[0](c)\n```\n`[d](d.md)`\n\n[e]: e.md\n<img width="3" src="f.png">\n'
    assert links(text) == ["docs/a.md#top", "b.png", "e.md", "f.png"]
