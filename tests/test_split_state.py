"""`export` and `hunt_nan` of a state that is shared by several processes: gathered, in all of them."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.ports import reserve_port
from tests.test_many_processes import ended, result_in

SCRIPT = pathlib.Path(__file__).with_name("split_state_script.py")

pytestmark = pytest.mark.slow  # Each test starts processes that import JAX.


@pytest.mark.parametrize("kind", ["fsdp", "data parallel"])
def test_several_processes_export_and_hunt_nan_as_one_does_and_fail_together(kind, process_env, tmp_path):
    pytest.importorskip("flatbuffers")
    env = {name: value for name, value in process_env.items() if not name.startswith("JAX_COMPILATION_CACHE") and name != "JAX_NUM_CPU_DEVICES"}
    found = {}
    for count in (1, 2):
        port = reserve_port()
        arguments = [{"kind": kind, "directory": str(tmp_path), "count": count, "index": index, "port": port} for index in range(count)]
        commands = [[sys.executable, str(SCRIPT), json.dumps(each)] for each in arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        outputs = ended([subprocess.Popen(command, env=env | {"PJRT_NPROC": "16"}, **pipes) for command in commands])
        assert [status for status, _ in outputs] == [0] * count, outputs
        found[count] = [result_in(output) for _, output in outputs]
    first, *others = found[1] + found[2]
    assert first["step"] == 4 and "NaN from log" in first["report"] and "is a directory" in first["fault"]
    for other in others:
        assert other["error"] < 1e-5 and other["fault"]
        assert (other["step"], other["report"]) == (first["step"], first["report"])
        assert other["norm"] == pytest.approx(first["norm"], rel=1e-6)
    assert "is a directory" in found[2][0]["fault"] and "Process 0 failed" in found[2][1]["fault"]
