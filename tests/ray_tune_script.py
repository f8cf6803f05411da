"""A Ray Tune driver for tests: `python ray_tune_script.py OPTIONS`, where OPTIONS is JSON: `directory`, `address`, and `kind`, "asha" or "pbt"."""

import contextlib
import json
import os
import pathlib
import sys
import time


def make_trial(options):
    """Returns the function that a trial runs. It is sent to the processes of the trials, each of which makes its trainer once."""
    shared = {}

    def trial(config):
        run_trial(config, options, shared)

    return trial


def run_trial(config, options, shared):
    import jax
    import numpy as np
    import optax
    from flax import linen as nn
    from ray import tune

    import fitflax
    from fitflax.callbacks import LambdaCallback, ModelCheckpoint
    from fitflax.integrations.ray import RayReport

    def note(event, *rest, **more):
        shared["compiled"] += event.endswith("backend_compile_duration")

    if not shared:
        shared["compiled"] = 0
        jax.monitoring.register_event_duration_secs_listener(note)
        shared["trainer"] = fitflax.Trainer(nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(1)]))
        shared["trainer"].compile(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), loss="mse")
    directory = pathlib.Path(options["directory"]) / tune.get_context().get_trial_id()
    directory.mkdir(parents=True, exist_ok=True)
    life = time.time()
    member = shared["trainer"].with_hyperparams(learning_rate=config["learning_rate"])

    def on_epoch_end(epoch, logs):
        row = {"life": life, "pid": os.getpid(), "epoch": epoch, "compiled": shared["compiled"], "rate": member.learning_rate, "loss": logs["loss"]}
        with open(directory / "epochs", "a") as file:
            print(json.dumps(row), file=file)
        mark = directory.parent / "killed"
        if options["kind"] == "asha" and config["learning_rate"] == 0.1 and epoch == 3 and not mark.exists():  # The best one, which ASHA never stops.
            mark.touch()
            os._exit(1)

    def set_rate(logs):
        member.learning_rate = config["learning_rate"]

    x = np.random.default_rng(0).normal(size=(128, 8)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    checkpoint = ModelCheckpoint("checkpoints", every=fitflax.every(epochs=1), overwrite=True)
    callbacks = [LambdaCallback(on_train_begin=set_rate, on_epoch_end=on_epoch_end), checkpoint, RayReport(checkpoint=checkpoint)]
    given = tune.get_checkpoint()
    with contextlib.nullcontext() if given is None else given.as_directory() as path:
        member.fit(x, y, batch_size=32, epochs=options.get("epochs", 8), verbose=0, callbacks=callbacks, resume=path)


def main():
    import ray
    from ray import tune

    options = json.loads(sys.argv[1])
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PJRT_NPROC": "4", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    ray.init(address=options["address"], log_to_driver=options.get("logs", False), logging_level="WARNING", runtime_env={"env_vars": env})
    rates = [0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001]
    if options["kind"] == "asha":
        scheduler = tune.schedulers.ASHAScheduler(time_attr="epoch", max_t=8, grace_period=2, reduction_factor=2)
        space = {"learning_rate": tune.grid_search(rates)}
    else:
        options["epochs"] = 12
        mutations = {"learning_rate": tune.loguniform(1e-3, 0.1)}  # The loss may increase with 0.2.
        scheduler = tune.schedulers.PopulationBasedTraining(time_attr="epoch", perturbation_interval=3, hyperparam_mutations=mutations, synch=True)
        space = {"learning_rate": tune.grid_search([0.1, 0.0001, 0.001, 0.01])}
    tune_config = tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler, reuse_actors=True)
    storage = str(pathlib.Path(options["directory"]) / "ray")
    run_config = tune.RunConfig(name="study", storage_path=storage, failure_config=tune.FailureConfig(max_failures=2), verbose=0)
    tuner = tune.Tuner(tune.with_resources(make_trial(options), {"cpu": 1}), param_space=space, tune_config=tune_config, run_config=run_config)
    results = tuner.fit()
    trials = [{"rate": each.config["learning_rate"], **{key: each.metrics[key] for key in ("loss", "step", "epoch")}} for each in results]
    print(json.dumps({"errors": [str(error) for error in results.errors], "trials": trials, "best": results.get_best_result().config["learning_rate"]}))


if __name__ == "__main__":
    main()
