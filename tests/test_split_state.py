"""`export` and `hunt_nan` of a state that is shared by several processes: gathered, in all of them."""

import pathlib

import pytest

from tests.test_many_processes import results

SCRIPT = pathlib.Path(__file__).with_name("split_state_script.py")

pytestmark = pytest.mark.slow  # Each test starts processes that import JAX.


@pytest.mark.parametrize("kind", ["fsdp", "data parallel"])
def test_several_processes_export_and_hunt_nan_as_one_does_and_fail_together(kind, process_env, tmp_path):
    pytest.importorskip("flatbuffers")
    found = {count: results(process_env, count, script=SCRIPT, kind=kind, directory=str(tmp_path)) for count in (1, 2)}
    first, *others = found[1] + found[2]
    assert first["step"] == 4 and "NaN from log" in first["report"] and "is a directory" in first["fault"]
    for other in others:
        assert other["error"] < 1e-5 and other["fault"]
        assert (other["step"], other["report"]) == (first["step"], first["report"])
        assert other["norm"] == pytest.approx(first["norm"], rel=1e-6)
    # Only a split state needs all processes, so that an error of one is reported by the others.
    assert "is a directory" in found[2][0]["fault"] and ("Process 0 failed" if kind == "fsdp" else "is a directory") in found[2][1]["fault"]
