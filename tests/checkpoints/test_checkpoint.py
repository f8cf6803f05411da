"""`Checkpoint` and `Summary`: what they hold, that they read and copy only what is requested, and how long they are valid."""

import copy
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.checkpoints import CheckpointStore
from fitflax.checkpoints.save import save_run
from fitflax.checkpoints.saver import Saver, Snapshots
from fitflax.errors import NotReadyError
from fitflax.logs import StepValues
from fitflax.loops.training_loop import Run
from fitflax.parallel import DataParallel
from tests.run_script import TRAIN, VALID, Network, leaves_of, make_trainer, state_of


@pytest.fixture(scope="module")
def shared() -> fitflax.Trainer:
    return make_trainer(model=Network())


@pytest.fixture
def trainer(shared: fitflax.Trainer) -> fitflax.Trainer:
    shared.build((TRAIN[0][:4], TRAIN[1][:4]))
    return shared


def loop_of(trainer: fitflax.Trainer, steps: int = 8, **options: object) -> fitflax.TrainLoop:
    return trainer.train_loop(TRAIN, batch_size=4, steps=steps, **options)


def as_leaves(tree: object) -> list[object]:
    return [leaves_of(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_a_checkpoint_has_the_position_of_the_run(trainer):
    seen = [(c.step, c.epoch, c.step_in_epoch, c.n_completed_steps) for c in loop_of(trainer, 7)]
    assert seen == [(1, 0, 1, 1), (2, 0, 2, 1), (3, 0, 3, 1), (4, 0, 4, 1), (5, 0, 5, 1), (6, 1, 1, 1), (7, 1, 2, 1)]


def test_epoch_ends_is_true_only_at_the_last_step_of_an_epoch(trainer):
    seen = [(c.step, c.epoch_ends) for c in loop_of(trainer, 6, steps_per_epoch=2)]
    assert seen == [(step, step % 2 == 0) for step in range(1, 7)]


@pytest.mark.slow
def test_data_position_counts_the_examples_that_finished_steps_have_used(trainer):
    seen = [(c.data_position.passes, c.data_position.examples) for c in loop_of(trainer, 6, shuffle=False)]
    first_pass = seen[0][0]  # A trainer that has been trained continues with another pass.
    assert seen == [(first_pass, 4), (first_pass, 8), (first_pass, 12), (first_pass, 16), (first_pass + 1, 0), (first_pass + 1, 4)]


def test_the_state_is_from_the_step_of_the_checkpoint_and_stays_valid_after_later_steps(trainer):
    kept = []
    for checkpoint in loop_of(trainer):
        kept.append((checkpoint.state, as_leaves(trainer.state)))
    assert len(kept) == 8
    for number, (state, leaves) in enumerate(kept, 1):
        assert int(state.step) == number
        assert as_leaves(state) == leaves


def test_parts_of_a_checkpoint_belong_to_its_state_and_are_copied_only_once(trainer):
    checkpoint = next(loop_of(trainer))
    state = checkpoint.state
    assert checkpoint.model_params is state.params and checkpoint.optimizer_state is state.opt_state
    assert checkpoint.model_state["batch_stats"] is state.model_state["batch_stats"]
    assert checkpoint.state.params is state.params


def test_only_what_is_read_is_copied(trainer, monkeypatch):
    loop = loop_of(trainer)
    checkpoint = next(loop)
    copied: list[int] = []
    copy = DataParallel.copy
    monkeypatch.setattr(DataParallel, "copy", lambda self, tree: (copied.append(len(jax.tree.leaves(tree))), copy(self, tree))[1])
    assert (checkpoint.loss > 0, checkpoint.metrics["train"]["loss"] > 0, checkpoint.gradients_norm > 0) == (True, True, True)
    assert checkpoint.run_state
    assert copied == []
    assert checkpoint.model_params is checkpoint.model_params
    assert len(copied) == 1


@pytest.mark.parametrize("part", ["state", "model_params", "model_state", "optimizer_state", "run_state"])
def test_a_first_read_after_the_loop_has_moved_on_is_an_error_naming_the_step(part, trainer):
    loop = loop_of(trainer)
    checkpoint = next(loop)
    next(loop)
    with pytest.raises(NotReadyError, match="step 1 is gone: the loop is at step 2"):
        getattr(checkpoint, part)


def test_a_part_that_was_read_can_be_read_after_the_loop_has_moved_on(trainer):
    loop = loop_of(trainer)
    checkpoint = next(loop)
    params = checkpoint.model_params
    next(loop)
    assert checkpoint.model_params is params
    with pytest.raises(NotReadyError, match="step 1 is gone"):
        checkpoint.optimizer_state  # noqa: B018


def test_loss_gradients_norm_and_metrics_can_be_read_at_any_time(trainer):
    early = [(c.loss, c.gradients_norm, c.metrics) for c in loop_of(trainer, shuffle=False)]
    trainer.build((TRAIN[0][:4], TRAIN[1][:4]))
    late = [(c.loss, c.gradients_norm, c.metrics) for c in list(loop_of(trainer, shuffle=False))]
    assert early == late


def test_metrics_cover_the_epoch_so_far_and_loss_covers_only_the_step(trainer):
    loop = loop_of(trainer, steps=7)
    losses, rows = [], []
    for checkpoint in loop:
        losses.append(checkpoint.loss)
        rows.append(checkpoint.metrics["train"]["loss"])
    sizes = [4, 4, 4, 4, 2]
    running = [np.average(losses[:k], weights=sizes[:k]) for k in range(1, 6)] + [np.mean(losses[5:k]) for k in (6, 7)]
    assert rows == pytest.approx(running, rel=1e-6)


def test_a_summary_adds_metric_groups_and_shares_what_was_copied(trainer):
    checkpoint = next(loop_of(trainer))
    params = checkpoint.model_params
    first = trainer.eval_loop(VALID, name="dev")(checkpoint)
    second = trainer.eval_loop(TRAIN, name="again")(first)
    assert type(second) is fitflax.Summary and isinstance(second, fitflax.Checkpoint)
    assert list(second.metrics) == ["train", "dev", "again"]
    assert second.model_params is params
    assert second.metrics["dev"] == trainer.evaluate(VALID, verbose=0)
    assert set(checkpoint.metrics["train"]) <= set(second.logs)
    assert second.evaluated == {"dev_loss", "dev_accuracy", "again_loss", "again_accuracy"}


def test_a_summary_of_a_checkpoint_that_is_gone_is_an_error(trainer):
    loop = loop_of(trainer)
    checkpoint = next(loop)
    next(loop)
    with pytest.raises(NotReadyError, match="step 1 is gone"):
        trainer.eval_loop(VALID)(checkpoint)


def test_a_saved_checkpoint_contains_what_a_resume_needs(trainer):
    loop = loop_of(trainer)
    checkpoint = loop.run(3)
    contents: dict[str, Any] = {}

    class Store(CheckpointStore):
        def save(self, **given: Any) -> pathlib.Path:
            contents.update(given)
            return self.directory

    save_run(checkpoint, Store("nowhere"), owner="me", keep=[], asynchronous=False)
    assert contents.keys() == {"step", "train", "run", "metadata", "owner", "keep", "also", "collective"}
    assert set(contents["run"]) >= {"callbacks", "schedules", "sums", "values"}
    metadata = contents["metadata"]
    assert (metadata["step"], metadata["epoch"], metadata["step_in_epoch"]) == (3, 0, 3)
    assert metadata["data_position"] == {"passes": 0, "examples": 12}
    assert metadata["settings"].items() >= {"seed": 0, "batch_size": 4, "steps_per_epoch": None, "num_examples": 18}.items()
    assert metadata["progress"]["step"] == 3 and metadata["run_id"]
    assert state_of(trainer) == {jax.tree_util.keystr(path): leaves_of(leaf)[""] for path, leaf in jax.tree_util.tree_leaves_with_path(contents["train"])}


def test_between_two_epochs_there_are_no_sums_to_save(trainer):
    checkpoint = loop_of(trainer).run(5)
    assert "sums" not in checkpoint.run_state


def test_elapsed_time_excludes_the_consumer_of_the_loop(trainer, monkeypatch):
    now = [0.0]
    monkeypatch.setitem(Run.__init__.__kwdefaults__, "clock", lambda: now[0])
    elapsed = []
    for checkpoint in loop_of(trainer, 4):
        elapsed.append(checkpoint.elapsed_time)
        now[0] += 100.0
    assert elapsed == [0.0] * 4


@pytest.mark.parametrize(
    "wait",
    [
        lambda trainer, checkpoint: checkpoint.loss,
        lambda trainer, checkpoint: checkpoint.metrics,
        lambda trainer, checkpoint: checkpoint.params_norm,
        lambda trainer, checkpoint: trainer.eval_loop(VALID)(checkpoint),
        lambda trainer, checkpoint: fitflax.callbacks.Profiler("unused", steps=(2, 2)).on_checkpoint(checkpoint),
        lambda trainer, checkpoint: save_run(checkpoint, CheckpointStore("unused"), owner="test", keep=(), asynchronous=True),
    ],
    ids=["loss", "metrics", "params_norm", "evaluation", "profile", "save"],
)
def test_elapsed_time_ends_at_the_first_wait_for_the_step(wait, trainer, monkeypatch):
    now, finished = [0.0], []

    def finish(self: StepValues) -> None:
        if not finished:
            finished.append(True)
            now[0] += 5.0

    monkeypatch.setitem(Run.__init__.__kwdefaults__, "clock", lambda: now[0])
    checkpoint = next(loop_of(trainer))
    monkeypatch.setattr(StepValues, "is_ready", property(lambda self: bool(finished)))
    monkeypatch.setattr(StepValues, "wait", finish)
    monkeypatch.setattr(fitflax.callbacks.Profiler, "_start", lambda self: None)
    monkeypatch.setattr(Snapshots, "waits", True)
    monkeypatch.setattr(Saver, "submit", lambda self, job: True)  # No other thread reads the metrics.
    wait(trainer, checkpoint)
    now[0] += 100.0
    assert checkpoint.elapsed_time == 5.0


def test_elapsed_time_ends_when_the_device_finishes_if_another_thread_reads_the_step_meanwhile(trainer, monkeypatch):
    now, finished = [0.0], []
    monkeypatch.setitem(Run.__init__.__kwdefaults__, "clock", lambda: now[0])
    checkpoint = next(loop_of(trainer))

    def finish(self: StepValues) -> None:
        finished.append(True)
        now[0] += 5.0
        checkpoint.run.timer.stop()  # The call of another thread, before this method returns to the first one.

    monkeypatch.setattr(StepValues, "is_ready", property(lambda self: bool(finished)))
    monkeypatch.setattr(StepValues, "wait", finish)
    assert checkpoint.elapsed_time == 5.0
    now[0] += 100.0
    assert checkpoint.elapsed_time == 5.0


def test_leaving_a_loop_early_returns_the_batch_that_was_read_ahead():
    batches = iter([(TRAIN[0][i : i + 4], TRAIN[1][i : i + 4]) for i in range(0, 16, 4)])
    trainer = make_trainer(model=nn.Dense(3), optimizer="sgd")
    with trainer.train_loop(batches, steps=4) as loop:
        assert loop.run(2).step == 2
    assert [c.step for c in trainer.train_loop(batches, steps=2)] == [3, 4]


def test_after_replace_state_at_a_checkpoint_the_checkpoint_has_the_new_state(trainer):
    checkpoint = loop_of(trainer).run(2)
    before, norm = checkpoint.model_params, checkpoint.params_norm
    trainer.replace_state(trainer.state.replace_params(jax.tree.map(lambda leaf: 2 * leaf, before)))
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, 2 * old), checkpoint.model_params, before)
    assert checkpoint.params_norm == pytest.approx(2 * norm)


def test_repr_names_the_step_and_copy_returns_the_same_checkpoint(trainer):
    checkpoint = next(loop_of(trainer, 6, every=fitflax.every(steps=6)))
    assert repr(checkpoint) == "Checkpoint(step=6, epoch=1, step_in_epoch=1)" and copy.copy(checkpoint) is checkpoint
