"""Breaks the library in one place at a time and checks whether a test detects it: `python -m tests.mutants fitflax/triggers.py ...`, or `make mutants` for all.

A mutant is a copy of the checkout in which one operator, number or statement of one file is changed. The 40 mutants of a file are the same every time, and
most of them stay the same when the file changes. Mutants that no test detects are printed, unless `tests/MUTANTS.md` explains them; if there are any, the exit
status is 1.
"""

import argparse
import ast
import collections
import contextlib
import gc
import hashlib
import importlib
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPLAINED = ROOT / "tests/MUTANTS.md"
MUTANTS_PER_FILE = 40
SEED = "fitflax"
# Importing these takes most of the time of a quick test; they are imported once, and the tests of each mutant continue from there.
PRELOADED = ("flax.linen", "hypothesis", "optax", "sklearn.metrics", "tensorboardX")
KILLS = collections.Counter[str]()  # How many mutants each test has killed.
PATIENCE = 4  # A mutant may take this many times as long as the file's tests without it.

# The tests for a file's mutants, as arguments of pytest. Calls run one after another until a test fails, and the file's doctests are added to the first one.
# Tests that are marked slow are excluded unless `-m` selects them.
METRICS = ("tests/metrics/test_metrics.py tests/metrics/test_base.py tests/metrics/test_mean.py", "tests/metrics/test_metrics.py -m slow")
TESTS = {
    "fitflax/triggers.py": ("tests/test_triggers.py",),
    "fitflax/metrics/regression.py": ("tests/metrics/test_regression.py", "tests/metrics/test_regression.py -m slow", *METRICS),
    "fitflax/metrics/ranking.py": ("tests/metrics/test_ranking.py", "tests/metrics/test_ranking.py -m slow", *METRICS),
    "fitflax/metrics/classification.py": ("tests/metrics/test_classification.py", "tests/metrics/test_classification.py -m slow", *METRICS),
    "fitflax/metrics/base.py": METRICS,
    "fitflax/checkpoints/msgpack_format.py": (
        "tests/checkpoints/test_format_docs.py tests/checkpoints/test_msgpack_format_blocks.py tests/checkpoints/test_msgpack_format.py",
        "tests/checkpoints/test_damage.py",
    ),
    **dict.fromkeys(
        ("fitflax/steps/train_step.py", "fitflax/steps/gradients.py"),
        (
            "tests/steps/test_train_step.py",
            "tests/callbacks/test_terminate_on_nan.py",
            "tests/test_trainer.py",
            "tests/test_numbers.py tests/callbacks/test_summaries.py",
            "tests/steps/test_train_step.py -m slow",
            "tests/loops/test_user_loops.py tests/diagnostics/test_nan_hunt.py",
            "tests/loops/test_user_loops.py -m slow -k gradients",
        ),
    ),
    "fitflax/checkpoints/resume.py": (
        "tests/checkpoints/test_resume.py tests/checkpoints/test_resume_load.py",
        "tests/checkpoints/test_resume_state.py",
        "tests/checkpoints/test_resume_state.py -m slow",
        "tests/loops/test_session_state.py",
    ),
    "fitflax/checkpoints/json_documents.py": (
        "tests/checkpoints/test_json_documents.py tests/checkpoints/test_checkpoint_files.py tests/checkpoints/test_format_docs.py",
        "tests/checkpoints/test_damage.py",
    ),
    "fitflax/checkpoints/checkpoint_store.py": (
        "tests/checkpoints/test_checkpoint_store.py tests/checkpoints/test_retention.py tests/checkpoints/test_directories.py",
        "tests/checkpoints/test_save.py tests/checkpoints/test_resume_load.py",
    ),
    "fitflax/loops/training_loop.py": (
        "tests/loops/test_training_loop_hooks.py",
        "tests/checkpoints/test_checkpoint.py",
        "tests/loops/test_training_loop_unobserved.py tests/test_logs.py",
        "tests/loops/test_user_loops.py",
        "tests/loops/test_resume.py",
        "tests/steps/test_steps_per_call.py",
        "tests/test_faults.py tests/loops/test_fit.py",
        "tests/loops/test_fit.py -m slow -k validation_freq",
        "tests/loops/test_resume.py -m slow",
        "tests/checkpoints/test_checkpoint_files_partial_epoch.py",
        "tests/data/test_shards.py -m slow",
    ),
    "fitflax/loops/setup.py": (
        "tests/loops/test_fit_trials.py tests/test_errors.py tests/test_mistakes.py",
        "tests/steps/test_steps_per_call.py",
        "tests/steps/test_steps_per_call.py -m slow",
        "tests/loops/test_resume.py tests/loops/test_user_loops.py",
        "tests/diagnostics tests/steps/test_compile_ahead.py",
        "tests/loops/test_resume.py -m slow",
        "tests/test_faults.py tests/loops/test_session_state.py tests/callbacks/test_tensorboard.py",
        "tests/data/test_sources.py",
        "tests/checkpoints/test_checkpoint_files_partial_epoch.py",
        "tests/data/test_pipelines_grain.py",
    ),
    "fitflax/checkpoints/plain_tree.py": ("tests/checkpoints/test_plain_tree.py", "tests/checkpoints/test_msgpack_format_blocks.py"),
    "fitflax/checkpoints/saver.py": ("tests/checkpoints/test_saver.py", "tests/checkpoints/test_saver.py -m slow", "tests/loops/test_asynchronous.py"),
    "fitflax/steps/outputs.py": ("tests/steps/test_outputs.py", "tests/steps/test_train_step.py"),
}

