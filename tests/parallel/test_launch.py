"""`parallel.initialize` in a single process; `tests/test_many_processes.py` starts several processes."""

import jax
import pytest

from fitflax import parallel
from fitflax.errors import ConfigError, FitflaxWarning, NotReadyError, ReplicaError
from fitflax.parallel import launch


def test_a_single_process_initializes_nothing(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    parallel.initialize()
    assert jax.process_count() == 1 and not jax.distributed.is_initialized()


def test_a_slurm_batch_script_without_srun_gets_a_warning(monkeypatch):
    def refuse(**options: object) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    parallel.initialize()
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.warns(FitflaxWarning, match=r"has 4 tasks, but this process was not started by srun, so it trains alone\. .* srun python train\.py"):
        parallel.initialize()


def test_initialize_must_be_called_before_devices_are_used():
    jax.devices()
    with pytest.raises(NotReadyError, match=r"must run before JAX's devices are used\. Call it before"):
        parallel.initialize("127.0.0.1:1", 2, 0)


def test_a_task_of_a_launcher_must_be_initialized_before_devices_are_used(monkeypatch):
    jax.devices()
    task = {"JOB_ID": "1", "STEP_NODELIST": "localhost", "NTASKS": "2", "PROCID": "0", "LOCALID": "0"}
    with monkeypatch.context() as patch:
        for name, value in task.items():
            patch.setenv(f"SLURM_{name}", value)
        with pytest.raises(NotReadyError, match="must run before JAX's devices are used"):
            parallel.initialize()
        patch.setenv("SLURM_NTASKS", "1")
        parallel.initialize()  # Alone.
        patch.setenv("JAX_COORDINATOR_ADDRESS", "")
        parallel.initialize()
        patch.setenv("SLURM_NTASKS", "")  # JAX's detection raises a ValueError.
        with pytest.raises(NotReadyError, match="must run before JAX's devices are used"):
            parallel.initialize()
    with monkeypatch.context() as patch:
        patch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
        with pytest.raises(NotReadyError, match="must run before JAX's devices are used"):
            parallel.initialize()


def test_a_launcher_that_is_detected_only_on_request_does_not_count_without_a_request(monkeypatch):
    class OnRequest:
        name, opt_in_only_method = "on-request", True
        is_env_present, get_process_count = staticmethod(lambda: True), staticmethod(lambda: 2)

    monkeypatch.setattr("jax._src.clusters.ClusterEnv._cluster_types", [OnRequest])
    assert [launch._is_one_of_several(method) for method in (None, "on-request")] == [False, True]


def test_missing_arguments_are_an_error_that_names_them(monkeypatch):
    def refuse(**options: object) -> None:
        raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(ConfigError, match=r"Number of processes must be defined. Pass num_processes, process_id, which the environment does not define."):
        parallel.initialize("127.0.0.1:1")


def test_a_second_call_does_nothing(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    parallel.initialize("127.0.0.1:1", 2, 0)


@pytest.mark.parametrize(
    ("error", "is_of_others"),
    [
        (
            jax.errors.JaxRuntimeError("INTERNAL: Error dispatching computation: Gloo all-reduce failed: Read error"),
            True,
        ),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: NCCL operation ncclCommInitRank failed: unhandled system error"), True),
        (ReplicaError("This process cannot continue"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: CpuCallback error calling callback: ValueError: wrong"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (ValueError("wrong"), False),
    ],
)
def test_connection_errors_are_distinguished_from_errors_of_the_script(error, is_of_others):
    assert launch._is_communication_error(error) is is_of_others


def test_a_job_failed_on_its_own_if_one_of_its_processes_did():
    lost, own = launch.Failure("JaxRuntimeError: UNAVAILABLE", False), launch.Failure("ValueError: wrong", True)
    assert launch._exit_code({0: lost, 1: lost}) == 75
    assert launch._exit_code({0: lost, 1: own}) == 1
    assert launch._all_are_mismatches({0: launch.Failure("ReplicaError: not the same", False)}) and not launch._all_are_mismatches({0: lost})
