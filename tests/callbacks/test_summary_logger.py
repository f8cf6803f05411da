import io
import re
import types

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import fitflax
from fitflax.callbacks import LambdaCallback, SummaryLogger
from fitflax.errors import CallbackError
from fitflax.parallel import DataParallel

X, Y = np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32)

# As written by the system that this replaces.
BLOCK = """\
Step      7: Ran 1 train steps in 15.91 seconds
Step      7: train seconds_per_step | 15.90994287
Step      7: train             loss | 7.84606361
Step      7: eval              lnpp | 5.54795837
"""


class File(io.StringIO):
    """Records the text of each write."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, text):
        self.writes.append(text)
        return super().write(text)


def make():
    trainer = fitflax.Trainer(nn.Dense(3), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.01), loss="mse", metrics=["mae"])
    return trainer


def checkpoint(metrics, *, step=7, steps=1, seconds=0.0, norm=None, is_repeat=False):
    return types.SimpleNamespace(
        step=step,
        n_completed_steps=steps,
        elapsed_time=seconds,
        gradients_norm=norm,
        has_gradients_norm=True,
        params_norm=2.0,
        metrics=metrics,
        run=types.SimpleNamespace(position=types.SimpleNamespace(is_repeat=is_repeat), step_values=None if norm is None else object()),
    )


def written(*checkpoints):
    file = File()
    logger = SummaryLogger(file=file)
    for one in checkpoints:
        assert logger(one) is one
    return file


def without_times(text):
    return re.sub(r"(in|seconds_per_step \|) [\d.]+", r"\1 T", text).splitlines()


def test_the_lines_equal_those_of_the_system_that_this_replaces():
    assert written(checkpoint({"train": {"loss": 7.84606361}, "eval": {"lnpp": 5.54795837}}, seconds=15.90994287)).getvalue() == BLOCK


def test_seconds_are_shown_in_total_and_per_step():
    lines = written(checkpoint({"train": {}}, steps=4, seconds=10.0, norm=0.5)).getvalue().splitlines()
    assert lines == [
        "Step      7: Ran 4 train steps in 10.00 seconds",
        "Step      7: train seconds_per_step | 2.50000000",
        "Step      7: train gradients_l2norm | 0.50000000",
        "Step      7: train   weights_l2norm | 2.00000000",
    ]


def test_long_names_and_steps_only_make_the_line_longer():
    lines = written(checkpoint({"train": {"a_very_long_name_of_a_metric": 1}, "validation": {"x": -2.5}}, step=12345678)).getvalue().splitlines()
    assert lines[0].startswith("Step 12345678: Ran 1")
    assert lines[2:] == ["Step 12345678: train a_very_long_name_of_a_metric | 1.00000000", "Step 12345678: validation                x | -2.50000000"]


def test_the_lines_of_one_checkpoint_are_written_at_a_time():
    file = written(checkpoint({"train": {"loss": 1.0}, "eval": {"loss": 2.0}}), checkpoint({"train": {"loss": 3.0}}, step=8))
    assert [text.count("\n") for text in file.writes] == [4, 3]


def test_scalars_are_written_and_arrays_and_text_are_omitted():
    values = {"matrix": np.eye(2), "list": [1], "text": "a", "float32": np.float32(0.5), "zero_d": np.array(2.0), "jax": jax.numpy.float32(4), "nan": np.nan}
    labels = [line.split("|")[0].split()[-1] for line in written(checkpoint({"train": values})).getvalue().splitlines()[2:]]
    assert labels == ["float32", "zero_d", "jax", "nan"]


def test_a_restored_step_shows_only_the_available_values():
    """This process has not run the step, so there are no steps, no gradient and no training metrics."""
    assert written(checkpoint({"train": {}, "eval": {"loss": 1.0}}, steps=0)).getvalue() == (
        "Step      7: Ran 0 train steps in 0.00 seconds\nStep      7: eval              loss | 1.00000000\n"
    )


def test_a_repeated_checkpoint_is_not_written_again():
    one = checkpoint({"train": {"loss": 1.0}})
    again = checkpoint({"train": {"loss": 1.0}}, is_repeat=True)
    assert len(written(one, again).writes) == 1


def test_as_a_plain_function_it_writes_the_values_of_the_checkpoint():
    trainer, file, seen = make(), File(), []
    evaluate = trainer.eval_loop(X, Y, name="valid")
    with fitflax.serial(evaluate, SummaryLogger(file=file), seen.append) as process:
        for one in trainer.train_loop(X, Y, steps=7, batch_size=4, every=fitflax.every(steps=3)):
            process(one)
    assert [one.step for one in seen] == [3, 6, 7] and len(file.writes) == 3
    for one, text in zip(seen, file.writes, strict=True):
        head = f"Step {one.step:6d}: "
        assert without_times(text) == [
            f"{head}Ran {one.n_completed_steps} train steps in T seconds",
            f"{head}train seconds_per_step | T",
            f"{head}train gradients_l2norm | {one.gradients_norm:.8f}",
            f"{head}train   weights_l2norm | {one.params_norm:.8f}",
            f"{head}train             loss | {one.metrics['train']['loss']:.8f}",
            f"{head}train              mae | {one.metrics['train']['mae']:.8f}",
            f"{head}valid             loss | {one.metrics['valid']['loss']:.8f}",
            f"{head}valid              mae | {one.metrics['valid']['mae']:.8f}",
        ]


def test_it_obeys_its_own_trigger():
    trainer, file = make(), File()
    logger = SummaryLogger(every=fitflax.every(steps=2), file=file)
    for one in trainer.train_loop(X, Y, steps=5, batch_size=4):
        logger(one)
    assert [int(text[4:11]) for text in file.writes] == [2, 4]


def test_in_fit_it_writes_at_the_end_of_each_epoch_with_validation_and_added_values():
    file = File()
    add = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(added=epoch))
    history = make().fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), callbacks=[SummaryLogger(file=file), add], verbose=0)
    assert [without_times(text) for text in file.writes] == [
        [
            f"Step {step:6d}: Ran 2 train steps in T seconds",
            f"Step {step:6d}: train seconds_per_step | T",
            *without_times(file.writes[epoch])[2:4],
            f"Step {step:6d}: train             loss | {history.history['loss'][epoch]:.8f}",
            f"Step {step:6d}: train              mae | {history.history['mae'][epoch]:.8f}",
            f"Step {step:6d}: train            added | {epoch:.8f}",
            f"Step {step:6d}: val               loss | {history.history['val_loss'][epoch]:.8f}",
            f"Step {step:6d}: val                mae | {history.history['val_mae'][epoch]:.8f}",
        ]
        for epoch, step in enumerate((2, 4))
    ]


def test_in_fit_it_does_not_write_when_the_triggers_of_other_callbacks_fire():
    file, trainer = File(), make()
    other = LambdaCallback(lambda checkpoint: trainer.stop("enough") if checkpoint.step == 5 else None, every=fitflax.every(steps=1))
    trainer.fit(X, Y, batch_size=4, epochs=9, callbacks=[SummaryLogger(file=file), other], verbose=0)
    # Only after its trigger has fired, step 5 becomes the last one. Its time was in the first of its checkpoints.
    assert [(int(text[4:11]), "Ran" in text, "train             loss" in text) for text in file.writes if text] == [
        (2, True, True),
        (4, True, True),
        (5, False, True),
    ]


@pytest.mark.parametrize(("steps", "expected"), [(1, [1, 2, 3, 4]), (3, [2, 3, 4])])
def test_in_fit_it_writes_each_validation_inside_an_epoch(steps, expected):
    file, other = File(), LambdaCallback(lambda checkpoint: None, every=fitflax.every(steps=1))
    callbacks = [SummaryLogger(file=file), other]
    make().fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), validation_freq=fitflax.every(steps=steps), callbacks=callbacks, verbose=0)
    assert [int(text[4:11]) for text in file.writes] == expected
    assert [step for step, text in zip(expected, file.writes, strict=True) if "val " in text] == [step for step in expected if step % steps == 0]


@pytest.mark.parametrize(("count", "steps"), [(1, [2, 3]), (2, [2])])
def test_after_an_error_it_writes_the_last_step_only_if_no_other_process_must_compute_norms(count, steps, monkeypatch):
    file, trainer = File(), make()

    def fail(one):
        if one.step == 3:
            monkeypatch.setattr(jax, "process_count", lambda: count)
            raise ArithmeticError("broken")

    with pytest.raises(ArithmeticError):
        trainer.fit(X, Y, batch_size=4, epochs=2, callbacks=[LambdaCallback(fail, every=fitflax.every(steps=1)), SummaryLogger(file=file)], verbose=0)
    assert [int(text[4:11]) for text in file.writes if text] == steps


@pytest.mark.parametrize(("every", "steps"), [(None, [2, 3, 3]), (fitflax.every(steps=2), [2])])
def test_the_validation_of_an_incomplete_epoch_is_written_after_its_last_step(every, steps):
    file = File()
    history = make().fit(X, Y, batch_size=4, steps=3, validation_data=(X, Y), callbacks=[SummaryLogger(every=every, file=file)], verbose=0)
    assert [int(text[4:11]) for text in file.writes] == steps
    if 3 in steps:
        loss, mae = (history.history[key][-1] for key in ("val_loss", "val_mae"))
        assert file.writes[-1] == f"Step      3: val               loss | {loss:.8f}\nStep      3: val                mae | {mae:.8f}\n"


def test_the_default_file_is_standard_output_at_the_time_of_writing(capsys):
    logger = SummaryLogger()
    logger(checkpoint({"train": {}}))
    assert capsys.readouterr().out == "Step      7: Ran 1 train steps in 0.00 seconds\nStep      7: train seconds_per_step | 0.00000000\n"


@pytest.mark.parametrize(
    ("kwargs", "message"), [({"every": 10}, r"SummaryLogger\(every=...\) takes a trigger"), ({"file": "log.txt"}, r"file=...\) must be a file .*'log.txt'")]
)
def test_invalid_arguments_are_errors(kwargs, message):
    with pytest.raises(CallbackError, match=message):
        SummaryLogger(**kwargs)
