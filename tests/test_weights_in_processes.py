"""Weights that are split between processes: gathered, written by the first one, and read by all."""

import pathlib

import numpy as np
import pytest

from fitflax.checkpoints.safetensors_format import find_weights, read_weights
from tests.test_many_processes import results

SCRIPT = pathlib.Path(__file__).with_name("weights_script.py")

pytestmark = pytest.mark.slow  # Each test starts processes that import JAX.


@pytest.mark.parametrize("kind", ["fsdp", "data parallel"])
def test_several_processes_save_the_same_weights_as_one_and_fail_together(kind, process_env, tmp_path):
    found = {}
    for count in (1, 2):
        ends = results(process_env, count, script=SCRIPT, kind=kind, directory=str(tmp_path))
        assert all(each["restored"] == 4 and each["same"] for each in ends), ends
        assert all("is a directory" in each["fault"] for each in ends) or kind != "fsdp", ends
        assert ends[0]["path"].endswith("model.safetensors.index.json")
        found[count] = read_weights(find_weights(tmp_path / f"{kind}-{count}"))[0]
    assert found[1].keys() == found[2].keys() and all(np.array_equal(found[1][name], found[2][name]) for name in found[1])
