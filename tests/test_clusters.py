"""The files in examples/cluster: small stand-ins do what Slurm and Kubernetes would do with them, and the real schemas validate their structure.

With `FITFLAX_SOAK`, a Slurm job is preempted ten times instead of four.
"""

import json
import os
import pathlib
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import pytest

import fitflax.__main__ as commands
from fitflax.parallel import launch
from tests import compiled_programs
from tests.ports import reserve_port, reserve_slurm_job
from tests.test_many_processes import PIPES, environment

CLUSTER = pathlib.Path(__file__).resolve().parent.parent / "examples" / "cluster"
SECONDS = 300
IS_SOAK = int(os.environ.get("FITFLAX_SOAK", "0")) > 0
pytestmark = pytest.mark.timeout(5 * SECONDS)  # A job is started up to eleven times.

SRUN = """#!{python}
import json, os, subprocess, sys
tasks, caches = [], json.loads(os.environ["CACHES"])
assert sys.argv[1].startswith("--cpus-per-task=")
for index in range(int(os.environ["SLURM_NTASKS"])):
    own = {{"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index), "SLURM_STEP_NODELIST": "127.0.0.1"}}
    tasks.append(subprocess.Popen(sys.argv[2:], env=os.environ | caches[index] | own))
with open("tasks.new", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
os.replace("tasks.new", "tasks")
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
SCONTROL = """#!/bin/sh
echo "$@" >> requeued
"""


def add_commands(directory: pathlib.Path, **texts: str) -> None:
    """Writes executable files."""
    directory.mkdir(parents=True)
    for name, text in texts.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)


class Slurm:
    """A directory with `train.py` and the job script, and what Slurm adds: environment variables, `srun` and `scontrol`. The job is one of an array."""

    def __init__(self, directory: pathlib.Path, env: dict[str, str], tasks: int = 4, seed: int = 3) -> None:
        self.directory, self.bin = directory, directory / "bin"
        add_commands(self.bin, srun=SRUN.format(python=sys.executable), scontrol=SCONTROL)
        shutil.copy(CLUSTER / "train.py", directory)
        self.env = env | {"PJRT_NPROC": "16", "JAX_NUM_CPU_DEVICES": "1", "SLURM_NTASKS": str(tasks)}
        self.env["CACHES"] = json.dumps(compiled_programs.of_processes({}, tasks))
        self.env |= {"SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": str(seed)}
        self.restarts, self.log, self.begin = 0, directory / "log", 0

    def notice_lost_tasks_sooner(self) -> None:
        """Makes `train.py` notice a lost task in a third of the usual time, during which nothing else happens."""
        script, call = self.directory / "train.py", "fitflax.parallel.initialize()"
        assert call in script.read_text()
        script.write_text(script.read_text().replace(call, "fitflax.parallel.initialize(heartbeat_timeout_seconds=10)"))

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        env = self.env | {
            "PATH": f"{self.bin}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(reserve_slurm_job()),
            "SLURM_RESTART_COUNT": str(self.restarts),
        }
        (self.directory / "tasks").unlink(missing_ok=True)
        self.restarts += 1
        self.begin = len(self.log.read_text()) if self.log.exists() else 0
        with self.log.open("ab") as log:
            return subprocess.Popen(["bash", str(CLUSTER / "slurm.sbatch"), *arguments], cwd=self.directory, env=env, stdout=log, stderr=log)

    def tasks(self) -> list[int]:
        end = time.monotonic() + SECONDS
        while not (self.directory / "tasks").exists():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        return [int(task) for task in (self.directory / "tasks").read_text().split()]

    def wait_for_epoch(self) -> None:
        """Waits for the end of an epoch. A task that is lost before all have connected costs the others five minutes, because JAX waits that long."""
        end = time.monotonic() + SECONDS
        while "/step - loss" not in self.log.read_text()[self.begin :]:
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def was_requeued(self) -> bool:
        """Returns whether the script requeued itself, and clears the record of it."""
        requeued = self.directory / "requeued"
        found = requeued.exists()
        requeued.unlink(missing_ok=True)
        return found


def assert_equal_checkpoints(one: pathlib.Path, other: pathlib.Path) -> None:
    assert commands.main(["compare", str(one), str(other)]) == 0


STEPS = ("--steps", "800")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    """A Slurm job that was never interrupted."""
    slurm = Slurm(tmp_path_factory.mktemp("slurm") / "whole", environment())
    assert slurm.start(*STEPS).wait(timeout=SECONDS) == 0 and not slurm.was_requeued()
    return slurm


@pytest.mark.slow
def test_a_slurm_job_that_is_preempted_ends_bit_for_bit_like_an_uninterrupted_one(uninterrupted, process_env, tmp_path):
    slurm, draws, codes = Slurm(tmp_path / "preempted", process_env), random.Random(5), []
    slurm.notice_lost_tasks_sooner()
    kinds = ["time is over", "one is told", "notice", "node fails"]
    for kind in draws.sample(kinds, 4) + (draws.choices(kinds, k=6) if IS_SOAK else []):
        job = slurm.start(*STEPS)
        tasks = slurm.tasks()
        slurm.wait_for_epoch()
        time.sleep(draws.uniform(0, 2))
        victims = tasks if kind == "time is over" else [draws.choice(tasks)]
        number = {"notice": signal.SIGUSR1, "node fails": signal.SIGKILL}.get(kind, signal.SIGTERM)
        for task in victims:
            os.kill(task, number)
        codes.append((kind, job.wait(timeout=SECONDS)))
        assert slurm.was_requeued(), (codes, slurm.log.read_text()[-3000:])
    assert slurm.start(*STEPS).wait(timeout=SECONDS) == 0, slurm.log.read_text()[-3000:]
    assert not slurm.was_requeued()
    assert {code for _, code in codes} <= {75, 134, 137, 138, 143}, codes
    assert_equal_checkpoints(uninterrupted.directory / "runs/digits-3/checkpoints", tmp_path / "preempted/runs/digits-3/checkpoints")
    assert slurm.log.read_text().splitlines()[-1] == uninterrupted.log.read_text().splitlines()[-1]


@pytest.mark.slow
def test_a_slurm_job_that_fails_is_not_requeued(process_env, tmp_path):
    slurm = Slurm(tmp_path, process_env, tasks=2)
    assert slurm.start("--steps", "0").wait(timeout=SECONDS) == 1
    assert not slurm.was_requeued() and "steps" in slurm.log.read_text()
    assert slurm.start("--stpes", "1").wait(timeout=SECONDS) == 2 and not slurm.was_requeued()


@pytest.mark.slow
def test_the_jobs_of_an_array_train_with_their_seeds_in_their_directories(process_env, tmp_path):
    losses = []
    for seed in (0, 1):
        slurm = Slurm(tmp_path / f"job-{seed}", process_env, tasks=1, seed=seed)
        assert slurm.start("--steps", "20").wait(timeout=SECONDS) == 0
        assert slurm.log.read_text().splitlines()[-1].startswith(f"seed {seed}: accuracy ")
        metadata = json.loads((slurm.directory / f"runs/digits-{seed}/checkpoints/step_00000020/metadata.json").read_text())
        assert metadata["settings"]["seed"] == seed
        losses.append(metadata["metrics"]["train"]["loss"])
    assert losses[0] != losses[1]


def test_each_job_of_an_array_has_its_seed_and_directory_and_is_requeued_alone(tmp_path):
    add_commands(tmp_path / "bin", srun='#!/bin/sh\necho "$@" >> started\nexit $CODE\n', scontrol=SCONTROL)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "36"}  # The first job of an array has the ID of the array.

    def run(code: int, restarts: int = 0, **array: str) -> None:
        job_env = env | {"CODE": str(code), "SLURM_RESTART_COUNT": str(restarts), **array}
        done = subprocess.run(["bash", str(CLUSTER / "slurm.sbatch"), "--steps", "5"], cwd=tmp_path, env=job_env, timeout=SECONDS, check=False)
        assert done.returncode == code

    run(143)
    for seed, code in enumerate((0, 1, 2, 143, 75, 134, 137)):
        run(code, SLURM_ARRAY_JOB_ID="36", SLURM_ARRAY_TASK_ID=str(seed))
    run(143, restarts=100)
    starts = [f"--cpus-per-task=1 python train.py --directory runs/digits-{seed} --seed {seed} --steps 5" for seed in (0, *range(7), 0)]
    assert (tmp_path / "started").read_text().splitlines() == starts
    assert (tmp_path / "requeued").read_text().splitlines() == [f"requeue 36{task}" for task in ("", "_3", "_4", "_5", "_6")]


def manifests(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


def indexed_job(name: str) -> dict[str, Any]:
    """Returns the Job of a manifest, or the one that its JobSet makes."""
    *_, manifest = manifests(name)
    return manifest["spec"]["replicatedJobs"][0]["template"] if manifest["kind"] == "JobSet" else manifest


class Kubernetes:
    """The controller of an indexed Job: it starts a pod for each index, and another one if the pod fails and the manifest's policy allows it."""

    def __init__(self, directory: pathlib.Path, name: str, env: dict[str, str]) -> None:
        self.directory, self.spec = directory, indexed_job(name)["spec"]
        self.pod = self.spec["template"]["spec"]
        (self.container,) = self.pod["containers"]
        given = {each["name"]: each["value"] for each in self.container["env"]}
        self.port = reserve_port()
        given |= {"COORDINATOR_ADDRESS": f"127.0.0.1:{self.port}", "ALIVE": str(directory / "alive"), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        self.envs = compiled_programs.of_processes(env | {"PJRT_NPROC": "16", "JAX_NUM_CPU_DEVICES": "1", **given}, self.spec["completions"])
        self.failures, self.limit = 0, self.spec["backoffLimit"]

    def start(self, index: int, *arguments: str) -> "subprocess.Popen[str]":
        _, _, *given = self.container["command"]
        given[given.index("--directory") + 1] = str(self.directory / "runs")
        command = [sys.executable, str(CLUSTER / "train.py"), *given, *arguments]
        return subprocess.Popen(command, env=self.envs[index] | {"JOB_COMPLETION_INDEX": str(index)}, cwd=self.directory, **PIPES)

    def has_failed(self, code: int) -> bool:
        """Returns whether the Job has failed because a pod ended with this exit code; counts failures otherwise."""
        for rule in self.spec["podFailurePolicy"]["rules"]:
            if (128 - code if code < 0 else code) in rule.get("onExitCodes", {}).get("values", []):
                return rule["action"] == "FailJob"
        self.failures += 1
        return self.failures > self.limit

    def replace(self, index: int, pods: "dict[int, subprocess.Popen[str]]", *arguments: str) -> None:
        """Starts another pod in place of one that has ended."""
        pods[index] = self.start(index, *arguments)

    def run(self, *arguments: str, evict: float | None = None) -> None:
        """Runs the job to its end; after `evict` seconds one of its pods is evicted, as when a node is drained."""
        pods = {index: self.start(index, *arguments) for index in range(self.spec["completions"])}
        begin, evicted = time.monotonic(), None
        while pods:
            assert time.monotonic() < begin + SECONDS
            if evict is not None and evicted is None and time.monotonic() > begin + evict:
                evicted = pods[1], time.monotonic()
                pods[1].terminate()
            ended = next(((index, pod) for index, pod in pods.items() if pod.poll() is not None), None)
            if ended is None:
                time.sleep(0.05)
                continue
            index, pod = ended
            output, _ = pod.communicate()
            assert "Kubernetes environment detected" not in output  # JAX's own detection would need more than the manifest sets.
            if evicted is not None and pod is evicted[0]:
                assert time.monotonic() < evicted[1] + self.pod["terminationGracePeriodSeconds"]
            code = pods.pop(index).returncode
            assert code == 0 or not self.has_failed(code), output[-3000:]
            if code:
                self.replace(index, pods, *arguments)


class JobSet(Kubernetes):
    """The controller of a JobSet with one Job: if a pod fails, it ends all others, and starts all again."""

    def __init__(self, directory: pathlib.Path, name: str, env: dict[str, str]) -> None:
        super().__init__(directory, name, env)
        (manifest,) = manifests(name)
        assert self.limit == 0  # The Job fails with its first pod.
        self.limit = manifest["spec"]["failurePolicy"]["maxRestarts"]

    def replace(self, index: int, pods: "dict[int, subprocess.Popen[str]]", *arguments: str) -> None:
        for pod in pods.values():
            pod.terminate()
        for pod in pods.values():
            pod.communicate(timeout=self.pod["terminationGracePeriodSeconds"])
        pods.update({each: self.start(each, *arguments) for each in range(self.spec["completions"])})


@pytest.mark.parametrize("name", ["kubernetes-job.yaml", "kubernetes-jobset.yaml"])
@pytest.mark.slow
def test_a_kubernetes_job_with_an_evicted_pod_ends_bit_for_bit_like_a_slurm_job(name, uninterrupted, process_env, tmp_path):
    cluster = (JobSet if "jobset" in name else Kubernetes)(tmp_path, name, process_env)
    cluster.run(*STEPS, "--seed", "3", evict=7.0)
    assert (tmp_path / "alive").exists()
    assert_equal_checkpoints(uninterrupted.directory / "runs/digits-3/checkpoints", tmp_path / "runs/checkpoints")


@pytest.mark.parametrize("name", ["kubernetes-job.yaml", "kubernetes-jobset.yaml"])
def test_the_environment_of_each_pod_connects_it_to_the_others(name, monkeypatch):
    pytest.importorskip("sklearn")  # train.py needs it.
    spec, given = indexed_job(name)["spec"], []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: given.append(options))
    monkeypatch.setattr(launch, "_start_watching", lambda: None)
    env = {each["name"]: each["value"] for each in spec["template"]["spec"]["containers"][0]["env"]}
    join_others = runpy.run_path(str(CLUSTER / "train.py"))["join_others"]
    for index in range(spec["completions"]):
        for variable, value in {**env, "JOB_COMPLETION_INDEX": str(index)}.items():  # Kubernetes sets the last one.
            monkeypatch.setenv(variable, value)
        join_others()
    assert [(each["num_processes"], each["process_id"]) for each in given] == [(4, index) for index in range(4)]
    assert {(each["coordinator_address"], each["cluster_detection_method"]) for each in given} == {(env["COORDINATOR_ADDRESS"], "deactivate")}


