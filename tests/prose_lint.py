"""Checks the prose of the project: `python -m tests.prose_lint`, as a part of `make lint`.

Pages, comments, docstrings and messages must contain no phrase of `PHRASES`, which has one term for each concept. CONTRIBUTING.md has the
glossary. Pages and docstrings must also pass proselint.
"""

import ast
import io
import itertools
import multiprocessing
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

from proselint.checks import __register__
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

from tests.test_docs import FENCE, ROOT, relative

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

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
# Checks of proselint. Its typography is for printed text, such as curly quotes and accents on "resume".
CHECKS = {**DEFAULT["checks"], "typography": False}
PATTERNS = [(re.compile(r"(?<![\w-])(?:" + phrase.replace(" ", r"\s+") + r")(?![\w-])", re.IGNORECASE), better) for phrase, better in PHRASES.items()]


def blanked(text: str) -> str:
    """Returns dots where there was text, so that lines keep their numbers."""
    return re.sub(r"\S", "·", text)


def prose(text: str, *, keeps_code: bool = True) -> str:
    """Returns a page without inline code, targets of links, and blocks that show output; unless `keeps_code`, without any blocks."""
    lines, fence, is_output = [], "", False
    for line in text.splitlines():
        match = FENCE.match(line)
        if fence:
            closes = match is not None and match["fence"].startswith(fence) and not match["language"]
            lines.append(blanked(line) if is_output or closes or not keeps_code else line)
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
    """Returns the comment of each line of a module, and one more empty line."""
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


def docstrings(source: str) -> str:
    """Returns the docstrings of a module without inline code and examples, on their lines."""
    lines = [""] * (len(source.splitlines()) + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (docstring := ast.get_docstring(node, clean=False)):
            text = re.sub(r"^ *>>> .*(?:\n.*\S.*)*", lambda example: blanked(example[0]), docstring, flags=re.MULTILINE)
            text = re.sub(r"`[^`]+`", lambda code: blanked(code[0]), text)
            for number, line in enumerate(text.splitlines(), node.body[0].lineno - 1):
                lines[number] += f" {line}"
    return "\n".join(lines)


def listed_phrases(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line of each phrase of `PHRASES`, and a message."""
    for pattern, better in PATTERNS:
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, f"{' '.join(match[0].split())!r}; write: {better}"


def plurals_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line of each name with a letter after its closing backtick, which Sphinx does not accept, and a message."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (docstring := ast.get_docstring(node, clean=False)):
            for match in re.finditer(r"`[^`]+`(\w?)", docstring):  # All names, so that a closing backtick does not begin the next match.
                if match[1]:
                    yield node.body[0].lineno + docstring.count("\n", 0, match.start()), f"{match[0]!r}; write the plural in another way"


def proselint_results(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line of each result of proselint, and its message."""
    if not CheckRegistry().checks:
        CheckRegistry().register_many(__register__)
    text = re.sub(r"^[· ]*$|\d", "·", text, flags=re.MULTILINE)  # Otherwise equal numbers, and a heading before the same word, are repetitions.
    for result in LintFile("text", text).lint(Config(max_errors=1000, checks=CHECKS)) if text.strip() else []:
        yield result.pos[0], f"{result.check_result.check_path}: {result.check_result.message}"


def faults_of_page(path: pathlib.Path) -> list[str]:
    """Returns what is wrong in a Markdown page."""
    text = path.read_text(encoding="utf-8")
    text = without_glossary(text) if path.name == "CONTRIBUTING.md" else text
    return located(path, listed_phrases(prose(text)), proselint_results(prose(text, keeps_code=False)))


def faults_of_module(path: pathlib.Path) -> list[str]:
    """Returns what is wrong in a Python module; of tests, messages and proselint's results do not count."""
    source = path.read_text(encoding="utf-8")
    if ROOT / "tests" in path.parents:
        return located(path, listed_phrases(names_and_comments(source)))
    return located(path, listed_phrases(texts(source)), plurals_of_code(source), proselint_results(docstrings(source)))


def located(path: pathlib.Path, *found: Iterator[tuple[int, str]]) -> list[str]:
    return [f"{relative(path)}:{line}: {message}" for line, message in sorted(itertools.chain(*found))]


if __name__ == "__main__":
    modules = sorted(path for name in ("benchmarks", "examples", "fitflax", "tests") for path in (ROOT / name).rglob("*.py"))
    with multiprocessing.Pool() as pool:
        pages, code = pool.map_async(faults_of_page, PAGES), pool.map_async(faults_of_module, modules, chunksize=10)
        sys.exit("\n".join(itertools.chain(*pages.get(), *code.get())) or None)
