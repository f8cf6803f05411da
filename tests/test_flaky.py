"""What `tests/flaky.py` does with tests that fail, and what a test that hangs reports, in separate pytest processes with a worker."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

CASES = """
    import os
    import pathlib
    import threading

    import pytest

    def fails_once(name):
        ran = pathlib.Path(__file__).with_name(f"{name}.ran")
        if not ran.exists():
            ran.touch()
            pytest.fail(f"{name} failed for the first time")

    def test_passes():
        assert "PYTEST_XDIST_WORKER" in os.environ
"""


def run(directory: pathlib.Path, cases: str, *settings: str) -> tuple[int, list[str]]:
    """Runs the test cases; returns pytest's exit status and the lines of its output."""
    (directory / "pytest.ini").write_text("\n".join(["[pytest]", "addopts = -p xdist -p pytest_timeout", *settings]))
    (directory / "test_cases.py").write_text(textwrap.dedent(CASES) + textwrap.dedent(cases))
    command = [sys.executable, "-m", "pytest", "-n1", "-p", "tests.flaky"]
    # Without other plugins, which take most of the time.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return result.returncode, result.stdout.splitlines()


def test_a_run_passes_and_names_a_test_that_passes_the_second_time_alone(tmp_path):
    cases = """
    @pytest.fixture
    def fixture():
        yield
        fails_once("teardown")

    def test_of_unstable_teardown(fixture):
        pass

    @pytest.mark.parametrize("name", ["a b"])
    def test_unstable(name):
        if "PYTEST_XDIST_WORKER" in os.environ:
            fails_once(name)
    """
    code, lines = run(tmp_path, cases)
    assert code == 0, "\n".join(lines)
    assert {line for line in lines if line.startswith("FLAKY")} == {"FLAKY test_cases.py::test_unstable[a b]", "FLAKY test_cases.py::test_of_unstable_teardown"}
    assert any("a b failed for the first time" in line for line in lines)
    assert "2 flaky" in lines[-1] and "failed" not in lines[-1] and "error" not in lines[-1]


@pytest.mark.slow
def test_a_run_fails_if_a_test_fails_twice(tmp_path):
    cases = """
    def test_unstable():
        fails_once("unstable")

    def test_broken():
        assert [] == ["broken"]
    """
    code, lines = run(tmp_path, cases)
    assert code == 1
    assert "FLAKY test_cases.py::test_unstable" in lines and any(line.startswith("FAILED test_cases.py::test_broken") for line in lines)
    assert "Alone, test_cases.py::test_broken failed as well:" in lines
    assert "1 failed" in lines[-1] and "1 flaky" in lines[-1]


def test_a_run_with_more_than_three_failures_fails(tmp_path):
    cases = """
    @pytest.mark.parametrize("number", range(4))
    def test_unstable(number):
        fails_once(number)
    """
    code, lines = run(tmp_path, cases)
    assert code == 1
    assert not any(line.startswith("FLAKY") for line in lines) and "4 failed, 1 passed" in lines[-1]


@pytest.mark.slow
def test_a_hanging_test_is_named_and_the_stacks_of_all_threads_are_printed(tmp_path):
    cases = """
    def waits_in_a_thread():
        threading.Event().wait()

    def test_hangs():
        threading.Thread(target=waits_in_a_thread, name="the-other", daemon=True).start()
        threading.Event().wait()

    def test_after():
        pass
    """
    code, lines = run(tmp_path, cases, "timeout = 4", "timeout_method = thread", "faulthandler_timeout = 3")
    output = "\n".join(lines)
    assert code == 1
    assert any(line.startswith("FAILED test_cases.py::test_hangs") for line in lines), output
    assert "waits_in_a_thread" in output and "in test_hangs" in output, output
    assert "1 failed, 2 passed" in lines[-1], output