def test_the_manifests_match_their_schemas():
    validate = pytest.importorskip("kubernetes_validate")
    for manifest in manifests("kubernetes-job.yaml"):
        validate.validate(manifest, "1.31", strict=True)
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (jobset,) = manifests("kubernetes-jobset.yaml")
    assert "JobsetV1alpha2JobSet" in dir(models)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": replicated["template"]["spec"]}
    validate.validate(job, "1.31", strict=True)
    for container in replicated["template"]["spec"]["template"]["spec"]["containers"]:
        del container["resources"]  # Checked above; this schema's type for quantities does not accept numbers.
    models.JobsetV1alpha2JobSet.model_validate(jobset)
    (rayjob,) = manifests("kubernetes-rayjob.yaml")
    # No package has KubeRay's own schema. These names are those of its version 1.7.
    assert (rayjob["apiVersion"], rayjob["kind"]) == ("ray.io/v1", "RayJob")
    assert set(rayjob["spec"]) == {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
    cluster = rayjob["spec"]["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        validate.validate(pod, "1.31", strict=True)


@pytest.mark.slow
def test_ray_reads_the_cluster_of_the_manifest_with_a_gpu_for_each_worker():
    config = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    (rayjob,) = manifests("kubernetes-rayjob.yaml")
    spec = rayjob["spec"]["rayClusterSpec"]
    # The operator makes this resource, which Ray reads.
    read = config._derive_autoscaling_config_from_ray_cr({"metadata": {"name": "digits", "namespace": "default"}, "spec": spec})
    (head,) = [kind for name, kind in read["available_node_types"].items() if name == read["head_node_type"]]
    workers = read["available_node_types"]["workers"]
    assert head["resources"]["CPU"] == 0 and (workers["min_workers"], workers["max_workers"]) == (4, 4)
    assert workers["resources"] == {"CPU": 8, "GPU": 1, "memory": 32 * 2**30}
    assert rayjob["spec"]["entrypoint"].endswith(f"--workers {workers['max_workers']} --gpus {workers['resources']['GPU']}")


def test_the_manifests_agree_with_each_other_and_with_the_script():
    service, job = manifests("kubernetes-job.yaml")
    (jobset,) = manifests("kubernetes-jobset.yaml")
    name = service["metadata"]["name"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    hosts = {f"{job['metadata']['name']}-0.{name}": job["spec"], f"{name}-{replicated['name']}-0-0.{name}": replicated["template"]["spec"]}
    for host, spec in hosts.items():
        env = {each["name"]: each["value"] for each in spec["template"]["spec"]["containers"][0]["env"]}
        assert env["COORDINATOR_ADDRESS"].startswith(f"{host}:") and int(env["NUM_PROCESSES"]) == spec["completions"] == spec["parallelism"]
        assert spec["podFailurePolicy"]["rules"][-2 if spec is job["spec"] else 0]["onExitCodes"]["values"] == [1, 2]
    assert job["spec"]["template"]["spec"]["subdomain"] == name and service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
