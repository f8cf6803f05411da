"""Mistakes that both checkers must report: an unnecessary ignore comment is an error."""
# ruff: noqa: B018

from typing import Any

import numpy as np
from network import Network
from typing_extensions import override

import fitflax
from fitflax.callbacks import BestCheckpoint, Callback, EarlyStopping, LambdaCallback, LearningRateScheduler, ModelCheckpoint
from fitflax.metrics import Metric

x = np.zeros((8, 4), np.float32)

fitflax.Trainer(Network)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
fitflax.Trainer(Network(), "dropout")  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
fitflax.Trainer(Network(), parallel="data")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
fitflax.TrainerState  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

trainer = fitflax.Trainer(Network())
trainer.compile("adam", loss="mse", learnig_rate=3e-4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
trainer.compile("adam", loss="mse", learning_rate="3e-4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainer.fit(x, x, epoch=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
trainer.fit(x, x, epochs="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainer.fit(x, x, None, 2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
trainer.fit(x, x, callbacks=EarlyStopping())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainer.fit(x, x, callbacks=[EarlyStopping])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
trainer.fit(x, x, class_weight=[1.0, 2.0])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainer.fit(x, x).history["loss"].mean()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
trainer.fit(x, x)["loss"]  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
trainer.evaluate(x, x)["loss"].item()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
trainer.learning_rate = "slow"  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
trainer.step = 0  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
trainer.state.parameters  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
trainer.model_state  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
trainer.train_loop(x, x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
trainer.train_loop(x, x, steps=4, every=2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
for checkpoint in trainer.train_loop(x, x, steps=4):
    checkpoint.stepp  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    checkpoint.loss = 0.0  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    trainer.eval_loop(x, x)(checkpoint.step)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
if trainer.find_learning_rate(x, x).suggestion > 0.1:  # type: ignore[operator]  # pyright: ignore[reportOptionalOperand]
    pass
trainer.hunt_nan(x, x).step  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]

fitflax.every(step=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
fitflax.every(steps=2) | 3  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]
fitflax.at([1, 2])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
fitflax.serial("evaluate")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
EarlyStopping("val_loss", 3)  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
EarlyStopping(patience="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ModelCheckpoint(directory=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
BestCheckpoint("best", monitor=["val_loss"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
LearningRateScheduler(0.1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
LambdaCallback("print")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


class Misspelled(Callback):
    @override
    def on_epoch_ended(self, epoch: int, logs: Any) -> None:  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
        self.trainer.stop_trainig = True  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


class Short(Callback):
    @override
    def on_epoch_end(self, epoch: int) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self.model.summary()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


class Unfinished(Metric):
    @override
    def compute(self) -> float:
        return 0.0


Unfinished()  # type: ignore[abstract]  # pyright: ignore[reportAbstractUsage]
