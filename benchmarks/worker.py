"""The process of one peer: `python -m benchmarks.worker PEER WORKLOAD`. It reads commands from standard input, and sleeps while other processes work.

A command is `{"do": "train" | "evaluate" | "predict", "passes": n}`, and an answer is one line of JSON on the original standard output. The peer's own output
goes to a file that claims to be a terminal. The first answer says that the peer is ready, or why it cannot run. The process ends at the end of its input, and
its last answer is its peak memory.
"""

import argparse
import gc
import importlib
import io
import json
import os
import pathlib
import resource
import sys
import tempfile
from collections.abc import Callable
from typing import Any, TextIO

from benchmarks.peers import PEERS, Contender, Setup, Stretch, Unavailable
from benchmarks.workloads import make_workload


class Screen(io.TextIOWrapper):
    """A file that progress bars take for a terminal, so that they draw."""

    def isatty(self) -> bool:
        return True


def open_screen(path: pathlib.Path) -> Screen:
    return Screen(path.open("wb"), encoding="utf-8", line_buffering=True)


def together(stretches: list[Stretch]) -> Stretch:
    """Combines several calls into one, with the values of the last call."""
    return Stretch(sum(each.seconds for each in stretches), max(each.start_seconds for each in stretches), stretches[-1].values)


def carry_out(contender: Contender, command: dict[str, Any], on_first_step: Callable[[], None] | None) -> Stretch:
    gc.collect()
    if command["do"] == "train":
        return contender.train(command["passes"], on_first_step)
    call = {"evaluate": contender.evaluate, "predict": contender.predict}[command["do"]]
    return together([call() for _ in range(command["passes"])])


def peak_mb() -> float:
    """Returns the peak of this process's resident memory in MB."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # `ru_maxrss` would include memory of the process that started this one.
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def device_kind() -> str:
    """Returns the name of the device: `cpu`, or that of a GPU."""
    jax = sys.modules.get("jax")
    return jax.devices()[0].device_kind if jax else "cpu"


def serve(contender: Contender, commands: TextIO, say: Callable[[dict[str, Any]], None], *, say_first: bool) -> None:
    for line in commands:
        first, say_first = (lambda: say({"first_step": True})) if say_first else None, False
        say(carry_out(contender, json.loads(line), first)._asdict())
    say({"peak_mb": peak_mb()})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("workload")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--own-parameters", action="store_true", help="keep the framework's initial parameters, and report when the first step is computed")
    options = parser.parse_args(argv)
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # For the output of C libraries.

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    with tempfile.TemporaryDirectory() as directory, open_screen(pathlib.Path(directory) / "screen") as screen:
        sys.stdout = screen
        setup = Setup(screen, pathlib.Path(directory), options.own_parameters)
        peer = PEERS[options.peer]
        try:
            module = importlib.import_module(f"benchmarks.peers.{peer.module}")
            contender = module.make(make_workload(options.workload, small=options.small), setup, **peer.options)
        except Unavailable as reason:
            say({"unavailable": str(reason)})
        else:
            say({"ready": True, "device": device_kind()})
            serve(contender, sys.stdin, say, say_first=options.own_parameters)
        finally:
            sys.stdout = sys.__stdout__


if __name__ == "__main__":
    main()
