import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import fitflax
from fitflax.callbacks import LambdaCallback
from fitflax.errors import CallbackError
from fitflax.parallel import DataParallel

X, Y = np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32)


def fit(*callbacks, **kwargs):
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.1), loss="mse")
    trainer.fit(X, Y, batch_size=2, callbacks=callbacks, verbose=0, **kwargs)
    return trainer


def test_functions_are_called_with_the_arguments_of_their_hooks():
    calls = []
    fit(
        LambdaCallback(
            on_train_begin=lambda logs: calls.append(("begin", dict(logs))),
            on_epoch_begin=lambda epoch, logs: calls.append(("epoch", epoch)),
            on_train_batch_end=lambda batch, logs: calls.append(("batch", batch)),
            on_epoch_end=lambda epoch, logs: calls.append(("end", epoch, list(logs))),
        )
    )
    assert calls == [("begin", {}), ("epoch", 0), ("batch", 0), ("batch", 1), ("batch", 2), ("batch", 3), ("end", 0, ["loss"])]


def test_a_function_is_called_with_checkpoints_when_its_trigger_fires():
    steps = []
    fit(LambdaCallback(lambda checkpoint: steps.append(checkpoint.step), every=fitflax.every(steps=3) | fitflax.at(1)), epochs=2)
    assert steps == [1, 3, 6]


def test_without_a_trigger_a_function_is_called_with_every_checkpoint_of_the_loop():
    steps = []
    due = LambdaCallback(lambda checkpoint: None, every=fitflax.at(2))
    fit(LambdaCallback(lambda checkpoint: steps.append(checkpoint.step)), due, epochs=2)
    assert steps == [2, 4, 8]


def test_triggers_are_combined_as_in_the_tables_of_bobbin():
    steps = []
    fit(LambdaCallback(lambda checkpoint: steps.append(checkpoint.step), every=fitflax.every(steps=5) | fitflax.first(2)), epochs=3)
    assert steps == [1, 2, 5, 10]


def test_a_trigger_for_the_first_steps_of_the_process_counts_from_the_start_of_the_run():
    steps = []
    trainer = fit()
    callback = LambdaCallback(lambda checkpoint: steps.append(checkpoint.step), every=fitflax.first(2, of_process=True))
    trainer.fit(X, Y, batch_size=2, callbacks=[callback], verbose=0)
    assert steps == [5, 6]


def test_several_instances_can_be_used_together():
    steps = []
    fit(*(LambdaCallback(lambda checkpoint, n=n: steps.append(n)) for n in range(3)))
    assert steps == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LambdaCallback(on_epoch_ends=print), r"There is no hook 'on_epoch_ends'.*Did you mean 'on_epoch_end'\?"),
        (lambda: LambdaCallback(on_batch_end=print), r"There is no hook 'on_batch_end'.* The hooks are on_train_begin, "),
        (lambda: LambdaCallback(on_epoch_end=3), r"LambdaCallback\(on_epoch_end=...\) must be a function. Received: 3"),
        (lambda: LambdaCallback("fn"), r"must be a function. Received: 'fn'"),
        (lambda: LambdaCallback(every=fitflax.every(steps=1)), r"LambdaCallback\(every=...\) sets when fn is called, but fn is missing"),
        (lambda: LambdaCallback(print, on_checkpoint=print), r"fn and on_checkpoint=, which are the same hook"),
        (lambda: LambdaCallback(print, every=10), r"LambdaCallback\(every=...\) takes a trigger.*Received: 10"),
    ],
)
def test_invalid_hooks_functions_and_triggers_are_errors(make, message):
    with pytest.raises(CallbackError, match=message):
        make()
