"""The script that test_save_in_processes.py runs in each of several processes: `save_in_processes_script.py '{"scenario": "resume", "port": ..., ...}'`.

Results are lines with a word and JSON: RESULT, or ERROR with the exception's type and text. With `runs`, a dict of arguments by name, the same processes
run several scenarios, one after another, and print a line with `RUN` and the name before each.
"""

import contextlib
import json
import sys
import warnings
from typing import Any

import jax
import numpy as np
import optax

import fitflax
from fitflax import parallel
from fitflax.callbacks import BestCheckpoint, LambdaCallback, ModelCheckpoint
from fitflax.checkpoints import CheckpointStore, orbax_format, shard_format
from fitflax.checkpoints.plain_tree import leaf_paths
from fitflax.parallel.processes import Board
from tests.many_processes_script import DEVICES, Network, examples, share_programs

STRATEGIES: dict[str, Any] = {
    "fsdp": lambda: parallel.Sharded({"data": -1}, fsdp=True, fsdp_min_size=64),
    "tensor": lambda: parallel.Sharded({"data": 1, "model": 4}, fsdp="model", fsdp_min_size=64),
    "mesh": lambda: parallel.Sharded({"data": 2, "model": 2}, rules=[("batch", "data")], fsdp="model", fsdp_min_size=64),
    "data parallel": parallel.DataParallel,
    # The second device of each process holds the same as its first one.
    "copies": lambda: parallel.Sharded({"model": 2, "data": 2}, rules=[("batch", "data")], fsdp="model", fsdp_min_size=64, devices=by_process()),
}


