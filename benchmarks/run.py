"""Runs each peer in a separate process, with the same data, model, optimizer and metrics, and prints how long they take.

    python -m benchmarks.run                                    # everything, about 40 minutes
    python -m benchmarks.run --workload mlp --peers jit control fit
    python -m benchmarks.run --quick                            # tiny and mlp, two minutes
    python -m benchmarks.run --write                            # also writes to benchmarks/RESULTS.md
    python -m benchmarks.run --write benchmarks/RESULTS-gpu.md  # or to another file

All processes of a workload exist at the same time, and all except one sleep. Each compiles and warms up, and the losses are compared: peers that take the same
batches must agree to 1e-5, on a GPU to 5e-3. Then the rounds begin. In a round, each peer in turn runs base, peer, peer, base, with the same number of steps
each time.
"""

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import pathlib
import platform
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from benchmarks import compare, report
from benchmarks.peers import PEERS, peers_of
from benchmarks.workloads import NAMES, Workload, make_workload

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = pathlib.Path(__file__).resolve().parent / "RESULTS.md"
QUICK = {"workloads": ("tiny", "mlp"), "rounds": 3}
MIN_ROUNDS = 3
START_SECONDS = 300.0  # The time limit for a peer to compile and warm up.
STRETCH_SECONDS = 300.0
DISTRIBUTIONS = ("jax", "jaxlib", "flax", "optax", "numpy", "keras", "torch", "lightning")


class WorkerError(Exception):
    """Raised when a peer fails. The message ends with the last output of its process."""


