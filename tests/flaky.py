"""Pytest plugin: runs failed tests a second time, alone, and reports those that then pass as flaky. `make test` loads it with `-p tests.flaky`.

A run whose only failures are at most `MAX_FLAKY` flaky tests passes. Its summary names them in lines that begin with `FLAKY`, so that they are found and fixed.
A run with more failures than that fails, and no test is repeated.
"""

import os
import subprocess
import sys

import pytest

MAX_FLAKY = 3


def _failed(reporter: pytest.TerminalReporter) -> dict[str, list[pytest.TestReport]]:
    """The reports of failures and errors by test. A test that failed and whose teardown failed, too, has two."""
    failed: dict[str, list[pytest.TestReport]] = {}
    for category in ("failed", "error"):
        for report in reporter.getreports(category):
            failed.setdefault(report.nodeid, []).append(report)
    return failed


def _passes_alone(config: pytest.Config, test: str) -> bool:
    """Runs one test in a separate process, without workers, and prints that process's output if the test fails again."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color", "yes" if config.get_terminal_writer().hasmarkup else "no", test]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # Which may start workers.
    result = subprocess.run(command, cwd=config.rootpath, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        config.get_terminal_writer().write(f"\nAlone, {test} failed as well:\n{result.stdout}\n")
    return result.returncode == 0


@pytest.hookimpl(trylast=True)  # After xdist has stopped its workers.
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.exitstatus != pytest.ExitCode.TESTS_FAILED:  # A worker, or an end of another kind, such as Ctrl-C.
        return
    failed = _failed(reporter)
    if not 0 < len(failed) <= MAX_FLAKY:
        return
    for test, reports in failed.items():
        if not _passes_alone(session.config, test):
            continue
        reporter.stats.setdefault("flaky", []).append(reports[0])
        for category in ("failed", "error"):
            reporter.stats[category] = [report for report in reporter.getreports(category) if report.nodeid != test]
    if not reporter.getreports("failed") and not reporter.getreports("error"):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    flaky = terminalreporter.getreports("flaky")
    if flaky:
        terminalreporter.section("flaky tests", sep="=", yellow=True, bold=True)
    for report in flaky:
        terminalreporter.section(report.nodeid, sep="_", red=True)
        terminalreporter.write_line(str(report.longrepr))
    for report in flaky:
        terminalreporter.write_line(f"FLAKY {report.nodeid}", yellow=True)
