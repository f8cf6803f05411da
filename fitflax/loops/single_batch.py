"""Steps on single batches outside a run: `train_on_batch`, `test_on_batch`, `predict_on_batch`."""

from typing import Any

import jax

from fitflax.data.batch import Triple
from fitflax.data.whole_batches import without_padding
from fitflax.loops.session import Session
from fitflax.state import PyTree
from fitflax.steps.early_checks import check_total_weight

__all__ = ["predict_on_batch", "test_on_batch", "train_on_batch"]


def train_on_batch(session: Session, triple: Triple) -> dict[str, Any]:
    """Runs one update and returns loss and metrics of this batch, from before the update. The first batch initializes the state."""
    program = session.need_trainable("train_on_batch")
    fed = session.task.feeder.single(triple, "train")
    if session.state.live is None:
        session.state.build(fed.batch)
    session.state.check_batch(fed.batch)
    live = session.state.need("train_on_batch")
    program.preparation.train(live.borrow(), fed.batch, is_single=True)
    trained = program.train(live.take(), program.empty_sums(train=True), fed)
    live.advance(trained.state)
    metrics = program.single_batch_metrics(trained.values, trained.rows, train=True)
    check_total_weight(program, "train", trained.values)
    return metrics


def test_on_batch(session: Session, triple: Triple) -> dict[str, Any]:
    """Returns loss and metrics of one batch."""
    program, live = session.task.need_compiled("test_on_batch"), session.state.need("test_on_batch")
    fed = session.task.feeder.single(triple, "test")
    session.state.check_batch(fed.batch)
    program.preparation.evaluate(live.borrow(), fed.batch, is_single=True)
    _, values, rows = program.evaluate(program.eval_carry(live.borrow()), program.empty_sums(train=False), [fed])
    metrics = program.single_batch_metrics(values, rows, train=False)
    check_total_weight(program, "test", values)
    return metrics


def predict_on_batch(session: Session, x: PyTree) -> PyTree:
    """Returns the module's outputs for one batch of inputs, as NumPy arrays `[batch, ...]`."""
    live, program = session.state.need("predict_on_batch"), session.task.any_program()
    fed = session.task.feeder.single(Triple(x, (), None), "predict")
    session.state.check_batch(fed.batch)
    program.preparation.predict(live.borrow(), fed.batch, is_single=True, is_counted=fed.is_counted)
    outputs = session.strategy.join(program.predict(program.eval_carry(live.borrow()), [fed], 0))
    rows = jax.tree.map(lambda leaf: leaf[: fed.num_real], outputs) if fed.real is None else without_padding(outputs, fed.real)
    return rows.rebuilt()
