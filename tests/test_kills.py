"""Real training processes that are killed repeatedly at random moments end bit-for-bit identical to one that was never killed.

Everything that a run leaves behind is compared bit for bit: the last state, History, CSV, TensorBoard, and every checkpoint with all callbacks' states in it.
Measured times are excluded. A test that fails reports what happened to its run, and the seed. The seed determines all decisions, but the moments of kills also
depend on the machine, so it may take more than one attempt to reproduce a failure.

`FITFLAX_SOAK=200 pytest tests/test_kills.py` kills 200 times; `FITFLAX_SOAK_SEED=2` makes other decisions.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from fitflax.checkpoints import CheckpointStore
from tests.run_script import differences, directory_of

SCRIPT = pathlib.Path(__file__).with_name("kill_script.py")
# With more than this in one run, it would hardly make progress between two of them.
MAX_KILLS_A_RUN = 5

# The script's arguments. A callback may end a run, or it ends with an epoch, or inside one, which is then closed without being recorded in its checkpoint.
RUNS = {
    "a run that a callback stops": {"fit": {"epochs": 20}},
    "a run that ends inside an epoch": {"fit": {"steps": 222}},
    "a run of an NNX module that waits for its saves": {"fit": {"steps": 150}, "kind": "nnx", "checkpoint": {"asynchronous": False}},
    "a run with a large state and one directory for all": {"fit": {"steps": 222}, "hidden": 640, "best": "checkpoints"},
    "a run that saves with Orbax": {"fit": {"steps": 106}, "checkpoint": {"backend": "orbax"}},
    "a run whose state is split over four devices": {"fit": {"steps": 64}, "devices": 4},
    "a run of an NNX module that is split over four devices": {"fit": {"steps": 64}, "kind": "nnx", "devices": 4},
}
IN_EVERY_TEST_RUN = list(RUNS)[:1]
KILLED = [name for name in RUNS if name != "a run that ends inside an epoch"]  # Others do, too; test_kills_in_bucket.py kills it.
SOAK = int(os.environ.get("FITFLAX_SOAK", "0"))
SEED = int(os.environ.get("FITFLAX_SOAK_SEED", "1"))

# How processes die, in turn: after a random number of steps (and some milliseconds more), while saving a checkpoint, just before changing a name on the disk,
# while validating or closing an epoch, around the end of the run, and while starting.
HOWS = ("step", "saving", "epoch", "file event", "saving", "step", "saving", "file event", "epoch", "ending", "saving", "step", "file event", "start")

# What happens to the newest checkpoint before about half of the starts.
DAMAGES = (
    "state truncated",
    "metadata flipped",
    "litter",
    "state flipped",
    "directory deleted",
    "metadata missing",
    "state empty",
    "every checkpoint",
    "metadata truncated",
    "litter",
    "state missing",
    "metadata empty",
)


@dataclasses.dataclass
class Run:
    """The processes of one run, one after the other, and what happened to them.

    Attributes:
        root: The directory that they write to.
        env: Their environment.
        arguments: Their arguments, which are always the same.
        notes: What happened, for error messages.
        foreign: Names that were put among the checkpoints and do not belong to the run.
    """

    root: pathlib.Path
    env: dict[str, str]
    arguments: dict[str, Any]
    notes: list[str] = dataclasses.field(default_factory=list)
    foreign: set[str] = dataclasses.field(default_factory=set)

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.root / "checkpoints")

    def newest_good(self) -> int:
        """Returns the step of the newest checkpoint that is complete and undamaged; 0 if there is none."""
        return self.newest_good_and_damaged()[0]

    def newest_good_and_damaged(self) -> tuple[int, list[str]]:
        """Returns the result of `newest_good`, and the names of newer checkpoints, which are damaged."""
        saved, damaged = self.store.newest_good()
        return 0 if saved is None else int(saved.metadata["step"]), [str(error).partition(":")[0] for error in damaged]

    def start(self, **more: Any) -> "Process":
        self.root.mkdir(exist_ok=True)
        return Process(self, {"directory": str(self.root), **self.arguments, **more})

    def finish(self) -> None:
        """Starts a process that completes the run."""
        process = self.start()
        assert process.ended(), "The process did not end."

    def result(self) -> dict[str, Any]:
        result = json.loads((self.root / "result.json").read_text())
        del result["file_events"]  # They belong to one process.
        return dict(result)


class Process:
    """One process of a run, watched by the lines that it prints."""

    def __init__(self, run: Run, arguments: dict[str, Any]) -> None:
        self.run = run
        self.errors = run.root.with_name(f"{run.root.name}.stderr")
        self.good, self.damaged = run.newest_good_and_damaged()
        with self.errors.open("w") as errors:
            command = [sys.executable, str(SCRIPT), json.dumps(arguments)]
            self.popen = subprocess.Popen(command, env=run.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.began: int | None = None

    def until(self, reached: Callable[[str, int], bool]) -> bool:
        """Reads lines until `reached(what, step)` is true; returns whether there was such a line."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            what, _, step = line.rstrip("\n").partition(" ")
            assert step.isdigit(), f"It printed {line!r}."
            if what == "began":
                self.began = int(step)
                assert self.began >= self.good, f"It began at step {self.began}, but there was a good checkpoint of step {self.good}."
                silent = [name for name in self.damaged if f"skipped a damaged checkpoint: {name}" not in self.errors.read_text()]
                assert not silent, f"It did not say that it skipped {silent}."
            if reached(what, int(step)):
                return True
        return False

    def until_saving(self) -> bool:
        """Waits until a checkpoint is being written; returns whether one was."""
        while self.popen.poll() is None:
            for directory in self.run.root.glob("*"):
                if directory.is_dir() and any(name.startswith(".step_") for name in os.listdir(directory)):
                    return True
        return False

    def kill(self) -> bool:
        """Kills it; returns whether it was still running."""
        self.popen.kill()
        return not self.ended()

    def ended(self) -> bool:
        """Waits until it ends; returns whether it ended by itself rather than by SIGKILL."""
        self.until(lambda what, step: False)
        status = self.popen.wait(timeout=120)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        assert status in (0, -signal.SIGKILL), f"exit status {status}\n{self.errors.read_text()}"
        return status == 0


