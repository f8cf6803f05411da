"""A process that trains for a very long time uses no more memory at the end than soon after its start, and leaves no more files.

`FITFLAX_SOAK=200 pytest tests/test_soak.py` trains for a million steps. The script also prints the time of each twentieth of a run, which must not grow.
The time limit of these tests allows for a million steps.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.optimized, pytest.mark.timeout(3600)]
SCRIPT = pathlib.Path(__file__).with_name("soak_script.py")
IS_SOAK = int(os.environ.get("FITFLAX_SOAK", "0")) > 0
STEPS = 1_000_000 if IS_SOAK else 40_000
# The tolerance for allocators. A leak of twenty bytes per step exceeds it in a million steps.
LIMIT_MB = 8


def soak(directory: pathlib.Path, *, steps: int, steps_per_call: int, epochs: int) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), str(steps), str(steps_per_call), str(epochs), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(found["megabytes"]) == 20
    return found


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [1, 16])
def test_memory_stays_flat_regardless_of_the_number_of_steps(tmp_path, steps_per_call):
    megabytes = soak(tmp_path, steps=STEPS, steps_per_call=steps_per_call, epochs=40)["megabytes"]
    early, late = max(megabytes[3:6]), max(megabytes[-3:])
    assert late - early < LIMIT_MB, f"resident MB over {STEPS} steps: {[round(size, 1) for size in megabytes]}"


@pytest.mark.slow
def test_memory_and_files_stay_bounded_over_thousands_of_epochs(tmp_path):
    """The history and the rows of the log file may grow, by about a kilobyte per epoch."""
    found = soak(tmp_path, steps=16_000, steps_per_call=1, epochs=2000)
    half = found["megabytes"][10:]
    assert max(half) < 1.01 * min(half), f"resident MB in the second half: {[round(size, 1) for size in half]}"
    assert len([name for name in found["files"] if name.endswith("metadata.json")]) <= 3 and len(found["files"]) < 20, found["files"]
