"""Computes goodput, the fraction of a job's time that is spent in useful steps: with a formula, with a simulation, and in a real run that is killed repeatedly.

`python -m benchmarks.goodput` prints goodput for 8 to 4,096 devices, and compares the formula with the simulation. Its assumptions about hosts are arguments;
docs/scaling.md compares their defaults with measurements. With `--real`, it starts a run, kills it at random times, and starts it again until it is done. The
simulation then uses the measured durations of this run, and its result is compared with the real one.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from benchmarks.plots import STYLE, WIDTH

__all__ = ["Assumptions", "Job", "best_interval", "goodput", "simulate"]


@dataclasses.dataclass(frozen=True)
class Job:
    """The durations of a job's parts, in seconds.

    Attributes:
        pause: How long a save stops training, for the copy to the host.
        write: From the end of the pause until the checkpoint is complete, while training continues.
        restart: From a failure to the first new step: the failure is noticed, processes start, programs come from the compilation cache, the state is read.
        failures: Mean time between failures of any part of the job.
    """

    pause: float
    write: float
    restart: float
    failures: float


def goodput(job: Job, interval: float) -> float:
    """Returns the fraction of time in steps that need not be repeated, if failures are random (a Poisson process) and the job is long.

    `interval * exp(-(write + restart) / failures) / (failures * (exp((interval + pause) / failures) - 1))`: Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", 2006, equation 20, for checkpoints that are usable only after they are completely written.

    Args:
        job: The job.
        interval: Seconds of steps between two saves, longer than a write.
    """
    lost = math.exp(-(job.write + job.restart) / job.failures)
    return interval * lost / (job.failures * math.expm1((interval + job.pause) / job.failures))


def best_interval(job: Job) -> float:
    """Returns the interval with the highest goodput. It is at least as long as a write, because saves do not overlap.

    It solves `exp((interval + pause) / failures) * (1 - interval / failures) = 1`; approximately `sqrt(2 * pause * failures)` (Young, 1974).
    """
    low, high = 0.0, job.failures
    for _ in range(200):
        middle = (low + high) / 2
        if (middle + job.pause) / job.failures + math.log1p(-middle / job.failures) > 0:
            low = middle
        else:
            high = middle
    return max(low, job.write)


def simulate(job: Job, interval: float, work: float, draws: random.Random) -> float:
    """Returns the seconds that a job with `work` seconds of steps takes, with random failures, including failures during restarts."""
    now, saved = 0.0, 0.0
    fails = draws.expovariate(1 / job.failures)
    while True:
        done, commits = saved, []
        while True:
            steps = min(interval, work - done)
            if now + steps >= fails:
                break
            now, done = now + steps, done + steps
            if done >= work:
                return now
            if now + job.pause >= fails:
                break
            now += job.pause
            commits.append((now + job.write, done))
        saved = max([saved, *(position for complete, position in commits if complete < fails)])
        while True:
            now, fails = fails, fails + draws.expovariate(1 / job.failures)
            if now + job.restart < fails:
                now += job.restart
                break


# -- a real run --

_SCRIPT = """
import json, sys, time
started = time.time()
import numpy as np, optax
from flax import linen as nn
import fitflax
from fitflax.callbacks import Callback, ModelCheckpoint
directory, steps, every, width, begun = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
fitflax.enable_compilation_cache(directory + "/cache")

class Note(Callback):
    def on_train_batch_end(self, batch, logs):
        logs["loss"]
        if self.trainer.step == self.first + 1 or self.trainer.step % 10 == 0:
            with open(directory + "/notes", "a") as file:
                print(json.dumps([begun, self.trainer.step, time.time()]), file=file)
    def on_train_begin(self, logs):
        self.first = self.params["resumed_step"] or 0

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x)

