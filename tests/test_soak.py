"""A process that trains for very long holds no more memory at the end than soon after its beginning. Its time limit fits a million steps.

`FITFLAX_SOAK=200 pytest tests/test_soak.py` trains for a million steps.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("soak_script.py")
IS_SOAK = int(os.environ.get("FITFLAX_SOAK", "0")) > 0
STEPS = 1_000_000 if IS_SOAK else 40_000
# What allocators may make of it; twenty bytes lost in every step of a million would be more.
LIMIT_MB = 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps_per_call", [1, 16])
def test_memory_stays_flat_however_many_steps_are_made(tmp_path: pathlib.Path, steps_per_call: int) -> None:
    command = [sys.executable, str(SCRIPT), str(STEPS), str(steps_per_call), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    megabytes = json.loads(done.stdout.splitlines()[-1])
    assert len(megabytes) == 20
    early, late = max(megabytes[3:6]), max(megabytes[-3:])
    assert late - early < LIMIT_MB, f"resident MB over {STEPS} steps: {[round(size, 1) for size in megabytes]}"