# Operators and functions, and their replacements.
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in", "not in": "in"}
BINARY = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "&": "|", "|": "&", "^": "&", "<<": ">>", ">>": "<<"}
BOOLEAN = {"and": "or", "or": "and"}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


class Mutant(NamedTuple):
    """A change of one file: its name in `MUTANTS.md`, the function it is in, the number of the line, the line before and after, and the whole file after."""

    name: str
    where: str
    line: int
    before: str
    after: str
    source: str


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Returns all mutants of a file, in a pseudo-random order that a change elsewhere in the file does not affect.

    >>> sorted(mutant.after for mutant in mutants_of("f.py", "def f(x: int = 3):\\n    return x < 2"))
    ['def f(x: int = 4):', 'return None', 'return x < 3', 'return x <= 2']
    """
    data, original = source.encode(), meaning(compile(source, path, "exec"))
    begins = [0]
    for text in data.splitlines(keepends=True):
        begins.append(begins[-1] + len(text))
    found, seen = [], dict[str, int]()
    for where, node in changeable(ast.parse(source)):
        for first, last, pattern, replacement in changes(node):
            begin, end = begins[first[0] - 1] + first[1], begins[last[0] - 1] + last[1]
            old = data[begin:end].decode()
            new = replacement.format(old) if pattern is None else re.sub(pattern, replacement, old, count=1)
            mutated = (data[:begin] + new.encode() + data[end:]).decode()
            if new == old or meaning(compile(mutated, path, "exec")) == original:
                continue
            line_begin = data.rfind(b"\n", 0, begin) + 1
            line_end = data.find(b"\n", end) % (len(data) + 1)
            before = " ".join(data[line_begin:line_end].decode().split())
            after = " ".join((data[line_begin:begin].decode() + new + data[end:line_end].decode()).split())
            what = f"{SEED} {path} {where} {before} -> {after}"
            seen[what] = seen.get(what, 0) + 1
            found.append(Mutant(hashlib.sha256(f"{what} {seen[what]}".encode()).hexdigest()[:8], where, first[0], before, after, mutated))
    return sorted(found)


def meaning(code: types.CodeType) -> Any:
    """Returns what a code object does, without its line numbers."""
    constants = [meaning(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_exceptiontable


def changeable(node: ast.AST, where: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields the nodes that may be changed, each with the function it is in; no annotations, decorators, assertions, strings or error messages."""
    yield where, node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        where = f"{where}.{node.name}".lstrip(".")
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from changeable(child, where)


