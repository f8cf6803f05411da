"""`processes.gather`: in a single process, and among real processes on loopback."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.parallel import processes
from fitflax.parallel.processes import after_first, check_same
from tests.ports import reserve_port

SCRIPT = """
import json, sys
import jax
import numpy as np
import ml_dtypes
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import fitflax
from fitflax.errors import ReplicaError
from fitflax.parallel import processes
from tests.ports import reserve_port
index = jax.process_index()
tree = {"loss": 0.1 + index, "big": np.int64(2**40 + index), "rows": np.full((2, 3), index, np.float32), "half": np.ones(3, ml_dtypes.bfloat16),
        "flag": np.array([index == 1]), "none": np.zeros((0, 2)), "device": jax.numpy.arange(2) * index, "key": jax.random.key(index)}
found = processes.gather(tree)
result = {name: [str(value.dtype), list(value.shape), value.astype(float).ravel().tolist()] for name, value in found.items()}
assert processes.gather(()) == ()
metric = fitflax.metrics.Mean(fn=lambda outputs, targets: outputs)  # With a function, which has another address in each process.
assert processes.gather(metric.add(1.0 + index, 1.0)).weight.shape[0] == 2
try:
    processes.gather({"rows": np.zeros(index + 1)})
except ReplicaError as error:
    result["error"] = str(error)
result["made"] = processes.after_first(lambda: index + 5)
def fail():
    raise ValueError("the disk is full")
try:
    processes.after_first(fail)
except (ValueError, ReplicaError) as error:
    result["failed"] = f"{type(error).__name__}: {error}"
print(json.dumps(result), flush=True)
"""


def test_a_single_process_gathers_one_copy_of_each_value():
    found = processes.gather({"loss": 0.5, "rows": jnp.ones((2, 3)), "wide": np.float64(1e-300)})
    assert found["loss"].tolist() == [0.5]
    assert found["rows"].shape == (1, 2, 3)
    assert found["wide"].tolist() == [1e-300]
    assert processes.gather(jax.random.key(7)).tolist() == [[0, 7]]


@pytest.mark.slow  # Two processes that import JAX.
def test_two_processes_gather_the_values_of_both_bit_for_bit(tmp_path: pathlib.Path):
    port = str(reserve_port())
    script = tmp_path / "gather.py"
    script.write_text(SCRIPT)
    started = [subprocess.Popen([sys.executable, str(script), port, str(index)], stdout=subprocess.PIPE, text=True) for index in range(2)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    for index, result in enumerate(results):
        assert f"needs trees of the same structure, shapes and dtypes in all processes. Process {index} has" in result.pop("error")
    assert [result.pop("made") for result in results] == [5, 6]
    assert [result.pop("failed") for result in results] == [
        "ValueError: the disk is full",
        "ReplicaError: Process 0 failed, so all other processes stop. See the error in the output of process 0.",
    ]
    assert results[0] == results[1]
    assert results[0]["loss"] == ["float64", [2], [0.1, 1.1]]
    assert results[0]["big"] == ["int64", [2], [2.0**40, 2.0**40 + 1]]
    assert results[0]["rows"] == ["float32", [2, 2, 3], [0.0] * 6 + [1.0] * 6]
    assert results[0]["half"] == ["bfloat16", [2, 3], [1.0] * 6]
    assert results[0]["flag"] == ["bool", [2, 1], [0.0, 1.0]]
    assert results[0]["none"] == ["float64", [2, 0, 2], []]
    assert results[0]["key"] == ["uint32", [2, 2], [0.0, 0.0, 0.0, 1.0]]
    assert results[0]["device"] == ["int32", [2, 2], [0.0, 0.0, 0.0, 1.0]]


def test_a_single_process_has_nothing_to_compare_or_wait_for():
    check_same({"x": jax.numpy.ones(3)})
    assert after_first(lambda: 3) == 3
