"""The benchmark of goodput: the formula against the simulation, the best interval against a search, and a real run that is killed."""

import argparse
import dataclasses
import math
import pathlib
import random
import re
import statistics

import pytest

from benchmarks import goodput

JOBS = [
    goodput.Job(pause=5, write=20, restart=60, failures=3600),
    goodput.Job(pause=0.2, write=1, restart=300, failures=600),
    goodput.Job(pause=30, write=30, restart=10, failures=1e5),
]


@pytest.mark.parametrize("job", JOBS)
def test_the_simulation_agrees_with_the_formula(job):
    interval, work, draws = goodput.best_interval(job), 40 * job.failures, random.Random(1)
    simulated = work / statistics.mean(goodput.simulate(job, interval, work, draws) for _ in range(100))
    assert simulated == pytest.approx(goodput.goodput(job, interval), rel=0.02)


@pytest.mark.parametrize("job", JOBS)
def test_the_best_interval_has_the_highest_goodput_and_is_close_to_youngs(job):
    best = goodput.best_interval(job)
    assert all(goodput.goodput(job, best) >= goodput.goodput(job, max(job.write, best * factor)) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))
    assert best == pytest.approx(max(job.write, math.sqrt(2 * job.pause * job.failures)), rel=0.15)


def test_a_job_that_never_fails_loses_only_its_pauses():
    job = goodput.Job(pause=1, write=0, restart=100, failures=1e12)
    assert goodput.goodput(job, 9) == pytest.approx(0.9)
    assert goodput.simulate(job, 9, 90, random.Random(0)) == 99  # No save after the last step.


def test_the_tables_have_a_row_for_each_size_and_rate_of_failures():
    lines = goodput.table(goodput.Assumptions()).splitlines()
    assert len(lines) == 2 + 9 and all(line.count("|") == lines[0].count("|") for line in lines)


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    goodput.draw(tmp_path / "goodput.png", goodput.Assumptions())
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")


def test_assumptions_are_arguments_and_their_defaults_are_on_the_page(monkeypatch, capsys):
    monkeypatch.setattr(goodput, "check", lambda assumed, draws: "")
    goodput.main(["--state", "10", "--per-host", "4", "--copy", "5", "--write", "2", "--read", "4", "--restart", "30"])
    assert "| 8 | 4 | 1, 2.5, 31.2 | " in capsys.readouterr().out  # Two hosts, each with 5 GB: 5 / 5, 5 / 2, and 30 + 5 / 4 seconds.
    page = (pathlib.Path(__file__).parent.parent / "docs" / "scaling.md").read_text()
    for field in dataclasses.fields(goodput.Assumptions):
        assert f"`--{field.name.replace('_', '-')} {field.default:g}`" in page


@pytest.mark.slow
def test_a_real_run_takes_about_as_long_as_the_simulation_says():
    options = argparse.Namespace(steps=3000, every=50, width=128, kills=2.0, seed=1)  # The first kill of this seed comes early.
    report = goodput.compare_real(options)
    found = re.search(r"average: ([\d.]+) s, (\d+) kills, .*Simulated: mean ([\d.]+) s", report)
    assert found is not None and int(found[2]) > 0, report
    assert float(found[1]) < 4 * float(found[3]), report
