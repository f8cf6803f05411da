"""What test_joint_saves.py has each of several processes do: `python tests/checkpoints/joint_saves_script.py '{"scenario": "resume", "port": ..., ...}'`.

Results are lines of JSON after a word: RESULT, or ERROR with the exception's type and text.
"""

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
from fitflax.checkpoints import joint, orbax_format
from fitflax.checkpoints.trees import leaf_paths
from fitflax.parallel.board import Board
from tests.many_processes_script import DEVICES, Network, examples

STRATEGIES: dict[str, Any] = {
    "fsdp": lambda: parallel.Sharded({"data": -1}, fsdp=True, fsdp_min_size=64),
    "tensor": lambda: parallel.Sharded({"data": 1, "model": 4}, fsdp="model", fsdp_min_size=64),
    "mesh": lambda: parallel.Sharded({"data": 2, "model": 2}, rules=[("batch", "data")], fsdp="model", fsdp_min_size=64),
    # Every second device of a process has what the first one has.
    "copies": lambda: parallel.Sharded({"model": 2, "data": 2}, rules=[("batch", "data")], fsdp="model", fsdp_min_size=64, devices=by_turns()),
}


def by_turns() -> list[Any]:
    """The devices such that an axis "model" of two is between processes, and "data" partly within."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def trainer(kind: str) -> fitflax.Trainer:
    made = fitflax.Trainer(Network(), parallel=STRATEGIES[kind]())
    made.compile(optax.adam(0.01), "sparse_categorical_crossentropy", ["accuracy"])
    return made


def fit(made: fitflax.Trainer, steps: int, callbacks: list[Any], **options: Any) -> None:
    x, y = examples(90)
    made.fit(x, y, batch_size=32, steps=steps, validation_data=(x[:50], y[:50]), callbacks=callbacks, verbose=0, **options)


def parts(made: fitflax.Trainer) -> list[tuple[str, bytes]]:
    """Every byte of the state that this process has."""
    leaves, _, paths = leaf_paths(made.state)
    arrays = {path: jax.random.key_data(leaves[index]) if path == "key" else leaves[index] for path, index in paths.items()}
    return [(path, np.asarray(shard.data).tobytes()) for path, array in sorted(arrays.items()) for shard in array.addressable_shards]


def resume(kind: str, directory: str, asynchronous: bool = True) -> dict[str, Any]:
    """A run that stops and goes on, beside one that does not stop; two callbacks share a directory."""

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
        "resumed": parts(second) == parts(whole),
        "restored": parts(third) == parts(second),
        "outputs": second.predict(x[:10], batch_size=10).tolist(),
        # One save's alone, which the next meeting would remove.
        "saves_on_the_board": len({key.split("/")[2] for key, _ in Board("save")._client.key_value_dir_get_bytes("fitflax/save")}),
    }


def fail(kind: str, directory: str, victim: int, asynchronous: bool = True, every: int = 2, times: int = 100) -> dict[str, Any]:
    """The disk of one process fails from its third checkpoint on, so many times."""
    real, calls = orbax_format._save_part, []

    def save_part(path: Any, tree: Any) -> None:
        calls.append(path)
        if 2 < len(calls) <= 2 + times:
            raise OSError(28, "No space left on device", str(path))
        real(path, tree)

    if jax.process_index() == victim:
        orbax_format._save_part = save_part
    fit(trainer(kind), 12, [ModelCheckpoint(f"{directory}/checkpoints", every=fitflax.every(steps=every), asynchronous=asynchronous)])
    return {}


def desert(kind: str, directory: str, victim: int) -> dict[str, Any]:
    """One process alone has a bug in its fifth step."""
    joint.RESCUE_SECONDS = 3.0

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


def main(*, scenario: str, count: int = 1, index: int = 0, port: int = 0, **arguments: Any) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        parallel.initialize(f"127.0.0.1:{port}", count, index)
    print("RESULT " + json.dumps({"resume": resume, "fail": fail, "desert": desert}[scenario](**arguments)), flush=True)


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 (its name and text are what the test looks at)
        print("ERROR " + json.dumps([type(error).__name__, str(error)]), flush=True)
        sys.exit(3)
