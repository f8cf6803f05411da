"""Trains a graph network with jraph on generated molecules, like Flax's ogbg_molpcba: each has three properties, some of them unknown.

python examples/graphs.py [--directory runs/graphs] [--epochs 20]

Each batch has a budget of atoms and bonds, and is padded to it. All batches have the same shapes, so the step is compiled once.
"""

import argparse
import itertools
import pathlib

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax
from flax import linen as nn

import fitflax
from fitflax.callbacks import BestCheckpoint, ModelCheckpoint
from fitflax.parallel import DataParallel

ELEMENTS, KINDS = 4, 2  # The numbers of elements of atoms, and of kinds of bonds.
PROPERTIES = ("has a ring", "has a double bond at a 0", "has more 1 than 2")
BUDGET = {"n_node": 256, "n_edge": 640, "n_graph": 33}  # The size of a batch, including padding.


def molecule(rng: np.random.Generator) -> jraph.GraphsTuple:
    """Returns a chain of atoms with branches, sometimes with a ring. The graph's globals are the molecule's properties; one in five is unknown (NaN)."""
    atoms = int(rng.integers(4, 12))
    bonds = [(child, int(rng.integers(max(0, child - 3), child))) for child in range(1, atoms)]
    if rng.random() < 0.5:
        known = {frozenset(bond) for bond in bonds}
        bonds.append(next(pair for pair in itertools.combinations(range(atoms), 2) if frozenset(pair) not in known))
    elements, kinds = rng.integers(0, ELEMENTS, atoms), rng.integers(0, KINDS, len(bonds))
    double_at_0 = any(kind and 0 in elements[list(bond)] for bond, kind in zip(bonds, kinds, strict=True))
    properties = np.array([[len(bonds) >= atoms, double_at_0, (elements == 1).sum() > (elements == 2).sum()]], np.float32)
    properties[rng.random(properties.shape) < 0.2] = np.nan
    ends = np.array(bonds, np.int32)
    return jraph.GraphsTuple(
        nodes=np.eye(ELEMENTS, dtype=np.float32)[elements],
        edges=np.eye(KINDS, dtype=np.float32)[np.tile(kinds, 2)],
        senders=np.concatenate([ends[:, 0], ends[:, 1]]),
        receivers=np.concatenate([ends[:, 1], ends[:, 0]]),
        n_node=np.array([atoms]),
        n_edge=np.array([2 * len(bonds)]),
        globals=properties,
    )


def batches(molecules):
    """Yields `(graphs, properties, weights)`. The weight of a property is 0 if it is unknown or if the graph is padding."""
    for graphs in jraph.dynamically_batch(iter(molecules), **BUDGET):
        real = np.asarray(jraph.get_graph_padding_mask(graphs))
        weights = (real[:, None] & ~np.isnan(graphs.globals)).astype(np.float32)
        yield graphs._replace(globals=np.zeros((len(real), 1), np.float32)), np.nan_to_num(graphs.globals), weights


class Shuffled:
    """The batches of molecules, in an order that depends on the number of the pass. It saves its position, so a resumed run seeks."""

    def __init__(self, molecules):
        self.molecules, self.passes, self.taken = molecules, 0, 0

    def __iter__(self):
        order = np.random.default_rng([0, self.passes]).permutation(len(self.molecules))
        for batch in itertools.islice(batches(self.molecules[number] for number in order), self.taken, None):
            self.taken += 1
            yield batch
        self.passes, self.taken = self.passes + 1, 0

    def state_dict(self):
        return {"passes": self.passes, "taken": self.taken}

    def load_state_dict(self, state):
        self.passes, self.taken = state["passes"], state["taken"]


class GraphNet(nn.Module):
    """Rounds of message passing along bonds, and a linear layer that predicts the properties from a molecule's globals."""

    features: int = 64
    rounds: int = 3

    @nn.compact
    def __call__(self, graphs: jraph.GraphsTuple, *, train: bool):
        def update():
            layers = [nn.Dense(self.features), nn.LayerNorm(), nn.relu, nn.Dropout(0.1, deterministic=not train), nn.Dense(self.features)]
            return jraph.concatenated_args(nn.Sequential(layers))

        embed = jraph.GraphMapFeatures(nn.Dense(self.features), nn.Dense(self.features), nn.Dense(self.features))
        graphs = embed(graphs)
        for _ in range(self.rounds):
            new = jraph.GraphNetwork(update_edge_fn=update(), update_node_fn=update(), update_global_fn=update())(graphs)
            graphs = new._replace(nodes=graphs.nodes + new.nodes, edges=graphs.edges + new.edges, globals=graphs.globals + new.globals)
        return nn.Dense(len(PROPERTIES))(graphs.globals)


def right(outputs, properties):
    """Returns whether each property of each molecule is predicted correctly."""
    return ((outputs > 0) == (properties > 0.5)).astype(jnp.float32)


def main(directory: str | pathlib.Path = "runs/graphs", epochs: int = 20, molecules: int = 2000, features: int = 64, verbose: int | str = "auto") -> dict:
    """Trains, and returns for each property the accuracy on held-out molecules, and the accuracy of always predicting the more frequent value."""
    directory = pathlib.Path(directory)
    rng = np.random.default_rng(0)
    train, valid, test = ([molecule(rng) for _ in range(count)] for count in (molecules, molecules // 5, molecules // 5))
    # On several devices, DataParallel(combine_whole_batches=True) would take several batches in a step.
    trainer = fitflax.Trainer(GraphNet(features), seed=0, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.adam(1e-3), loss=optax.sigmoid_binary_cross_entropy, weighted_metrics=[right])
    best = BestCheckpoint(directory / "best", monitor="val_right", mode="max", restore_best=True)
    callbacks = [ModelCheckpoint(directory / "checkpoints"), best]
    trainer.fit(Shuffled(train), epochs=epochs, validation_data=lambda: batches(valid), callbacks=callbacks, resume="auto", verbose=verbose)

    # `predict` leaves out examples with weight zero, such as molecules without known properties. These weights keep all molecules that are not padding.
    outputs = trainer.predict(lambda: ((graphs, y, np.asarray(jraph.get_graph_padding_mask(graphs), np.float32)) for graphs, y, _ in batches(test)))
    known = np.concatenate([graph.globals for graph in test])
    result = {}
    for number, name in enumerate(PROPERTIES):
        there = ~np.isnan(known[:, number])
        values = known[there, number]
        result[name] = float(((outputs[there, number] > 0) == values).mean()), float(max(values.mean(), 1 - values.mean()))
    if verbose:
        print(f"checkpoints: {directory / 'checkpoints'}")
        print(f"best checkpoint: {best.store.path(best.best_step)}")
        for name, (share, same) in result.items():
            print(f"{name}: accuracy {share:.3f} (always the majority: {same:.3f})")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
