"""The kill test over `s3://`: real processes that save to a bucket are killed at random moments, and between any two requests of a save. They end
bit-for-bit identical to an uninterrupted run on a local disk."""

import os
import pathlib
import shutil
import signal
import threading
import urllib.parse

import numpy as np
import pytest

from fitflax.errors import ConfigError
from fitflax.storage import locate
from tests.run_script import differences
from tests.storage.servers import FaultProxy, S3Server, Unavailable
from tests.test_kills import SEED, SOAK, Run, env, everything, never_killed  # noqa: F401 (fixtures)

pytest.importorskip("obstore")

NAME = "a run that ends inside an epoch"
PARTS = 2**16  # Bytes; a checkpoint has several parts.
# When a process is killed: before or after the n-th request of a kind is carried out, or some steps later.
KINDS = {
    "a part": lambda path: "/state-" in path,
    "a commit": lambda path: path.endswith("/metadata.json"),
    "a note": lambda path: path.endswith(("/retention.json", "/.run.json")),
    "the lease": lambda path: path.endswith("/.lease.json"),
    "a log": lambda path: path.endswith("/log.csv") or ".tfevents." in path,
}
MOMENTS = [("step", False), *((kind, before) for kind in KINDS for before in (False, True))]


def local_copy(url, options, root):
    """Copies a prefix to a local disk, as any tool would."""
    place = locate(url, owner="test", error=ConfigError, options=options)
    for info in place.objects():
        path = root / info.key.removeprefix(f"{place.key}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(place.bucket.read(info.key)[0])


def compared(run):
    """Returns everything except what differs in a bucket: hidden names."""
    found = everything(run)
    del found["names"]
    return found


def kill_once(run, arguments, moment, rng, proxy):
    """Starts a process and kills it; returns whether it was still running."""
    kind, is_before = moment
    process = run.start(**arguments)
    if kind == "step":
        count = int(rng.integers(5, 60))
        process.until(lambda what, step: what == "step" and (process.began or 0) + count <= step)
        return process.kill()
    left, lock = [int(rng.integers(1, {"a part": 40, "a commit": 8, "a note": 12, "the lease": 2, "a log": 10}[kind]))], threading.Lock()

    def match(method, path):
        path = urllib.parse.unquote(path).partition("?")[0]
        if method != "PUT" or not KINDS[kind](path):
            return False
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os.kill(process.popen.pid, signal.SIGKILL)
                run.notes.append(f"killed {'before' if is_before else 'after'} {kind}: {path}")
                return is_before
        return False

    proxy.fail(match, times=None)
    try:
        return not process.ended()
    finally:
        proxy.clear()


# All kills are in one test; on a disk, they are divided between five tests of an hour each.
@pytest.mark.timeout(5 * 3600 if SOAK else 900)
@pytest.mark.slow
def test_a_repeatedly_killed_run_in_a_bucket_is_identical_to_an_uninterrupted_local_run(env, never_killed, tmp_path):  # noqa: F811
    uninterrupted = never_killed(NAME)[0]
    rng = np.random.default_rng(SEED + 101)
    moments = [MOMENTS[index] for index in rng.permutation(len(MOMENTS))]
    kills = SOAK or len(MOMENTS)
    try:
        server = S3Server().__enter__()
    except Unavailable as reason:
        pytest.skip(str(reason))
    try:
        with FaultProxy(server.endpoint) as proxy:
            number = killed = 0
            while kills > 0:
                bucket = server.create_bucket(f"bucket-{number}")
                environment = {**env, **proxy.through(server.environment, server)}
                run = Run(tmp_path / f"run-{number}", environment, uninterrupted.arguments)
                arguments = {"place": f"{bucket}/run", "part_bytes": PARTS}
                for _ in range(min(kills, 4)):
                    kills -= 1
                    if not kill_once(run, arguments, moments[kills % len(moments)], rng, proxy):
                        break
                    killed += 1
                assert run.start(**arguments).ended()
                copy = Run(pathlib.Path(shutil.copytree(run.root, tmp_path / f"copy-{number}")), env, uninterrupted.arguments)
                local_copy(f"{bucket}/run", server.storage_options, copy.root)
                local = dict(never_killed(NAME)[1])
                del local["names"]
                assert not (faults := differences(compared(copy), local)), "\n".join([*run.notes, *faults])
                names = {path.name for path in copy.root.rglob("*")}
                assert not [name for name in names if name.startswith(".old")]
                number += 1
            print(f"{killed} kills, {number} runs")
            assert killed >= 3
    finally:
        server.__exit__(None, None, None)