def by_process() -> list[Any]:
    """Returns the devices in an order in which an axis "model" of size two spans processes, and "data" is partly within one."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def trainer(kind: str) -> fitflax.Trainer:
    made = fitflax.Trainer(Network(), parallel=STRATEGIES[kind]())
    made.compile(optax.adam(0.01), "sparse_categorical_crossentropy", ["accuracy"])
    return made


def fit(made: fitflax.Trainer, steps: int, callbacks: list[Any], **options: Any) -> None:
    x, y = examples(90)
    made.fit(x, y, batch_size=32, steps=steps, validation_data=(x[:50], y[:50]), callbacks=callbacks, verbose=0, **options)


def local_shards(made: fitflax.Trainer) -> list[tuple[str, bytes]]:
    """Returns every byte of the state that this process holds."""
    leaves, _, paths = leaf_paths(made.state)
    arrays = {path: jax.random.key_data(leaves[index]) if path == "key" else leaves[index] for path, index in paths.items()}
    return [(path, np.asarray(shard.data).tobytes()) for path, array in sorted(arrays.items()) for shard in array.addressable_shards]


def resume(kind: str, directory: str, asynchronous: bool = True) -> dict[str, Any]:
    """A run that stops and resumes, compared with an uninterrupted one; two callbacks share a directory."""

    def callbacks() -> list[Any]:
        regular = ModelCheckpoint(f"{directory}/checkpoints", every=fitflax.every(steps=1), keep=2, asynchronous=asynchronous)
        return [regular, BestCheckpoint(f"{directory}/checkpoints", asynchronous=asynchronous)]

    whole, first, second = (trainer(kind) for _ in range(3))
    fit(whole, 6, [])
    fit(first, 3, callbacks(), resume="auto")
    fit(second, 6, callbacks(), resume="auto")
    path = second.save(f"{directory}/saved")
    x, y = examples(90)
    third = trainer(kind)
    third.build((x[:32], y[:32]))
    third.restore(path)
    return {
        "split": sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(second.state)),
        "resumed": local_shards(second) == local_shards(whole),
        "restored": local_shards(third) == local_shards(second),
        "outputs": second.predict(x[:10], batch_size=10).tolist(),
        # Of one save only; the next meeting would remove it.
        "saves_on_the_board": len({key.split("/")[2] for key, _ in Board("save")._client.key_value_dir_get_bytes("fitflax/save")}),
    }


def fail(kind: str, directory: str, victim: int, asynchronous: bool = True, every: int = 2, times: int = 100) -> dict[str, Any]:
    """The disk of one process fails `times` times, starting at its third checkpoint."""
    real, calls = orbax_format._save_part, []

    def save_part(path: Any, tree: Any) -> None:
        calls.append(path)
        if 2 < len(calls) <= 2 + times:
            raise OSError(28, "No space left on device", str(path))
        real(path, tree)

    if jax.process_index() == victim:
        orbax_format._save_part = save_part
    try:
        fit(trainer(kind), 12, [ModelCheckpoint(f"{directory}/checkpoints", every=fitflax.every(steps=every), asynchronous=asynchronous)])
    finally:
        orbax_format._save_part = real
    return {}


def desert(kind: str, directory: str, victim: int) -> dict[str, Any]:
    """Only one process has a bug, in its fifth step."""
    shard_format.RESCUE_SECONDS = 3.0

    def bug(batch: int, logs: Any) -> None:
        if jax.process_index() == victim and made.step == 5:
            raise KeyError("a bug in one process")

    made = trainer(kind)
    with warnings.catch_warnings(record=True) as caught:
        try:
            fit(made, 12, [ModelCheckpoint(f"{directory}/checkpoints", every=fitflax.every(steps=2)), LambdaCallback(on_train_batch_end=bug)])
        finally:
            print("WARNED " + json.dumps([str(warning.message) for warning in caught]), flush=True)
    return {}


def replace(kind: str, directory: str, overwrite: bool) -> dict[str, Any]:
    """A second run in the directory of the first one. Process 0 claims it when the other process has read it, or after two seconds."""
    claim, open_run, shard_format.MEETING_SECONDS = CheckpointStore.claim, ModelCheckpoint.open_run, 30.0

    def claim_late(store: Any, run_id: str, **options: Any) -> None:
        with contextlib.suppress(TimeoutError):
            Board("test").read_within("opened", 2.0)
        claim(store, run_id, **options)

    def open_and_tell(callback: Any, run_id: str, step: int) -> None:
        open_run(callback, run_id, step)
        Board("test").post("opened", b"")

    def fit_five_steps(overwrite: bool) -> BestCheckpoint:
        best = BestCheckpoint(directory, overwrite=overwrite)
        fit(trainer(kind), 5, [best, ModelCheckpoint(directory, every=fitflax.every(steps=2), overwrite=overwrite)])
        return best

    fit_five_steps(False)
    if jax.process_index() == 0:
        CheckpointStore.claim = claim_late  # type: ignore[method-assign]
    else:
        ModelCheckpoint.open_run = open_and_tell  # type: ignore[method-assign]
    try:
        return {"best_step": fit_five_steps(overwrite).best_step}
    finally:
        CheckpointStore.claim, ModelCheckpoint.open_run = claim, open_run  # type: ignore[method-assign]


def restore_best(kind: str, directory: str) -> dict[str, Any]:
    """Process 0 writes the best checkpoint only when the other process is at the end of the run."""
    save = CheckpointStore.save

    def save_late(store: Any, **options: Any) -> Any:
        Board("test").read_within("end", 60.0)
        return save(store, **options)

    def end(logs: Any) -> None:
        if jax.process_index():
            Board("test").post("end", b"")

    if jax.process_index() == 0:
        CheckpointStore.save = save_late  # type: ignore[method-assign]
    made = trainer(kind)
    try:
        fit(made, 3, [LambdaCallback(on_train_end=end), BestCheckpoint(directory, restore_best=True)])
    finally:
        CheckpointStore.save = save  # type: ignore[method-assign]
    return {"norm": float(optax.tree.norm(made.state.params))}


def main(*, count: int = 1, index: int = 0, port: int = 0, runs: dict[str, Any] | None = None, **arguments: Any) -> int:
    """Returns the exit status of the last run."""
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        parallel.initialize(f"127.0.0.1:{port}", count, index)
    share_programs()
    status = 0
    for name, given in (runs or {"alone": arguments}).items():
        print("RUN " + name, flush=True)
        status = 0
        try:
            scenario = {"resume": resume, "fail": fail, "desert": desert, "replace": replace, "restore best": restore_best}[given.pop("scenario")]
            print("RESULT " + json.dumps(scenario(**given)), flush=True)
        except Exception as error:  # noqa: BLE001 (the test checks its name and text)
            print("ERROR " + json.dumps([type(error).__name__, str(error)]), flush=True)
            status = 3
    return status


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