def changes(node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int], str | None, str]]:
    """Yields changes of one node: start and end (line and column), a pattern that is replaced there (`None`: everything), and its replacement."""
    match node:
        case ast.Compare():
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield swapped(left, right, operator, COMPARISONS)
        case ast.BoolOp():
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield swapped(left, right, node.op, BOOLEAN)
        case ast.BinOp() if not isinstance(node.op, ast.MatMult):
            yield swapped(node.left, node.right, node.op, BINARY)
        case ast.AugAssign():
            sign = symbol(node.op)
            yield end_of(node.target), begin_of(node.value), re.escape(f"{sign}="), f"{BINARY[sign]}="
        case ast.UnaryOp():
            yield begin_of(node), end_of(node), r"^(not|-|~)\s*", ""
        case ast.Constant(value=bool()):
            yield begin_of(node), end_of(node), None, str(not node.value)
        case ast.Constant(value=int() | float()):
            yield begin_of(node), end_of(node), None, str(node.value + 1)
        case ast.Return() if node.value is not None and getattr(node.value, "value", ...) is not False:
            yield begin_of(node), end_of(node), None, "return None"
        case ast.Break() | ast.Continue():
            yield begin_of(node), end_of(node), None, "continue" if isinstance(node, ast.Break) else "break"
        case ast.Raise() | ast.Expr(value=ast.Call()) | ast.Delete() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield begin_of(node), end_of(node), None, "pass"
        case ast.Name() if node.id in CALLED:
            yield begin_of(node), end_of(node), None, CALLED[node.id]
        case ast.Attribute() if node.attr in CALLED:
            yield end_of(node.value), end_of(node), node.attr, CALLED[node.attr]
        case ast.Slice():
            for bound in (node.lower, node.upper):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield begin_of(bound), end_of(bound), None, "({}) + 1"
    if isinstance(node, (ast.If, ast.IfExp, ast.While)) and isinstance(node.test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        yield begin_of(node.test), end_of(node.test), None, "not ({})"
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)) and isinstance(node.target, (ast.Attribute, ast.Subscript)) and node.value is not None:
        yield begin_of(node), end_of(node), None, "pass"


