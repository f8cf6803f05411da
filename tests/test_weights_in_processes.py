"""Weights that are split between processes: gathered, written by the first one, and read by all."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from fitflax.checkpoints.formats.weight_files import find_weights, read_weights
from tests.ports import reserve_port
from tests.test_many_processes import ended

SCRIPT = pathlib.Path(__file__).with_name("weights_script.py")

pytestmark = pytest.mark.slow  # Each test starts processes that import JAX.


@pytest.mark.parametrize("kind", ["fsdp", "data parallel"])
def test_several_processes_save_the_same_weights_as_one_and_fail_together(kind, process_env, tmp_path):
    env = {name: value for name, value in process_env.items() if not name.startswith("JAX_COMPILATION_CACHE") and name != "JAX_NUM_CPU_DEVICES"}
    found = {}
    for count in (1, 2):
        port = reserve_port()
        arguments = [{"kind": kind, "directory": str(tmp_path), "count": count, "index": index, "port": port} for index in range(count)]
        commands = [[sys.executable, str(SCRIPT), json.dumps(each)] for each in arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        outputs = ended([subprocess.Popen(command, env=env | {"PJRT_NPROC": "16"}, **pipes) for command in commands])
        assert [status for status, _ in outputs] == [0] * count, outputs
        results = [json.loads(output.split("RESULT ")[1].splitlines()[0]) for _, output in outputs]
        assert all(each["restored"] == 4 and each["same"] for each in results), results
        assert all("is a directory" in each["fault"] for each in results) or kind != "fsdp", results
        assert results[0]["path"].endswith("model.safetensors.index.json")
        found[count] = read_weights(find_weights(tmp_path / f"{kind}-{count}"))[0]
    assert found[1].keys() == found[2].keys() and all(np.array_equal(found[1][name], found[2][name]) for name in found[1])
