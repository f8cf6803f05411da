"""The words of documentation and code: one term for each concept, in plain American English. CONTRIBUTING.md has the glossary."""

import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.test_docs import FENCE, ROOT, relative

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = [
    ROOT / "examples",
    ROOT / "benchmarks",
    *(path for path in sorted((ROOT / "fitflax").iterdir()) if path.suffix == ".py" or path.joinpath("__init__.py").is_file()),
]

OUTPUT = {"", "text", "console"}  # Languages of blocks that show what a program prints.

# A regular expression -> what to write instead. It matches whole words in any case, and a space in it matches the end of a line, too.
PHRASES = {
    # One term for each concept.
    r"(?:break(?:s|ing)?|broken?) off": "interrupt, interrupted",
    r"of (?:one's|your|users') own|one's own": "custom",
    r"by hand": "hand-written, or: yourself",
    r"the same bits": "bit-for-bit identical",
    r"to the bit": "bit for bit",
    r"as if nothing had happened": "bit for bit",
    r"(?:go|goes|going|gone|went) on(?= with\b| where\b| from\b| inside\b|[.;:)]|,)": "resume, or: continue",
    r"start(?:s|ed)? again,? (?:and )?(?:it|they|he)": "resume",
    r"(?:makes?|made|making) (?:(?:a|many|some|\d+) )?(?:million |thousand )?steps": "run steps",
    r"(?:leaves?|exits?|stops?|ends?|fails?|raises?|dies|quits?) at once": "immediately",
    r"counts? nowhere": "have weight zero",
    r"loads? back": "restore",
    r"trainings": "runs",
    r"pass(?:es|ed|ing)? over (?=it\b|them\b|anew\b|again\b|once\b|twice\b|each\b)": "iterate over",
    # Words that say something else in English.
    r"put(?:s|ting)? right": "fix",
    r"what becomes of": "what happens to",
    r"(?:to be|can be|could be) had": "available",
    r"anew": "again",
    r"for ever": "forever",
    r"till": "until",
    r"r[au]n dry": "exhausted",
    r"ends? (?:the run )?in order": "end normally",
    r"(?:is|are|was|were) no (?:errors?|means?|rows?|Markdown)": "is not a ...",
    r"stands? (?:in (?=the (?:table|list|docs|documentation|order)|their|its)|beside|below)": "be in, be next to",
    r"lies? beside": "be next to",
    r"looks? whether": "check whether",
    r"where there (?:are any|are none|is none|is one)": "if there are any",
    r"for who (?=knows|has|is)": "for someone who",
    r"giv(?:es|en|ing) back": "return",
    r"let(?:s|ting)? go of": "release",
    r"(?:is|are|was|were) excepted": "is excluded",
    r"to blame": "the cause",
    r"so (?:that )?nobody (?:has to|need|must)": "so that you do not have to",
    r"as ever": "as usual",
    r"without end": "forever",
    r"every so (?:many|often)": "every n steps, or: regularly",
    r"whom nobody|nobody (?:wants|asks|looks)": "name what is not used",
    r"(?:as|where) it (?:lies|stands)": "in place",
    r"from which alone": "from only these",
}
PATTERNS = [(re.compile(r"(?<![\w-])(?:" + phrase.replace(" ", r"\s+") + r")(?![\w-])", re.IGNORECASE), better) for phrase, better in PHRASES.items()]


def blanked(text: str) -> str:
    """Returns spaces where there was text, so that lines keep their numbers."""
    return re.sub(r"[^\n]", " ", text)


def prose(text: str) -> str:
    """Returns a page without inline code, targets of links, and blocks that show output."""
    lines, fence, is_output = [], "", False
    for line in text.splitlines():
        match = FENCE.match(line)
        if fence:
            closes = match is not None and match["fence"].startswith(fence) and not match["language"]
            lines.append(blanked(line) if is_output or closes else line)
            fence = "" if closes else fence
        elif match is not None:
            fence, is_output = match["fence"], match["language"] in OUTPUT
            lines.append(blanked(line))
        else:
            line = re.sub(r"`[^`]+`", lambda code: blanked(code[0]), line)
            lines.append(re.sub(r"\]\([^)]*\)", lambda target: blanked(target[0]), line))
    return "\n".join(lines)


def without_glossary(text: str) -> str:
    """Returns CONTRIBUTING.md without the table of terms, which names those that are not used."""
    before, heading, after = text.partition("\n## Words\n")
    section, *rest = re.split(r"(?=\n## )", after, maxsplit=1)
    return before + heading + re.sub(r"^\|.*$", lambda row: blanked(row[0]), section, flags=re.MULTILINE) + "".join(rest)


def comments(source: str) -> list[str]:
    """Returns the comment of each line of a module, and one empty line more."""
    lines = [""] * (len(source.splitlines()) + 1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = token.string
    return lines


def texts(source: str) -> str:
    """Returns the comments, docstrings and messages of a module, on their lines."""
    lines = comments(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 1:
            for number, line in enumerate(node.value.splitlines(), node.lineno - 1):
                lines[number] += f" {re.sub(r'`[^`]+`', lambda code: blanked(code[0]), line)}"
    return "\n".join(lines)


def names_and_comments(source: str) -> str:
    """Returns the names, docstrings and comments of a module of tests, on their lines; other texts are data."""
    lines = comments(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines[node.lineno - 1] += f" {node.name.replace('_', ' ')}."
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (docstring := ast.get_docstring(node)):
            for number, line in enumerate(docstring.splitlines(), node.body[0].lineno - 1):
                lines[number] += f" {line}"
    return "\n".join(lines)


def faults(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields the line of each listed phrase, the phrase, and what to write instead."""
    for pattern, better in PATTERNS:
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), better


def listed(path: pathlib.Path, text: str) -> list[str]:
    return [f"{relative(path)}:{line}: {phrase!r}; write: {better}" for line, phrase, better in sorted(faults(text))]


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_pages_contain_no_listed_phrase(path: pathlib.Path):
    text = path.read_text(encoding="utf-8")
    found = listed(path, prose(without_glossary(text) if path.name == "CONTRIBUTING.md" else text))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", CODE, ids=relative)
def test_code_contains_no_listed_phrase(path: pathlib.Path):
    modules = [path] if path.is_file() else sorted(path.rglob("*.py"))
    found = [fault for module in modules for fault in listed(module, texts(module.read_text(encoding="utf-8")))]
    assert not found, "\n".join(found)


def test_tests_contain_no_listed_phrase():
    modules = sorted((ROOT / "tests").rglob("*.py"))
    found = [fault for module in modules for fault in listed(module, names_and_comments(module.read_text(encoding="utf-8")))]
    assert not found, "\n".join(found)


def test_phrases_are_found_across_lines_and_outside_code_and_output():
    page = "A loss of\nyour own.\n`by hand`\n[x](by hand)\n```\nby hand\n```\n```python\n# by hand\n```\nof your own-ness, to blame-x\n"
    assert list(faults(prose(page))) == [(1, "of your own", "custom"), (9, "by hand", "hand-written, or: yourself")]
    assert [line for line, *_ in faults(texts('"""A loss\nof one\'s own."""\nx = f"{1} by hand", "anew"  # Anew.\n'))] == [2, 3, 3]


def test_the_glossary_may_contain_listed_phrases():
    page = "## Words\n\nGo on.\n\n| run | by hand |\n\n## Style\n\nby hand\n"
    assert sorted(line for line, *_ in faults(without_glossary("\n" + page))) == [4, 10]
