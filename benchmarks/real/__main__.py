"""Trains public models at full size with a hand-written loop, `fit`, and `fit` with typical callbacks, alternately.

    python -m benchmarks.real                              # full models with small batches, on a CPU; about an hour on two cores
    python -m benchmarks.real --gpu                        # full models with real batches, on a GPU; about eight minutes
    python -m benchmarks.real --workload gpt2 gpt2_scan gpt2_nnx --rounds 5 --steps 20
    python -m benchmarks.real --size small --rounds 1      # only to check that it runs
    python -m benchmarks.real --without evaluation others  # in less time

The first two write their tables to benchmarks/RESULTS-real.md; sections of other devices stay. With `--workload` or `--size`, nothing is written without
`--write`.

Each contender is a process. It starts after the first step of the previous one, because XLA measures the speed of kernels on a GPU to choose among them. During
rounds, all contenders but one sleep.

A round is hand, fit, fit, hand, and then the same with a validation every `--every` steps and with saves, and with Keras and Lightning in place of `fit` if
they have an equivalent model and are installed. A ratio compares the mean seconds per step of a round. Some models have more contenders:

* For models in `LOGGED`, a round begins with hand, fit, loggers, loggers, fit, hand. `loggers` is `fit` with TensorBoard, CSVLogger, EarlyStopping,
  TerminateOnNaN and ProgressBar, in three epochs of `--epoch` steps.
* For models in `CALLED`, `fit` with and without `steps_per_call=8` trains on the same batches from an iterator. On a CPU, these models have size `small`.

`--minutes` limits the time. Each workload gets an equal part of the remaining time, runs at least one round, and starts other frameworks only if there is time.
A workload is left out if the remaining time is shorter than the fastest workload took to finish its first round.
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.real.contenders import OTHERS
from benchmarks.real.workloads import NAMES, RealWorkload, make_data, workload_of
from benchmarks.run import Worker, WorkerError, machine, say

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "RESULTS-real.md"
PREAMBLE = "# Real models\n\nWritten by `python -m benchmarks.real`; its docstring describes the method. Ratios are relative to the hand-written loop.\n"
SECONDS = 3600.0
MODULE = "benchmarks.real.worker"
MODELS = ("gpt2", "resnet50", "vit_b16", "unet")
LOGGED: tuple[str, ...] = ("gpt2", "resnet50")
CALLED: tuple[str, ...] = ("resnet50",)  # A batch is 77 MB, so calls have one step.
CALLED_STEPS = 32
OPTIONAL = ("fit8", "fit1", "keras", "lightning")  # Left out if they fail to start.
# The defaults of the command, and those with `--gpu`.
ON_CPU: dict[str, Any] = {"size": "cpu", "rounds": 3, "steps": 6, "every": 24, "epoch": 6}
ON_GPU: dict[str, Any] = {"size": "full", "rounds": 5, "steps": 20, "every": 50, "epoch": 20, "without": ["evaluation", "warm"], "minutes": 7.2}


class Race:
    """One workload, and its measurements.

    Args:
        workload: The model.
        options: The options of the command line.
        seconds: The time for its rounds to end.

    Attributes:
        least: The seconds until the end of the first round.
    """

    least = math.inf

    def __init__(self, workload: RealWorkload, options: argparse.Namespace, seconds: float = math.inf) -> None:
        self.workload, self.options, self._end = workload, options, time.monotonic() + seconds
        self.found: dict[str, Any] = {"workload": workload.name, "size": options.size, "rounds": []}

    def run(self) -> dict[str, Any]:
        """Returns all measurements."""
        started = time.monotonic()
        with ExitStack() as stack:
            workers = self._start(stack)
            self.found["flops"] = workers["hand"].ask("flops", seconds=SECONDS)["flops"]
            self.found["matmul"] = workers["hand"].ask("matmul", steps={"small": 256, "cpu": 1024, "full": 8192}[self.options.size], seconds=SECONDS)["matmul"]
            for who in ("hand", "fit") if self._evaluates else ():
                for do in ("evaluate", "predict"):
                    workers[who].ask(do, seconds=SECONDS)  # Compiles.
            for who in ("hand", "fit+everything") if self._has("everything") else ():
                workers[who].ask("train", steps=self.options.every, validates=True, seconds=SECONDS)  # Compiles the validation, and saves for the first time.
            if self._has_loggers:
                workers["fit+everything"].ask("train", steps=1, epoch=1, seconds=SECONDS)  # Compiles the step that detects NaN.
            took = 0.0
            for number in range(self.options.rounds):
                begin = time.monotonic()
                if number and begin + took > self._end:
                    break
                self.found["rounds"].append(self._round(workers))
                took = time.monotonic() - begin
                self.least = min(self.least, time.monotonic() - started)
                say(f"{self.workload.name}: round {number + 1} of {self.options.rounds}: {_ratio(self.found, 'fit', -1):.3f}")
            self.found["ends"] = {who: worker.finish() for who, worker in workers.items()}
        if "warm" not in self.options.without:
            with tempfile.TemporaryDirectory() as cache:
                self.found["warm"] = self._warm_starts(cache)
        return self.found

    def _has(self, what: str) -> bool:
        return what not in self.options.without

    @property
    def _evaluates(self) -> bool:
        return self._has("evaluation")

    @property
    def _has_loggers(self) -> bool:
        return self._has("loggers") and self.workload.name in LOGGED

    @property
    def _has_calls(self) -> bool:
        return self._has("calls") and self.workload.name in CALLED

    @property
    def _single_steps(self) -> str:
        """The contender that `steps_per_call=8` is compared with: `fit`, or `fit1` if the size is different."""
        return "fit" if _size_of_calls(self.options.size) == self.options.size else "fit1"

    def _contenders(self) -> dict[str, tuple[str, str]]:
        """Returns the kind and the size of each contender, by name."""
        size = self.options.size
        names = ["hand", "fit", *["fit+everything"] * (self._has("everything") or self._has_loggers)]
        found = {name: (name, size) for name in names}
        if self._has_calls:
            called = _size_of_calls(size)
            found |= {"fit8": ("fit8", called), self._single_steps: ("fit", called)}
        return found | {who: (who, size) for who in OTHERS.get(self.workload.name, ()) if self._has("others")}

    def _start(self, stack: ExitStack) -> dict[str, Worker]:
        """Starts the contenders one after another. Other frameworks start only if there is time."""
        workers, starts = dict[str, Worker](), self.found.setdefault("starts", {})
        for name, (who, size) in self._contenders().items():
            if name in OTHERS.get(self.workload.name, ()) and time.monotonic() > self._end:
                say(f"{self.workload.name}: {name} is left out: there is no time")
                continue
            say(f"{self.workload.name}: {name} starts")
            worker = stack.enter_context(self._worker(who, size=size))
            try:
                starts[name] = worker.read(SECONDS)
            except WorkerError as error:
                if name not in OPTIONAL:
                    raise
                say(f"{self.workload.name}: {name} is left out: {error}")
            else:
                workers[name] = worker
        return workers

    def _worker(self, who: str, environment: Mapping[str, str] | None = None, *, size: str | None = None) -> Worker:
        arguments = (self.workload.name, size or self.options.size, "--every", str(self.options.every))
        return Worker(who, *arguments, module=MODULE, environment=environment or {})

    def _round(self, workers: Mapping[str, Worker]) -> dict[str, Any]:
        pairs: list[list[tuple[str, str, dict[str, Any]]]] = [[("hand", "hand", {}), ("fit", "fit", {})]]
        if self._has_loggers:
            pairs[0].append(("loggers", "fit+everything", {"steps": 3 * self.options.epoch, "epoch": self.options.epoch}))
        if self._has("everything"):
            long = {"validates": True, "steps": max(self.options.steps, self.options.every)}  # At least one save.
            pairs.append([("hand validating", "hand", long), ("everything", "fit+everything", long)])
        if {"fit8", self._single_steps} <= workers.keys():
            calls = {"steps": CALLED_STEPS, "iterates": True}
            pairs.append([("single steps", self._single_steps, calls), ("calls", "fit8", calls)])
        pairs += [[(f"hand beside {who}", "hand", {}), (who, who, {})] for who in ("keras", "lightning") if who in workers]
        answers: dict[str, list[Any]] = {}
        for pair in pairs:
            for name, who, given in [*pair, *reversed(pair)]:
                options = {"steps": self.options.steps, **given}
                answers.setdefault(name, []).append(workers[who].ask("train", seconds=SECONDS, **options) | {"steps": options["steps"]})
        for do in ("evaluate", "predict") if self._evaluates else ():
            for who in ("hand", "fit", "fit", "hand"):
                answers.setdefault(f"{who} {do}", []).append(workers[who].ask(do, seconds=SECONDS))
        return answers

    def _warm_starts(self, cache: str) -> dict[str, float]:
        """Returns the seconds from start to first step with a compilation cache that an earlier process has filled."""
        environment = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        found = {}
        for who in ("hand", "fit"):
            for _ in range(2):
                with self._worker(who, environment) as worker:
                    found[who] = worker.read(SECONDS)["start_seconds"]
                    worker.finish()
        return found


def _size_of_calls(size: str) -> str:
    return "small" if size == "cpu" else size  # On a CPU, convolutions in a call of several steps are four times as slow.


def _mean(answers: Sequence[Mapping[str, Any]], what: str = "seconds") -> float:
    """Returns the mean per step, or per evaluation or prediction."""
    return statistics.mean(answer[what] / answer.get("steps", 1) for answer in answers)


# The columns of the two tables.
STEPS = (
    "model",
    "hand ms/step",
    "fit / hand",
    "everything / hand",
    "host ms/step, hand, fit",
    "evaluate",
    "predict",
    "start to first step s, hand, fit",
    "ratio",
    "with a warm cache",
)
RESOURCES = (
    "model",
    "compilations, hand, fit",
    "compile s, hand, fit",
    "peak MB of the host, hand, fit, everything",
    "peak MB of the device",
    "fit / hand",
    "pause s, median, worst",
    "per second",
    "GFLOP/s",
    "MFU",
)
# With TensorBoard, CSVLogger, EarlyStopping, TerminateOnNaN and ProgressBar.
LOGGERS = ("model", "loggers / hand", "host ms/step, hand, loggers")
# For `steps_per_call=8`.
CALLS = ("model, batches of an iterator", "MB of a batch", "ms/step, single steps", "`steps_per_call=8` / single steps", "host ms/step, single steps, calls")
# For other frameworks.
FRAMEWORKS = ("model", "framework", "framework / hand", "`fit` / framework", "start to first step s", "peak MB", "loss of the last stretch, and `fit`'s")
_BASES = {
    "fit": "hand",
    "loggers": "hand",
    "calls": "single steps",
    "everything": "hand validating",
    "fit evaluate": "hand evaluate",
    "fit predict": "hand predict",
    **{who: f"hand beside {who}" for who in ("keras", "lightning")},
}


def _ratio(found: Mapping[str, Any], name: str, number: int) -> float:
    one = found["rounds"][number]
    return _mean(one[name]) / _mean(one[_BASES[name]])


def _spread(found: Mapping[str, Any], name: str) -> str:
    if name not in found["rounds"][0]:
        return "-"
    return _in_words([_ratio(found, name, number) for number in range(len(found["rounds"]))])


def _in_words(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}..{max(ratios):.2f})"


def _host(found: Mapping[str, Any], *names: str) -> str:
    """Returns the CPU milliseconds of the training thread per step, as medians over all rounds."""
    return ", ".join(f"{statistics.median(_mean(one[name], 'host_seconds') * 1e3 for one in found['rounds']):.3g}" for name in names)


def table(results: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> str:
    """Returns the measurements as Markdown."""
    lines, memory = [_row(STEPS), _row(["---"] * len(STEPS))], [_row(RESOURCES), _row(["---"] * len(RESOURCES))]
    for found in results:
        workload, rounds = workload_of(found["workload"]), found["rounds"]
        hand, fit = (found["starts"][who] for who in ("hand", "fit"))
        times = {name: [_mean(one[name]) for one in rounds] for name in ("hand", "fit")}
        median = {name: statistics.median(seconds) for name, seconds in times.items()}
        warm = found.get("warm")
        lines.append(
            _row(
                (
                    workload.about,
                    f"{median['hand'] * 1e3:.4g} ({min(times['hand']) * 1e3:.4g}..{max(times['hand']) * 1e3:.4g})",
                    *(_spread(found, name) for name in ("fit", "everything")),
                    _host(found, "hand", "fit"),
                    *(_spread(found, f"fit {do}") for do in ("evaluate", "predict")),
                    f"{hand['start_seconds']:.1f}, {fit['start_seconds']:.1f}",
                    f"{fit['start_seconds'] / hand['start_seconds']:.2f}",
                    f"{warm['hand']:.1f}, {warm['fit']:.1f}: {warm['fit'] / warm['hand']:.2f}" if warm else "-",
                )
            )
        )
        ends = found["ends"]
        ours = [who for who in ("hand", "fit", "fit+everything") if who in ends]
        host_peaks, device_peaks = ([ends[who][name] for who in ours] for name in ("peak_mb", "device_peak_mb"))
        peaks = host_peaks if None in device_peaks else device_peaks
        pauses = [pause for one in rounds for answer in one.get("everything", ()) for pause in answer["pauses"]]
        rate = found["flops"] / median["fit"] if found["flops"] else None
        memory.append(
            _row(
                (
                    workload.about,
                    f"{hand['compilations']}, {fit['compilations']}",
                    f"{hand['compile_seconds']:.1f}, {fit['compile_seconds']:.1f}",
                    ", ".join(f"{peak:.0f}" for peak in host_peaks),
                    "-" if None in device_peaks else ", ".join(f"{peak:.0f}" for peak in device_peaks),
                    f"{peaks[1] / peaks[0]:.2f}",
                    f"{statistics.median(pauses):.3f}, {max(pauses):.3f}" if pauses else "-",
                    f"{workload.units_of_batch(options.size) / median['fit']:.4g} {workload.unit}",
                    "-" if rate is None else f"{rate / 1e9:.4g}",
                    "-" if rate is None else f"{rate / found['matmul']:.2f}",
                )
            )
        )
    more = {
        LOGGERS: [
            _row((workload_of(found["workload"]).about, _spread(found, "loggers"), _host(found, "hand", "loggers")))
            for found in results
            if "loggers" in found["rounds"][0]
        ],
        CALLS: [_calls(found) for found in results if "calls" in found["rounds"][0]],
        FRAMEWORKS: [row for found in results for row in _frameworks(found)],
    }
    return "\n".join([*lines, "", *memory, *(line for head, rows in more.items() if rows for line in ("", _row(head), _row(["---"] * len(head)), *rows))])


def _calls(found: Mapping[str, Any]) -> str:
    """Returns the row of several steps per call."""
    workload, size = workload_of(found["workload"]), _size_of_calls(found["size"])
    x, y = make_data(workload, size, 1)
    single = statistics.median(_mean(one["single steps"]) for one in found["rounds"]) * 1e3
    megabytes, host = (x.nbytes + y.nbytes) / 1e6, _host(found, "single steps", "calls")
    return _row((f"{workload.about}, size {size}", f"{megabytes:.3g}", f"{single:.4g}", _spread(found, "calls"), host))


def _frameworks(found: Mapping[str, Any]) -> list[str]:
    """Returns a row for each other framework that was measured."""
    rows, rounds = [], found["rounds"]
    for who in (name for name in ("keras", "lightning") if name in found["ends"]):
        beside = [_ratio(found, "fit", number) / _ratio(found, who, number) for number in range(len(rounds))]
        losses = ", ".join(f"{rounds[-1][name][-1]['loss']:.3g}" for name in (who, "fit"))
        start, peak = found["starts"][who]["start_seconds"], found["ends"][who]["peak_mb"]
        rows.append(_row((workload_of(found["workload"]).about, who, _spread(found, who), _in_words(beside), f"{start:.1f}", f"{peak:.0f}", losses)))
    return rows


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def merged(earlier: str, device: str, text: str) -> str:
    """Returns the contents of the file of results with the section of a device replaced. Sections of other devices stay."""
    _, *parts = re.split(r"^## ", earlier, flags=re.MULTILINE)
    sections = {name: content.strip() for name, _, content in (part.partition("\n") for part in parts)} | {device: text}
    return "\n".join([PREAMBLE, *(f"## {name}\n\n{content}\n" for name, content in sections.items())])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options of the command line; those not given depend on `--gpu`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="real batches, in about eight minutes; defaults: " + str(ON_GPU))
    parser.add_argument("--workload", nargs="+", choices=NAMES, help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--size", choices=("cpu", "full", "small"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="of a stretch")
    parser.add_argument("--every", type=int, help="steps between two validations and saves")
    parser.add_argument("--epoch", type=int, help="steps of an epoch with loggers")
    parser.add_argument("--without", nargs="+", choices=("everything", "loggers", "calls", "evaluation", "warm", "others"), help="what is left out")
    parser.add_argument("--minutes", type=float, help="when to end; by default, after all rounds")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--write", nargs="?", type=pathlib.Path, const=RESULTS)
    options = parser.parse_args(argv)
    is_whole = options.workload is None and options.size is None
    defaults = {"workload": MODELS, "without": [], "minutes": math.inf, "write": RESULTS if is_whole else None, **(ON_GPU if options.gpu else ON_CPU)}
    return argparse.Namespace(**{name: defaults.get(name) if value is None else value for name, value in vars(options).items()})


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a workload failed."""
    options = parse(sys.argv[1:] if argv is None else argv)
    end, results, missing = time.monotonic() + 60 * options.minutes, list[dict[str, Any]](), dict[str, str]()
    least = math.inf
    for number, name in enumerate(options.workload):
        left = end - time.monotonic()
        if results and left < least:
            missing[name] = "there was no time"
            continue
        try:
            race = Race(workload_of(name), options, left / (len(options.workload) - number))
            results.append(race.run())
            least = min(least, race.least)
        except WorkerError as error:
            missing[name] = str(error)
            continue
        if options.json:
            options.json.write_text(json.dumps(results), encoding="utf-8")
    for name, reason in missing.items():
        say(f"{name} is left out: {reason}")
    if not results:
        return 1
    device = results[0]["starts"]["hand"]["device"]
    here = machine()
    versions = ", ".join(f"{name} {here[name]}" for name in ("jax", "flax", "optax"))
    size = f"size {options.size}, up to {options.rounds} rounds of {options.steps} steps, {options.every} between saves"
    text = f"{here['date']}, {device}, {here['cores']} CPU cores, {versions}; {size}.\n\n{table(results, options)}"
    if missing:
        text += f"\n\nLeft out: {'; '.join(f'{name}: {reason}' for name, reason in missing.items())}."
    print(text)
    if options.write:
        earlier = options.write.read_text(encoding="utf-8") if options.write.exists() else ""
        options.write.write_text(merged(earlier, device, text), encoding="utf-8")
    return int(bool(missing))


if __name__ == "__main__":
    raise SystemExit(main())