# -- killing --


def kill_once(run: Run, how: str, rng: np.random.Generator, *, end_step: int, share: float) -> bool:
    """Starts a process and kills it, on average after `share` of its remaining steps; returns whether it was still running."""
    began = run.newest_good()
    steps = began + 1 + int(rng.uniform(0, 2 * share) * (end_step - began))
    milliseconds = float(rng.choice([0.0, rng.uniform(0, 2), rng.uniform(0, 20)]))
    events = int(np.exp(rng.uniform(0, np.log(40 + 3 * (end_step - began) * share))))
    process = run.start(**({"die_at_file_event": events} if how == "file event" else {}))
    if how == "start":
        milliseconds = float(rng.uniform(0, 2000))
    elif how == "step":
        process.until(lambda what, step: step >= steps)
    elif how == "epoch":
        process.until(lambda what, step: step >= steps and what in ("validating", "epoch"))
    elif how == "ending":
        steps = end_step - int(rng.integers(0, 4))
        process.until(lambda what, step: step >= steps)
    elif how == "saving":
        milliseconds /= 4
        _ = process.until(lambda what, step: step >= steps) and process.until_saving()
    if how != "file event":
        time.sleep(milliseconds / 1000)  # There is nothing to wait for here: any moment will do.
    was_running = not process.ended() if how == "file event" else process.kill()
    good = run.newest_good()
    moment = f"event {events}" if how == "file event" else f"step {steps} and {milliseconds:.3f} ms"
    run.notes.append(f"{how}: {'killed' if was_running else 'ended before it was killed'} ({moment}); began at {process.began}, left {good}")
    # Nothing that was saved is lost: the checkpoint that a process resumes from stays until there is a better one.
    assert good >= began, f"There was a good checkpoint of step {began}, and now there is none of it or a later one."
    return was_running


def damage(run: Run, how: str, rng: np.random.Generator) -> None:
    """Damages the newest checkpoint, or adds files next to it, as disks and people do."""
    steps = run.store.steps()
    if how == "litter":
        add_litter(run, steps, rng)
    elif not steps:
        run.notes.append(f"   damage: {how}: there is none yet")
        return
    elif how == "directory deleted":
        shutil.rmtree(run.store.path(steps[-1]))
    elif how == "every checkpoint":
        for step in steps:
            damage_file(run.store.path(step), "state flipped", rng)
    else:
        damage_file(run.store.path(steps[-1]), how, rng)
    run.notes.append(f"   damage: {how}: of {steps[-4:]}, {run.newest_good()} is the newest good one now")


def damage_file(directory: pathlib.Path, how: str, rng: np.random.Generator) -> None:
    what, kind = how.split(" ")
    # One of several files if another backend has written the state.
    states = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size and path.suffix != ".json")
    path = directory / "metadata.json" if what == "metadata" else states[rng.integers(len(states))]
    content = bytearray(path.read_bytes())
    if kind == "flipped":
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    elif kind == "truncated":
        del content[rng.integers(len(content)) :]
    elif kind == "empty":
        content.clear()
    if kind == "missing":
        path.unlink()
    else:
        path.write_bytes(content)