def begin_of(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def end_of(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def symbol(operator: ast.AST) -> str:
    """Returns how an operator is written."""
    x = ast.Name("x")
    if isinstance(operator, ast.operator):
        return ast.unparse(ast.BinOp(x, operator, x)).strip("x ")
    if isinstance(operator, ast.boolop):
        return ast.unparse(ast.BoolOp(operator, [x, x])).strip("x ")
    return ast.unparse(ast.Compare(x, [operator], [x])).strip("x ")  # type: ignore[list-item]


def swapped(left: ast.AST, right: ast.AST, operator: ast.AST, by: dict[str, str]) -> tuple[tuple[int, int], tuple[int, int], str, str]:
    sign = symbol(operator)
    return end_of(left), begin_of(right), r"\s+".join(map(re.escape, sign.split())), by[sign]


def run_tests(tests: list[str], copy: pathlib.Path, limit: float) -> tuple[str, str]:
    """Runs pytest in `copy`, in a separate process; returns "passed", "failed" or "too slow", and its output."""
    (copy / "temporary").mkdir()
    with (copy / "output.txt").open("w+") as output, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns about threads, which do not exist before it computes.
        process = os.fork()
        if process == 0:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            _become_pytest(tests, copy)
        end = time.monotonic() + limit
        while not (ended := os.waitpid(process, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):  # Includes what the tests started.
            os.killpg(process, signal.SIGKILL)
        shutil.rmtree(copy / "temporary", ignore_errors=True)  # The process exits without cleaning up.
        if not ended[0]:
            os.waitpid(process, 0)
            shutil.rmtree(copy / "programs", ignore_errors=True)  # One may be incomplete.
        output.seek(0)
        text = output.read()
    KILLS.update(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE))
    return "too slow" if not ended[0] else "passed" if ended[1] == 0 else "failed", text


def _become_pytest(tests: list[str], copy: pathlib.Path) -> NoReturn:
    """Continues as `pytest tests` in the directory `copy`; JAX and others are already imported, which saves most of the time that a quick test takes."""
    status = 1
    try:
        os.chdir(copy)
        sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        os.environ |= {"PYTHONPATH": str(copy), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        os.environ["TMPDIR"] = tempfile.tempdir = str(copy / "temporary")
        sys.modules.pop("tests", None)
        options = ["-m", "not slow", "-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
        status = int(pytest.main([*options, *tests], plugins=[_SpeedUp(copy / "programs")]))
    finally:
        sys.stdout.flush()
        os._exit(status)


class _SpeedUp:
    """Lets all mutants share compiled programs instead of each having its own directory, and first runs the tests that killed the most mutants so far."""

    def __init__(self, programs: pathlib.Path) -> None:
        self._programs = programs

    def pytest_sessionstart(self) -> None:
        jax.config.update("jax_compilation_cache_dir", str(self._programs))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: -KILLS[item.nodeid])


def try_file(path: str, copy: pathlib.Path, chosen: list[str]) -> bool:
    """Tries a file's mutants; returns whether all were killed or are explained."""
    source = (ROOT / path).read_text(encoding="utf-8")
    mutants = mutants_of(path, source)
    drawn = [mutant for mutant in mutants if mutant.name in chosen] if chosen else mutants[:MUTANTS_PER_FILE]
    explained = EXPLAINED.read_text(encoding="utf-8") if EXPLAINED.exists() and not chosen else ""
    alive = sorted((mutant for mutant in drawn if mutant.name not in explained), key=lambda mutant: mutant.line)
    num_explained, slow, begin = len(drawn) - len(alive), [], time.monotonic()
    for number, tests in enumerate(TESTS[path]):
        arguments = shlex.split(tests) + [path] * (number == 0)
        write(copy / path, source)
        started = time.monotonic()
        result, text = run_tests(arguments, copy, math.inf)
        if result != "passed":
            print(f"{path}: its tests fail without a mutant:\n{text}", flush=True)
            return False
        limit = 10 + PATIENCE * (time.monotonic() - started)
        results = {}
        for mutant in alive:
            write(copy / path, mutant.source)
            results[mutant], _ = run_tests(arguments, copy, limit)
        slow += [mutant for mutant in alive if results[mutant] == "too slow"]
        alive = [mutant for mutant in alive if results[mutant] == "passed"]
        print(f"{path}: after {tests}: {' '.join(mutant.name for mutant in alive) or 'none left'}", flush=True)
        if not alive:
            break
    write(copy / path, source)
    for kind, some in (("too slow", slow), ("survived", alive)):
        for mutant in some:
            print(f"{path}:{mutant.line} {mutant.name} {mutant.where}: {kind}\n  - {mutant.before}\n  + {mutant.after}", flush=True)
    text = f"{len(drawn) - num_explained - len(slow) - len(alive)} killed, {len(slow)} too slow, {num_explained} explained, {len(alive)} survived"
    print(f"{path}: {len(drawn)} of {len(mutants)} mutants in {time.monotonic() - begin:.0f} s: {text}", flush=True)
    return not alive


def write(path: pathlib.Path, source: str) -> None:
    """Writes a module, and removes the old bytecode, which Python would use if both modules had the same size and were written in the same second."""
    path.write_text(source, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=list(TESTS), help="files of the library; all that have tests here by default")
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants, explained or not, instead of 40 of each file")
    options = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)  # As in `make test`.
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="fitflax-mutants-") as directory:
        copy = pathlib.Path(directory).resolve() / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache", ".hypothesis"))
        results = [try_file(path, copy, options.only) for path in options.paths]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
