"""Steps of one batch that belongs to no run: `train_on_batch`, `test_on_batch`, `predict_on_batch`."""

from typing import Any

import jax

from fitflax.data.batch import Triple
from fitflax.loops.session import Session
from fitflax.state import PyTree

__all__ = ["predict_on_batch", "test_on_batch", "train_on_batch"]


def train_on_batch(session: Session, triple: Triple) -> dict[str, Any]:
    """Makes one update, from the state that a first batch builds, and returns loss and metrics of this batch alone, from before the update.

    Raises:
        NotReadyError: Before `compile`.
        OptimizerError: The state is an `InferenceState`.
        DataError, ModelError, LossError, MetricError: What does not fit.
    """
    program = session.need_trainable("train_on_batch")
    fed = session.feeder.single(triple, "train")
    if session.live is None:
        session.build(fed.batch)
    session.see_batch(fed.batch)
    live = session.need_state("train_on_batch")
    program.prepare_train(live.borrow(), fed.batch, is_single=True)
    trained = program.train(live.take(), program.empty_sums(train=True), fed)
    live.advance(trained.state)
    return program.alone(trained.values, trained.rows, train=True)


def test_on_batch(session: Session, triple: Triple) -> dict[str, Any]:
    """Returns loss and metrics of one batch.

    Raises:
        NotReadyError: Before `compile`, or before there is a state.
        DataError, ModelError, LossError, MetricError: What does not fit.
    """
    program, live = session.need_compiled("test_on_batch"), session.need_state("test_on_batch")
    fed = session.feeder.single(triple, "test")
    session.see_batch(fed.batch)
    program.prepare_evaluate(live.borrow(), fed.batch, is_single=True)
    _, values, rows = program.evaluate(program.in_use(live.borrow()), program.empty_sums(train=False), [fed])
    return program.alone(values, rows, train=False)


def predict_on_batch(session: Session, x: PyTree) -> PyTree:
    """Returns the module's outputs for one batch of inputs, as NumPy arrays `[batch, ...]`.

    Raises:
        NotReadyError: Before there is a state.
        DataError, ModelError: What does not fit.
    """
    live, program = session.need_state("predict_on_batch"), session.any_program()
    fed = session.feeder.single(Triple(x, (), None), "predict")
    session.see_batch(fed.batch)
    program.prepare_predict(live.borrow(), fed.batch, is_single=True)
    outputs = session.strategy.join(program.predict(program.in_use(live.borrow()), [fed], 0))
    return jax.tree.map(lambda leaf: leaf[: fed.num_real], outputs)