class Worker:
    """The process of one peer.

    Args:
        peer: The peer's name.
        arguments: The arguments of its module: a workload, and how it is trained.
        module: The module that is run.
        environment: Variables in addition to this process's.
    """

    def __init__(self, peer: str, *arguments: str, module: str = "benchmarks.worker", environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self.peer = peer
        self.missing: str | None = None
        self.device = "cpu"
        self.started = time.perf_counter()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}
        variables.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # The processes share the GPU's memory.
        variables.pop("JAX_COMPILATION_CACHE_DIR", None)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, peer, *arguments],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**variables, **environment},
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *args: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._said):
            file.close()

    def read(self, seconds: float) -> dict[str, Any]:
        """Returns the next answer.

        Raises:
            WorkerError: No answer came in time, or the process ended.
        """
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise WorkerError(f"no answer within {seconds:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                raise WorkerError(f"the process ended with: {self._last_words()}")
            line += piece
        return json.loads(line)

    def _last_words(self) -> str:
        self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def send(self, do: str, **options: Any) -> None:
        """Sends a command without waiting for its answer."""
        try:
            self._process.stdin.write(f"{json.dumps({'do': do, **options})}\n".encode())
        except BrokenPipeError as error:
            raise WorkerError(f"the process ended with: {self._last_words()}") from error

    def ask(self, do: str, *, seconds: float = STRETCH_SECONDS, **options: Any) -> dict[str, Any]:
        """Returns the answer to a command."""
        self.send(do, **options)
        return self.read(seconds)

    def get_ready(self) -> None:
        """Waits until the peer accepts commands, and records its `device`; if the peer reports that it cannot run, `missing` is the reason."""
        answer = self.read(START_SECONDS)
        self.missing, self.device = answer.get("unavailable"), answer.get("device", "cpu")

    def finish(self) -> dict[str, Any]:
        """Ends the process normally, and returns its last answer, with `peak_mb`, the peak of its resident memory."""
        self._process.stdin.close()
        last = self.read(STRETCH_SECONDS)
        if self._process.wait():
            raise WorkerError(f"the process ended with: {self._last_words()}")
        return last


def _small(small: bool) -> list[str]:
    return ["--small"] if small else []


def say(text: str) -> None:
    print(f"{dt.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def run_process(peer: str, workload: Workload, *, small: bool) -> dict[str, float] | None:
    """Returns the times and memory of a whole process that trains for one pass, started from a shell; `None` if the peer cannot run here."""
    with Worker(peer, workload.name, "--own-parameters", *_small(small)) as worker:
        worker.get_ready()
        if worker.missing:
            return None
        worker.send("train", passes=1)
        worker.read(START_SECONDS)
        first_step = time.perf_counter() - worker.started
        worker.read(STRETCH_SECONDS)
        peak = worker.finish()["peak_mb"]
        return {"first_step_s": first_step, "process_s": time.perf_counter() - worker.started, "peak_mb": peak}


class Field:
    """The peers of one workload: their processes, answers and times.

    Args:
        workload: The workload.
        peers: The peers' names; the first one is the base.
        small: Whether to use small sizes.
    """

    def __init__(self, workload: Workload, peers: tuple[str, ...], *, small: bool) -> None:
        self.workload, self.peers, self.small = workload, peers, small
        self.base = peers[0]
        self.missing: dict[str, str] = {}
        self.failed = False
        self.device = "cpu"
        self.values: dict[str, dict[str, dict[str, float]]] = {}
        self.starts: dict[tuple[str, str], list[float]] = {}
        self.times: compare.Times = {}
        self.processes: dict[str, dict[str, float]] = {}
        self._workers: dict[str, Worker] = {}

    def operations(self, peer: str) -> tuple[str, ...]:
        reads = PEERS[peer].evaluates and self.workload.kind != "digits"
        return ("train", "evaluate", "predict") if reads else ("train",)

    def _leave_out(self, peer: str, reason: str, *, failed: bool) -> None:
        """Continues without a peer.

        Raises:
            WorkerError: The peer is the base.
        """
        say(f"{self.workload.name}: {peer} is left out: {reason}")
        if peer == self.base:
            raise WorkerError(f"{peer} on {self.workload.name}: {reason}")
        self.missing[peer], self.failed = reason, self.failed or failed
        self._workers.pop(peer).__exit__()

    def start(self, stack: ExitStack) -> None:
        """Starts all peers one after the other. Each compiles and warms up with the same steps, and its values are compared with the base's."""
        for peer in self.peers:
            self._workers[peer] = worker = stack.enter_context(Worker(peer, self.workload.name, *_small(self.small)))
            try:
                worker.get_ready()
                if worker.missing:
                    self._leave_out(peer, worker.missing, failed=False)
                    continue
                self.values[peer] = self._warm_up(peer, worker)
                if peer == self.base:
                    self.device = worker.device
            except WorkerError as error:
                self._leave_out(peer, str(error), failed=True)
                continue
            found, base = self.values[peer], self.values[self.base]
            wrong = [f"{do}: {text}" for do in found if (text := self._disagreement(peer, found[do], base[do]))]
            if wrong:
                self._leave_out(peer, f"does different work than {self.base}: {'; '.join(wrong)}", failed=True)
            else:
                say(f"{self.workload.name}: {peer} is ready, loss {found['train']['loss']:.7g}")

    def _disagreement(self, peer: str, values: dict[str, float], base: dict[str, float]) -> str | None:
        return compare.disagreement(values, base, exact=PEERS[peer].is_exact, device=self.device)

    def _warm_up(self, peer: str, worker: Worker) -> dict[str, dict[str, float]]:
        """Returns the values of the first stretch by operation. Everything runs twice, because a second run may take another path through the caches.

        The values are those of the first run. Evaluation and prediction come before training, because training amplifies rounding errors: convolutions in a
        `scan` use another kernel, and differ by 1e-4 after 64 steps of Adam. On a GPU, two processes of the same program may use different kernels.
        """
        found: dict[str, dict[str, float]] = {}
        for do in reversed(self.operations(peer)):
            for _ in range(2):
                answer = worker.ask(do, passes=self.workload.passes if do == "train" else 1, seconds=START_SECONDS)
                found.setdefault(do, answer["values"])
        return found

    def _stretch(self, peer: str, do: str) -> float:
        answer = self._workers[peer].ask(do, passes=self.workload.passes)
        self.starts.setdefault((peer, do), []).append(answer["start_seconds"])
        return answer["seconds"]

    def _pairs(self) -> Iterator[tuple[str, str]]:
        for peer in self.peers[1:]:
            for do in self.operations(peer):
                if peer in self._workers:
                    yield peer, do

    def run_round(self) -> None:
        """Runs each peer next to the base.

        Raises:
            WorkerError: The base failed.
        """
        for peer, do in self._pairs():
            found = []
            for each in (self.base, peer, peer, self.base):
                if peer in self._workers:
                    try:
                        found.append(self._stretch(each, do))
                    except WorkerError as error:
                        self._leave_out(each, str(error), failed=True)
            if peer in self._workers:
                self.times.setdefault(do, {}).setdefault(peer, []).append((found[0], found[1], found[2], found[3]))

    def result(self) -> dict[str, Any]:
        """Returns all results as JSON-compatible values."""
        steps = self.workload.steps * self.workload.passes
        peers = {peer: self._result_of(peer, steps) for peer in self.peers}
        rounds = max((len(rounds) for rounds in self.times.get("train", {}).values()), default=0)
        claims = [compare.as_json(claim) for claim in compare.claims(self.workload.name, self.times, steps)]
        named = {"workload": self.workload.name, "small": self.small, "base": self.base, "rounds": rounds, "steps": steps, "device": self.device}
        return named | {"claims": claims, "peers": peers, "failed": self.failed}

    def _result_of(self, peer: str, steps: int) -> dict[str, Any]:
        found: dict[str, Any] = {"missing": self.missing.get(peer)}
        if found["missing"]:
            return found
        for do in self.operations(peer):
            # The base has no separate rounds. Use those of its control, which come first.
            rounds_of = self.peers[1] if peer == self.base and len(self.peers) > 1 else peer
            us = compare.microseconds(self.times, do, rounds_of, steps, base=peer == self.base)
            starts = self.starts.get((peer, do), [])
            ratio = None if peer == self.base else compare.as_json(compare.ratio(self.times, do, peer))
            found[do] = {"us": us, "ratio": ratio, "start_ms": compare.spread(starts).median * 1e3 if starts else None}
        return found | {"values": self.values[peer], "process": self.processes.get(peer)}


def measure(workload: Workload, peers: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the results for a workload.

    Raises:
        WorkerError: The base failed.
    """
    field = Field(workload, peers, small=options.small)
    if not options.quick:
        for peer in peers:
            if PEERS[peer].has_process and workload.kind != "digits":
                try:
                    found = run_process(peer, workload, small=options.small)
                except WorkerError as error:
                    say(f"{workload.name}: a process of {peer} failed: {error}")
                    continue
                if found is not None:
                    field.processes[peer] = found
    rounds = options.rounds or (QUICK["rounds"] if options.quick else workload.rounds)
    with ExitStack() as stack:
        field.start(stack)
        began = time.monotonic()
        for index in range(rounds):
            if index >= MIN_ROUNDS and (time.monotonic() - began) * (index + 1) / index > options.minutes * 60:
                say(f"{workload.name}: stopping after {index} of {rounds} rounds and {time.monotonic() - began:.0f} s")
                break
            field.run_round()
    say(f"{workload.name}: done")
    return field.result()


def machine() -> dict[str, Any]:
    """Returns the properties of the machine that the numbers depend on."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    models = [line.partition(":")[2].strip() for line in open_or_empty("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    here = {"date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}", "cores": os.cpu_count(), "processor": models[0] if models else platform.machine()}
    return here | {"platform": platform.platform(), "python": platform.python_version()} | versions


def open_or_empty(path: str | pathlib.Path) -> str:
    file = pathlib.Path(path)
    return file.read_text(encoding="utf-8") if file.exists() else ""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m benchmarks.run")
    parser.add_argument("--workload", nargs="+", choices=NAMES, help="default: all")
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="default: all; the base is always included")
    parser.add_argument("--rounds", type=int, help="default: depends on the workload")
    parser.add_argument("--minutes", type=float, default=3.0, help=f"time limit for each workload, after at least {MIN_ROUNDS} rounds (default: 3)")
    parser.add_argument("--quick", action="store_true", help="only tiny and mlp, with few rounds and without whole processes")
    parser.add_argument("--small", action="store_true", help="small models and little data, to check that the benchmark runs")
    parser.add_argument("--json", type=pathlib.Path, help="write all numbers to this JSON file")
    parser.add_argument("--write", nargs="?", type=pathlib.Path, const=RESULTS, metavar="FILE", help="write the tables to this file; default: RESULTS.md")
    options = parser.parse_args(argv)
    if options.write and (options.small or options.peers):
        parser.error("--write cannot be combined with --small or --peers.")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1.")
    return options


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes. Returns 1 if a peer failed or did different work, whatever the verdicts."""
    options = parse(argv)
    here, results, failed = machine(), [], False
    for name in options.workload or (QUICK["workloads"] if options.quick else NAMES):
        everyone = peers_of(name)
        peers = tuple(peer for index, peer in enumerate(everyone) if index == 0 or not options.peers or peer in options.peers)
        try:
            results.append(measure(make_workload(name, small=options.small), peers, options))
        except WorkerError as error:
            say(f"not measured: {error}")
            failed = True
            continue
        print(report.section(results[-1], here), flush=True)
        if options.json:  # Written after each workload, so that an interrupted run keeps its results.
            options.json.write_text(json.dumps({"machine": here, "results": results}, indent=2) + "\n", encoding="utf-8")
        if options.write:
            text = open_or_empty(options.write)
            options.write.write_text(report.merged(text, {name: report.section(results[-1], here)}), encoding="utf-8")
    return int(failed or any(result["failed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
