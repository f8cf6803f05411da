"""The types that a user's project sees: `typed_project/` is type-checked and run."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys

import pytest

PROJECT = pathlib.Path(__file__).parent / "typed_project"
# Replaces `assert_type`, which checks nothing at run time.
DRIVER = """
import runpy, sys, types, typing

def holds(value, kind):
    kinds, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is typing.Any:
        return True
    if kinds is types.UnionType:
        return any(holds(value, one) for one in arguments)
    if kind is type(None) or not arguments:
        return isinstance(value, kind)
    if kinds is dict:
        return type(value) is dict and all(holds(key, arguments[0]) and holds(one, arguments[1]) for key, one in value.items())
    return type(value) is kinds and all(holds(one, arguments[0]) for one in value)

def assert_type(value, kind):
    assert holds(value, kind), f"{value!r} is no {kind}"
    seen.append(kind)
    return value

seen = []
typing.assert_type = assert_type
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
print(len(seen), "types")
"""


@pytest.fixture
def project(tmp_path, process_env) -> tuple[pathlib.Path, dict[str, str]]:
    """A copy of the project, so that it sees only the package and nothing else of this repository."""
    shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "project", process_env


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_checkers_accept_a_users_project_and_report_its_mistakes(project, checker: str):
    """The only ignore comments are those of the mistakes, and all of them are needed: both checkers report unnecessary ones."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: make peers")
    directory, environment = project
    command = [sys.executable, "-m", checker, "."] + (["--pythonpath", sys.executable] if checker == "basedpyright" else [])
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_types_that_checkers_see_match_the_values_at_run_time(project, tmp_path):
    directory, environment = project
    environment = environment | {"JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-W", "error", "-c", DRIVER, "script.py", str(tmp_path)]
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    wanted = sum(path.read_text(encoding="utf-8").count("assert_type(") for path in directory.glob("*.py"))
    assert int(result.stdout.split()[-2]) >= wanted, "some were not reached"


def test_only_the_file_of_mistakes_has_ignore_comments():
    ignoring = {path.name for path in PROJECT.glob("*.py") if "ignore[" in path.read_text(encoding="utf-8")}
    assert ignoring == {"mistakes.py"}
