"""`parallel.initialize` in a process that was started alone, and which part of a batch a process feeds; `tests/test_many_processes.py` starts several."""

import types

import jax
import pytest

from fitflax import parallel
from fitflax.errors import ConfigError, NotReadyError
from fitflax.parallel.placing import part_of
from fitflax.parallel.processes import after_first, check_same


def test_alone_nothing_is_initialized(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    parallel.initialize()
    assert jax.process_count() == 1 and not jax.distributed.is_initialized()


def test_it_must_come_before_devices_are_used():
    jax.devices()
    with pytest.raises(NotReadyError, match="must come before JAX's devices are used: call it first"):
        parallel.initialize("127.0.0.1:1", 2, 0)


def test_arguments_that_do_not_go_together_are_an_error(monkeypatch):
    def refuse(**options: object) -> None:
        raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(ConfigError, match=r"Number of processes must be defined. Not given, and not found in the environment: num_processes, process_id."):
        parallel.initialize("127.0.0.1:1")


def test_a_second_call_does_nothing(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    parallel.initialize("127.0.0.1:1", 2, 0)


def devices_of(*owners: int) -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(process_index=owner) for owner in owners]


def test_a_process_feeds_the_rows_of_its_devices():
    assert part_of(devices_of(0, 0)) == (0, 1)
    assert part_of(devices_of(0, 0, 1, 1)) == (0, 2)
    assert part_of(devices_of(1, 2, 0)) == (2, 3)
    for owners in ((0, 1, 0, 1), (0, 0, 1)):
        with pytest.raises(ConfigError, match="shares of a batch must be equal and lie one behind the other"):
            part_of(devices_of(*owners))
    with pytest.raises(ConfigError, match="Process 0 has none of the devices"):
        part_of(devices_of(1, 2))


def test_alone_everything_is_the_same():
    check_same({"x": jax.numpy.ones(3)})
    assert after_first(lambda: 3) == 3
