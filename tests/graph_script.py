"""Small graphs in batches that are padded to one size, and a script that trains on them, which tests start and kill.

`python tests/graph_script.py '{"directory": ...}'` is one run; with `count`, `index` and `port` it is one process of several, which
execute `runs` one after another.
"""

import json
import os
import pathlib
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import fitflax
from fitflax import parallel
from fitflax.callbacks import LambdaCallback, ModelCheckpoint
from fitflax.data import Shard
from fitflax.errors import FitflaxError
from fitflax.parallel import DataParallel
from tests.run_script import rows_of, state_of

# Of a batch, including padding.
NODES, EDGES, GRAPHS = 24, 40, 6


class Graphs(NamedTuple):
    """Several graphs; padding nodes and edges belong to the last graphs."""

    nodes: Any
    edges: Any
    senders: Any
    receivers: Any
    n_node: Any
    globals: Any = None


class GraphNet(nn.Module):
    """One step of messages along the edges, then a sum over the nodes of each graph."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, graphs: Graphs, train: bool = False) -> jax.Array:
        messages = nn.Dense(8)(graphs.nodes)[graphs.senders] * nn.Dense(8)(graphs.edges)
        received = jax.ops.segment_sum(messages, graphs.receivers, graphs.nodes.shape[0])
        nodes = nn.tanh(nn.Dense(8)(jnp.concatenate([graphs.nodes, received], axis=1)))
        nodes = nn.Dropout(self.dropout, deterministic=not train)(nodes)
        of_graph = jnp.repeat(jnp.arange(graphs.n_node.shape[0]), graphs.n_node, total_repeat_length=nodes.shape[0])
        return nn.Dense(2)(jax.ops.segment_sum(nodes, of_graph, graphs.n_node.shape[0]))


def batch_of(rng: np.random.Generator, real: int, *, nodes: int = NODES, edges: int = EDGES, graphs: int = GRAPHS) -> tuple[Graphs, Any, Any]:
    """Returns `(graphs, labels, weights)`; the last graph, and those after the first `real`, are padding."""
    sizes = rng.integers(2, 5, real)
    used, count = int(sizes.sum()), int(edges * 0.7)
    n_node = np.zeros(graphs, np.int32)
    n_node[:real], n_node[real] = sizes, nodes - used
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    nodes_of_edges = rng.integers(0, used, count)
    senders = np.full(edges, used, np.int32)
    receivers = senders.copy()
    senders[:count] = nodes_of_edges
    receivers[:count] = first[nodes_of_edges] + rng.integers(0, 2, count)
    features = np.zeros((nodes, 3), np.float32)
    features[:used] = rng.normal(size=(used, 3))
    labels = rng.integers(0, 2, (graphs, 2)).astype(np.float32)
    weights = np.zeros((graphs, 2), np.float32)
    weights[:real] = rng.random((real, 2)) < 0.8
    weights[:real, 0] = 1.0
    labels[weights == 0] = 7.0  # They must not be used.
    return Graphs(features, rng.normal(size=(edges, 2)).astype(np.float32), senders, receivers, n_node), labels, weights


def batches(count: int, seed: int = 0, **sizes: int) -> list[tuple[Graphs, Any, Any]]:
    """Returns batches with 2 to 4 real graphs each."""
    rng = np.random.default_rng(seed)
    return [batch_of(rng, int(rng.integers(2, 5)), **sizes) for _ in range(count)]


def stream(count: int, seed: int = 0) -> Any:
    """Returns a function that yields batches."""

    def make() -> Iterator[tuple[Graphs, Any, Any]]:
        yield from batches(count, seed)

    return make


def right(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return ((outputs > 0) == labels).astype(jnp.float32)


def trainer_of(devices: int = 1, *, dropout: float = 0.0, combines: bool = True, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(GraphNet(dropout), parallel=DataParallel(jax.devices()[:devices], combine_whole_batches=combines))
    trainer.compile(optax.adam(0.05), optax.sigmoid_binary_cross_entropy, **options)
    return trainer


def main(directory: str, *, devices: int = 1, kill_at: int | None = None, steps_per_epoch: int | None = None, steps_per_call: int = 1) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="This data source cannot seek")
    root = pathlib.Path(directory)
    trainer = trainer_of(devices, dropout=0.5, metrics=[right], steps_per_call=steps_per_call)
    began: list[int] = []

    def kill(*_: Any) -> None:
        if trainer.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    saves = ModelCheckpoint(root / "checkpoints", every=fitflax.every(steps=1), asynchronous=False)
    callbacks = [saves, LambdaCallback(on_train_begin=lambda logs: began.append(trainer.step), on_train_batch_end=kill)]
    options: dict[str, Any] = {"epochs": 3, "steps_per_epoch": steps_per_epoch, "validation_data": stream(3, 1), "callbacks": callbacks}
    history = trainer.fit(stream(10), resume="auto", verbose=0, **options)
    state = {path: list(map(str, leaf)) for path, leaf in state_of(trainer).items()}
    (root / "result.json").write_text(json.dumps({"began_at": began[0], "state": state, "history": rows_of(history)}))


def shares() -> list[list[tuple[Graphs, Any, Any]]]:
    """Returns the shards of two processes; the second one ends first."""
    data = batches(7)
    return [data[:5], data[5:]]


def joined_shares() -> list[tuple[Graphs, Any, Any]]:
    """Returns the batches with which one process with four devices runs the same steps."""
    (first, second), found = shares(), []
    for begin in range(0, 5, 2):
        for shard in (first, second):
            left = shard[begin : begin + 2]
            missing = [(*(left or shard)[-1][:2], np.zeros((GRAPHS, 2), np.float32))] * (2 - len(left))
            found += left + missing
    return found


def train(count: int, index: int, *, sharded: bool, directory: str | None = None, mistake: str = "") -> None:
    """Trains on four devices of one process or two, and prints the results."""
    trainer = trainer_of(4, combines=mistake != "not combined", metrics=[right])
    data: Any = lambda: iter(joined_shares() if sharded else batches(10))  # noqa: E731
    valid: Any = stream(3, 1)
    if sharded and count > 1:
        data = Shard(lambda: iter(shares()[index]))
    if mistake == "shapes" and index:
        data = Shard(lambda: iter(batches(5, nodes=32)))
    callbacks = [] if directory is None else [ModelCheckpoint(f"{directory}/checkpoints", every=fitflax.every(steps=1))]
    options: dict[str, Any] = {"validation_data": valid, "callbacks": callbacks, "resume": "auto" if callbacks else None, "verbose": 0}
    for steps in [5] if directory is None else [2, 5]:
        history = trainer.fit(data, steps=steps, **options)
    outputs = trainer.predict(data if sharded else stream(5))
    result = {"loss": history.history["loss"][-1], "right": history.history["right"], "val_loss": history.history["val_loss"]}
    result |= {"norm": float(optax.tree.norm(trainer.state.params)), "evaluation": trainer.evaluate(data, verbose=0)["loss"], "outputs": outputs.tolist()}
    print("RESULT " + json.dumps(result), flush=True)


def several(*, count: int, index: int, port: int, runs: dict[str, Any]) -> int:
    """Executes each of `runs`, whose name it prints first; returns the exit status of the last one."""
    jax.config.update("jax_num_cpu_devices", 4 // count)
    if count > 1:
        parallel.initialize(f"127.0.0.1:{port}", count, index)
    status = 0
    for name, given in runs.items():
        print("RUN " + name, flush=True)
        status = 0
        try:
            train(count, index, **given)
        except FitflaxError as error:
            print(f"ERROR {type(error).__name__}: {error}", flush=True)
            status = 3
    return status


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    if "count" in arguments:
        sys.exit(several(**arguments))
    main(arguments.pop("directory"), **arguments)
