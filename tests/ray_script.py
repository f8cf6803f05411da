"""A Ray Train driver for tests: `python ray_script.py OPTIONS`, where OPTIONS is JSON. `faults` is a list of `[step, rank, kind]`; each happens once."""

import json
import os
import pathlib
import resource
import sys
import time


def make_data():
    """Returns the same 256 examples everywhere."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def make_trainer(options):
    """Returns a trainer of a small network, which is large enough to fill the disk."""
    import optax
    from flax import linen as nn

    import fitflax

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.relu(nn.Dense(96)(nn.relu(nn.Dense(96)(x))))
            return nn.Dense(1)(nn.Dropout(options.get("dropout", 0.2), deterministic=not train)(x))

    trainer = fitflax.Trainer(Net(), seed=1, **({"inputs": "x", "targets": "y"} if options.get("data") == "ray" else {}))
    trainer.compile(optax.adam(options.get("learning_rate", 0.01)), loss="mse", metrics=["mae"])
    return trainer


def train(options):
    import jax
    import numpy as np
    import ray.train

    import fitflax
    from fitflax.callbacks import Callback, ModelCheckpoint
    from fitflax.integrations.ray import RayReport

    fitflax.parallel.initialize()
    directory, rank = pathlib.Path(options["directory"]), ray.train.get_context().get_world_rank()
    with open(directory / "pids", "a") as pids:
        print(os.getpid(), file=pids)
    assert (jax.process_index(), jax.process_count()) == (rank, ray.train.get_context().get_world_size())

    class Fault(Callback):
        def on_train_begin(self, logs):
            if rank == 0:
                with open(directory / "starts", "a") as starts:
                    print(self.params["resumed_step"], jax.process_count(), file=starts)

        def on_train_batch_end(self, batch, logs):
            for number, (step, culprit, kind) in enumerate(options["faults"]):
                mark = directory / f"fault-{number}"
                if self.trainer.step >= step and rank == culprit and not mark.exists():
                    logs["loss"]  # Waits until all steps up to here have been computed.
                    mark.write_text(ray.get_runtime_context().get_node_id())
                    if kind == "kill":
                        os.kill(os.getpid(), 9)
                    elif kind == "fail":
                        raise RuntimeError("the fault that was asked for")
                    elif kind == "disk":
                        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))  # Less than a checkpoint, until this process ends.
                    elif kind == "wait":
                        time.sleep(120)  # Meanwhile, the test does something to this process.

    trainer = make_trainer(options)
    data = make_data()
    if options.get("data") == "ray":
        data = (ray.train.get_dataset_shard("train"),)
    checkpoint = ModelCheckpoint(directory / "checkpoints", every=fitflax.every(steps=options.get("every", 5)), **options.get("checkpoint", {}))
    triggers = fitflax.every(epochs=1) | fitflax.every(steps=3) if options.get("often") else None
    callbacks = [Fault(), checkpoint, RayReport(checkpoint=checkpoint, every=triggers)]
    history = trainer.fit(*data, batch_size=32, epochs=options["epochs"], verbose=0, callbacks=callbacks, resume="auto")
    if rank == 0:
        leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.state.params)}
        np.savez(directory / "end.npz", **leaves)
        (directory / "history.json").write_text(json.dumps({"step": trainer.step, **{key: list(map(float, row)) for key, row in history.history.items()}}))


def main():
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    class Uneven(ray.train.DataConfig):
        def configure(self, datasets, world_size, worker_handles, worker_node_ids, **rest):
            parts = datasets["train"].streaming_split(world_size, equal=False, locality_hints=worker_node_ids)
            return [{"train": part} for part in parts]

    options = json.loads(sys.argv[1])
    directory = pathlib.Path(options["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PJRT_NPROC": "4", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    ray.init(address=options["address"], log_to_driver=options.get("logs", False), logging_level="WARNING")
    workers = options.get("workers", 2)
    counts = tuple(workers) if isinstance(workers, list) else workers
    scaling = ScalingConfig(num_workers=counts, resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=options.get("resize", 60.0))
    failure = FailureConfig(max_failures=options.get("max_failures", 3))
    run = RunConfig(name="run", storage_path=str(directory / "ray"), failure_config=failure, worker_runtime_env={"env_vars": env})
    datasets = None
    more = {}
    if options.get("data") == "ray":
        x, y = make_data()
        datasets = {"train": ray.data.from_items([{"x": each, "y": target} for each, target in zip(x[:250], y[:250], strict=True)])}
        if options.get("uneven"):
            datasets = {"train": datasets["train"].repartition(5)}
            more["dataset_config"] = Uneven()
    trainer = JaxTrainer(train, train_loop_config=options, scaling_config=scaling, run_config=run, datasets=datasets, **more)
    result = trainer.fit()
    from fitflax.integrations.ray import checkpoint_path

    print(json.dumps({"metrics": result.metrics, "checkpoint": checkpoint_path(result.checkpoint)}))


if __name__ == "__main__":
    main()