def add_litter(run: Run, steps: list[int], rng: np.random.Generator) -> None:
    """Adds what a process that died while writing would leave, and files that do not belong to the run."""
    directory = run.root / "checkpoints"
    for name in (".step_00000021.tmp-0123abcd-0123abcd", ".trash-0123abcd"):
        (directory / name).mkdir(parents=True)
        (directory / name / "state.msgpack").write_bytes(rng.bytes(1000))
    (directory / ".retention.json.tmp-0123abcd-4567cdef").write_text('{"format_version": 1, "own')
    (directory / "backup_of_step_00000007.zip").write_bytes(b"PK")
    (directory / "notes").mkdir(exist_ok=True)
    (directory / "notes/why.txt").write_text("Not a checkpoint.")
    run.foreign |= {"checkpoints/backup_of_step_00000007.zip", "checkpoints/notes", "checkpoints/notes/why.txt"}


# -- comparing --


def names_in(root: pathlib.Path) -> set[str]:
    """Returns all names that a run left, including hidden ones, except event files, one per process, and names that Orbax draws at random."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if ".tfevents." not in path.name and path.parent.name != "d"}


def events_in(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the content of the event files, except measured times and descriptions of processes; each value must be there once."""
    found: dict[str, Any] = {}
    for path in sorted(directory.rglob("*.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag.startswith("time/") or value.tag.startswith("environment"):
                    continue
                if value.metadata.plugin_data.plugin_name == "hparams":
                    content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                    content.session_start_info.start_time_secs = 0
                    value.metadata.plugin_data.content = content.SerializeToString(deterministic=True)
                name = f"{path.parent.relative_to(directory)}/{value.tag} at step {event.step}"
                assert name not in found, f"{name} is there twice."
                found[name] = value.SerializeToString(deterministic=True)
    return found


def shown_in(directory: pathlib.Path) -> dict[str, Any]:
    """Returns what TensorBoard shows: the points of each curve, and of each histogram."""
    runs = EventMultiplexer(size_guidance=dict.fromkeys(("scalars", "histograms", "tensors"), 0)).AddRunsFromDirectory(str(directory)).Reload()
    shown: dict[str, Any] = {}
    for run, tags in runs.Runs().items():
        for tag in tags["scalars"]:
            if not tag.startswith("time/"):
                shown[f"{run}/{tag}"] = [(event.step, event.value.hex()) for event in runs.Scalars(run, tag)]
        for tag in tags["histograms"]:
            shown[f"{run}/{tag}"] = [(event.step, event.histogram_value) for event in runs.Histograms(run, tag)]
    return shown


def everything(run: Run) -> dict[str, Any]:
    """Returns everything that a run left behind, for comparison."""
    return {
        "result": run.result(),
        "names": dict.fromkeys(sorted(names_in(run.root) - run.foreign), "there"),
        "checkpoints": directory_of(run.root / "checkpoints"),
        "best": directory_of(run.root / "best"),
        "wanted": {name: json.dumps(CheckpointStore(run.root / name).owners(), sort_keys=True) for name in ("checkpoints", "best")},
        "csv": (run.root / "log.csv").read_bytes(),
        "tensorboard": events_in(run.root / "tensorboard"),
        "shown by tensorboard": shown_in(run.root / "tensorboard"),
    }


def assert_equal(run: Run, never_killed: dict[str, Any]) -> None:
    unequal = differences(everything(run), never_killed)
    unequal += [f"{name} is gone, which was somebody else's" for name in sorted(run.foreign) if not (run.root / name).exists()]
    assert not unequal, "\n".join(unequal)


# -- tests --


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, compilation_cache: dict[str, str]) -> dict[str, str]:
    # A separate cache: JAX does not write it atomically, and other tests must not find what a kill left.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")), "JAX_NUM_CPU_DEVICES": "1"}
    path = os.pathsep.join([str(SCRIPT.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | compilation_cache | cache | {"PYTHONPATH": path}


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Callable[[str], tuple[Run, dict[str, Any]]]:
    """`never_killed(name)`: one of `RUNS` that was never killed, and everything that it left; made once."""
    made: dict[str, tuple[Run, dict[str, Any]]] = {}

    def get(name: str) -> tuple[Run, dict[str, Any]]:
        if name not in made:
            run = Run(tmp_path_factory.mktemp("never") / "run", env, RUNS[name])
            run.finish()
            made[name] = run, everything(run)
        return made[name]

    return get


def cycled(values: tuple[str, ...], rng: np.random.Generator) -> Iterator[str]:
    begin = int(rng.integers(len(values)))
    while True:
        yield from values[begin:]
        begin = 0


def kill_repeatedly(count: int, seed: int, arguments: dict[str, Any], never_killed: dict[str, Any], env: dict[str, str], directory: pathlib.Path) -> None:
    """Kills `count` processes of runs; each run is then completed, and must equal the run that was never killed."""
    rng = np.random.default_rng(seed)
    # They read the compiled programs of the run that was never killed, and write none: a partly written one would break the next process.
    env = env | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000"}
    hows, damages = cycled(HOWS, rng), cycled(DAMAGES, rng)
    end_step = never_killed["result"]["step"]
    number = 0
    while count > 0:
        run = Run(directory / f"run-{number}", env, arguments)
        kills = min(count, MAX_KILLS_A_RUN)
        try:
            for kill in range(kills):
                if not kill_once(run, next(hows), rng, end_step=end_step, share=1 / (kills - kill + 1)):
                    break
                count -= 1
                if rng.random() < 0.5:
                    damage(run, next(damages), rng)
            run.finish()
            assert_equal(run, never_killed)
        except BaseException as error:
            error.add_note("\n".join([f"This is run {number} with seed {seed} and {arguments}, in {run.root}:", *run.notes]))
            raise
        shutil.rmtree(run.root)
        number += 1


# A run with four kills takes a minute on an idle machine, and a multiple of that while other tests run.
@pytest.mark.timeout(3600 if SOAK else 900)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in IN_EVERY_TEST_RUN else pytest.mark.slow) for name in KILLED])
def test_a_run_that_is_killed_repeatedly_is_bit_for_bit_identical_to_one_never_killed(name, env, never_killed, tmp_path):
    # 2 in a quick test run, 22 with the slow tests.
    kills = -(-SOAK // len(KILLED)) if SOAK else 2 if name in IN_EVERY_TEST_RUN else 4
    kill_repeatedly(kills, SEED + list(RUNS).index(name), RUNS[name], never_killed(name)[1], env, tmp_path)


def test_the_run_that_is_killed_has_everything_that_can_be_lost(never_killed):
    """Otherwise, the tests above would prove less than they claim."""
    _, found = never_killed("a run that a callback stops")
    result = found["result"]
    assert result["stop_reason"].startswith("EarlyStopping") and result["step"] > 150
    rates = {row[1]["learning_rate"] for row in result["history"]}
    assert len(rates) >= 3
    kept = sorted(int(name.removeprefix("step_")) for name in found["checkpoints"])
    assert len(kept) > 3 and kept[-1] == result["step"]
    assert len(found["best"]) == 2
    assert any("params/" in name for name in found["tensorboard"])


# Changes to what a run left: the part in which each must be detected, and the change.
CHANGES: dict[str, tuple[str, Callable[[pathlib.Path], Any]]] = {
    "a number in the log": ("csv", lambda root: change(root / "log.csv", b"1,", b"1,0")),
    "a parameter at the end": ("result", lambda root: change(root / "result.json", b'"float32", "', b'"float32", "0')),
    "an older state in a new checkpoint": ("checkpoints", lambda root: shutil.copytree(*two_newest(root / "checkpoints"), dirs_exist_ok=True)),
    "another best checkpoint": ("best", lambda root: shutil.copytree(*two_newest(root / "best"), dirs_exist_ok=True)),
    "a best checkpoint less": ("names", lambda root: shutil.rmtree(two_newest(root / "best")[0])),
    "a temporary file more": ("names", lambda root: (root / "checkpoints/.retention.json.tmp-0123abcd-0123abcd").touch()),
    "a checkpoint that is wanted no more": ("wanted", lambda root: CheckpointStore(root / "best").retain("BestCheckpoint(val_loss)", [])),
    "the last event less": ("tensorboard", lambda root: cut_off(max((root / "tensorboard/train").iterdir()))),
    "no curve of the validation": ("shown by tensorboard", lambda root: shutil.rmtree(root / "tensorboard/val")),
}


def two_newest(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(directory.glob("step_*"))[-2:]


def change(path: pathlib.Path, before: bytes, after: bytes) -> None:
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after, 1))


def cut_off(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.slow
def test_the_comparison_detects_a_change(what, never_killed, tmp_path):
    uninterrupted, expected = never_killed(IN_EVERY_TEST_RUN[0])
    part, act = CHANGES[what]
    run = dataclasses.replace(uninterrupted, root=tmp_path / "run")
    shutil.copytree(uninterrupted.root, run.root)
    assert not differences(everything(run), expected)
    act(run.root)
    assert part in {line.partition(":")[0] for line in differences(everything(run), expected)}