rng = np.random.default_rng(0)
x = rng.normal(size=(4096, width)).astype(np.float32)
trainer = fitflax.Trainer(Net())
trainer.compile(optax.adam(1e-4), "mse")
saves = ModelCheckpoint(directory + "/checkpoints", every=fitflax.every(steps=every))
trainer.fit(x, x[:, :1], batch_size=256, steps=steps, callbacks=[Note(), saves], resume="auto", verbose=0)
"""


@dataclasses.dataclass(frozen=True)
class Real:
    """The measurements of a real run.

    Attributes:
        seconds: Total time.
        kills: Number of kills.
        step_seconds: Time per step, including saves.
        restart_seconds: Mean time from a kill to the first new step.
        steps_again: Number of steps that ran more than once.
    """

    seconds: float
    kills: int
    step_seconds: float
    restart_seconds: float
    steps_again: int


def run_real(directory: pathlib.Path, *, steps: int, every: int, width: int, kills_every: float | None, draws: random.Random) -> Real:
    """Trains until the run is done. Kills the process at exponentially distributed times after each start."""
    script = directory / "train.py"
    script.write_text(_SCRIPT)
    begin, lives = time.time(), []
    while True:
        begun = time.time()
        command = [sys.executable, str(script), str(directory), str(steps), str(every), str(width), str(begun)]
        process = subprocess.Popen(command, env={**os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"})
        fails = math.inf if kills_every is None else begun + draws.expovariate(1 / kills_every)
        while process.poll() is None and time.time() < fails:
            time.sleep(0.01)
        process.kill()
        code = process.wait()
        lives.append((begun, time.time()))
        if code == 0:
            break
        if code != -9:
            raise RuntimeError(f"The training script exited with code {code}.")
    notes = [json.loads(line) for line in (directory / "notes").read_text().splitlines()]
    return _measured(time.time() - begin, lives, notes)


def _measured(seconds: float, lives: Sequence[tuple[float, float]], notes: Sequence[tuple[float, int, float]]) -> Real:
    restarts, durations, highest, again = [], [], 0, 0
    for begun, _ in lives:
        own = [(step, at) for life, step, at in notes if life == begun]
        if not own:
            continue
        restarts.append(own[0][1] - begun)
        if len(own) > 1:
            durations.append((own[-1][1] - own[0][1], own[-1][0] - own[0][0]))
        again += max(0, min(highest, own[-1][0]) - own[0][0] + 1) if highest else 0
        highest = max(highest, own[-1][0])
    step_seconds = sum(duration for duration, _ in durations) / sum(count for _, count in durations)
    return Real(seconds, len(lives) - 1, step_seconds, statistics.mean(restarts), again)


# -- output --


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What the projections assume about a job whose state is split evenly over its hosts.

    Attributes:
        state: Size of the state in gigabytes; by default 8e9 parameters and the two moments of Adam in float32.
        per_host: Devices per host.
        copy: Speed at which a host copies its part of the state from its devices, in gigabytes per second.
        write: Speed at which a host writes its part to shared storage, in gigabytes per second.
        read: Speed at which a host reads its part in a restart, in gigabytes per second.
        restart: From a failure until processes read the state, in seconds: the failure is noticed, processes start, programs come from the compilation cache.
    """

    state: float = 96.0
    per_host: int = 8
    copy: float = 10.0
    write: float = 1.0
    read: float = 1.0
    restart: float = 90.0


def project(assumed: Assumptions, devices: int, hours: float) -> Job:
    """Returns the job of a number of devices, with a mean of `hours` between failures."""
    part = assumed.state / (devices / assumed.per_host)
    return Job(pause=part / assumed.copy, write=part / assumed.write, restart=assumed.restart + part / assumed.read, failures=3600 * hours)


def projections(assumed: Assumptions) -> Iterator[tuple[int, float, Job, float]]:
    """Yields the number of devices, the hours between failures, the job, and its best interval."""
    for devices in (8, 256, 4096):
        for hours in (1.0, 4.0, 24.0):
            job = project(assumed, devices, hours)
            yield devices, hours, job, best_interval(job)


def table(assumed: Assumptions) -> str:
    """Returns the projections as a Markdown table."""
    heads = ("devices", "hours between failures", "pause, write, restart, s", "best interval, s", "goodput", "at 10 minutes", "no pause", "restart halved")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for devices, hours, job, interval in projections(assumed):
        ten = max(600.0, job.write)
        faster = dataclasses.replace(job, restart=job.restart / 2)
        no_pause = dataclasses.replace(job, pause=0.0)
        shares = (goodput(job, interval), goodput(job, ten), goodput(no_pause, max(job.write, 1.0)), goodput(faster, interval))
        parts = f"{job.pause:.2g}, {job.write:.2g}, {job.restart:.3g}"
        lines.append(f"| {devices} | {hours:g} | {parts} | {interval:.0f} | {' | '.join(f'{share:.3f}' for share in shares)} |")
    return "\n".join(lines)


