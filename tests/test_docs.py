"""README.md and docs/: every Python block runs, and every relative link leads somewhere."""

import dataclasses
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Iterable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# README.md whether it is there or not: a project without one fails.
RUN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = sorted({*RUN, *ROOT.glob("*.md")})

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})[ ]*(?P<language>[\w+-]*)")
NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>\S.*?)\s*-->")
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
    needs: str | None = None  # a module without which it does not run


def blocks(text: str) -> Iterator[Block]:
    """Yields the fenced blocks of a Markdown text, those inside lists without their indentation."""
    before = ""  # the last line with anything in it
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
        excuse, needs = NOT_RUN.fullmatch(before), NEEDS.fullmatch(before)
        yield Block(opening["language"], "\n".join(code) + "\n", number + 1, excuse["reason"] if excuse else None, needs["module"] if needs else None)
        before = ""


# A row of a table whose last column is a line of code.
ROW = re.compile(r"^\| (?P<there>.+?) \| (?P<here>.*?) ?\| `(?P<line>.+)` \|$", re.MULTILINE)


def run_rows(page: str, rows: Iterable[re.Match[str]], directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the rows' lines one after the other, in the namespace of the page's first block, each with a name of its own in the traceback."""
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


@pytest.mark.parametrize("path", RUN, ids=relative)
def test_python_blocks_run(path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """In order, in one namespace for each file, as a script would; what they print is captured."""
    # A real module called `__main__`, because classes look their module up (dataclasses, and so linen modules), and for `if __name__ == "__main__":`.
    script = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.chdir(tmp_path)
    for block in blocks(path.read_text(encoding="utf-8")):
        has_all = block.needs is None or importlib.util.find_spec(block.needs) is not None
        if block.language in {"python", "py"} and block.not_run is None and has_all:
            # Blank lines before the code make tracebacks name the file's own lines.
            exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), script.__dict__)


@pytest.mark.parametrize("path", LINKED, ids=relative)
def test_relative_links_lead_to_files(path: pathlib.Path):
    targets = [target.partition("#")[0] for target in links(path.read_text(encoding="utf-8")) if not re.match(r"[a-z][a-z0-9+.-]*:", target)]
    broken = [target for target in targets if target and not (path.parent / target).exists()]
    assert not broken, f"{relative(path)}: {broken}"


def test_blocks_are_found_with_their_language_line_and_excuse():
    text = "a\n```python\nx = 1\n```\n\n<!-- not run: needs a GPU -->\n\n```python\ny\n```\n- item\n  ```bash\n  make\n  ```\n````markdown\n```\n````\n"
    assert list(blocks(text)) == [
        Block("python", "x = 1\n", 3, None),
        Block("python", "y\n", 9, "needs a GPU"),
        Block("bash", "make\n", 13, None),
        Block("markdown", "```\n", 16, None),
    ]


def test_links_are_found_outside_code_only():
    text = 'See [a](docs/a.md#top) and ![b](b.png "title").\n```python\nx[0](c)\n```\n`[d](d.md)`\n\n[e]: e.md\n<img width="3" src="f.png">\n'
    assert links(text) == ["docs/a.md#top", "b.png", "e.md", "f.png"]