def draw(path: pathlib.Path, assumed: Assumptions) -> None:
    """Draws the goodput of the projected jobs as a function of the interval between saves."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
        axes = figure.subplots()
        for devices, color in zip((8, 256, 4096), ("#2f7ed8", "#d98a1f", "#3f9e5f"), strict=True):
            for hours, line in ((1.0, "-"), (24.0, "--")):
                job = project(assumed, devices, hours)
                begin = math.log10(max(job.write, 3.0))
                intervals = [10 ** (begin + (4 - begin) * part / 200) for part in range(201)]
                axes.plot(intervals, [goodput(job, interval) for interval in intervals], line, color=color, label=f"{devices} devices, {hours:g} h")
                best = best_interval(job)
                axes.plot([best], [goodput(job, best)], "o", color=color, markersize=4)
        axes.set_xscale("log")
        axes.set_ylim(0.5, 1.0)
        axes.set_xlabel("seconds of steps between two saves")
        axes.set_ylabel("goodput")
        axes.legend(title="time between failures", ncols=1, loc="lower left")
        figure.savefig(path, dpi=160)


def check(assumed: Assumptions, draws: random.Random, repeats: int = 200) -> str:
    """Returns a comparison of the simulation with the formula."""
    lines = ["| devices | hours between failures | interval, s | formula | simulation |", "|---|---|---|---|---|"]
    for devices, hours, job, interval in projections(assumed):
        work = 30 * job.failures
        simulated = work / statistics.mean(simulate(job, interval, work, draws) for _ in range(repeats))
        lines.append(f"| {devices} | {hours:g} | {interval:.0f} | {goodput(job, interval):.4f} | {simulated:.4f} |")
    return "\n".join(lines)


def compare_real(options: argparse.Namespace) -> str:
    """Returns a comparison of a real run that is killed with one that is not, and with the simulation."""
    given = {"steps": options.steps, "every": options.every, "width": options.width}
    draws = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        whole = run_real(pathlib.Path(first), kills_every=None, draws=draws, **given)
        kills = max(options.kills, whole.restart_seconds)  # With more kills, most starts would not reach a step, and the run might never end.
        real = run_real(pathlib.Path(second), kills_every=kills, draws=draws, **given)
    work = options.steps * real.step_seconds
    job = Job(pause=0.0, write=0.0, restart=real.restart_seconds, failures=kills)
    interval = options.every * real.step_seconds
    times = sorted(simulate(job, interval, work, draws) + real.restart_seconds for _ in range(1000))
    return (
        f"{options.steps} steps with a save every {options.every}: {whole.seconds:.1f} s without kills. With a SIGKILL every {kills:.3g} s on average: "
        f"{real.seconds:.1f} s, {real.kills} kills, {real.steps_again} steps repeated, {1000 * real.step_seconds:.1f} ms per step, "
        f"{real.restart_seconds:.1f} s from start to first step; goodput {work / real.seconds:.2f}. "
        f"Simulated: mean {statistics.mean(times):.1f} s, 90 % of runs {times[50]:.1f} to {times[949]:.1f} s."
    )


_HELP = {
    "state": "size of the state, GB",
    "per_host": "devices per host",
    "copy": "speed of a host's copy from its devices, GB/s",
    "write": "speed of a host's writes, GB/s",
    "read": "speed of a host's reads, GB/s",
    "restart": "seconds from a failure until processes read the state",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--real", action="store_true", help="train a run that is killed and restarted")
    parser.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="plot the goodput as a function of the interval between saves")
    parser.add_argument("--seed", type=int, default=0)
    group = parser.add_argument_group("assumptions of the projections")
    for name, help_text in _HELP.items():
        default = getattr(Assumptions, name)
        group.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=help_text)
    group = parser.add_argument_group("the real run")
    group.add_argument("--steps", type=int, default=3000)
    group.add_argument("--every", type=int, default=100, help="steps between saves")
    group.add_argument("--width", type=int, default=512, help="width of the network")
    group.add_argument("--kills", type=float, default=20.0, help="mean seconds between kills; at least the time from a start to the first step")
    options = parser.parse_args(arguments)
    assumed = Assumptions(**{name: getattr(options, name) for name in _HELP})
    if options.plot is not None:
        draw(options.plot, assumed)
        return
    if options.real:
        print(compare_real(options))
        return
    print(table(assumed))
    print()
    print(check(assumed, random.Random(options.seed)))


if __name__ == "__main__":
    main()
