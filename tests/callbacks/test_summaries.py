"""Images, figures and histograms in TensorBoard, sown by modules or made by metrics from their values. TensorBoard's own reader reads them."""

import functools
import io
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import struct
from tensorboard.backend.event_processing import event_multiplexer

import fitflax
from fitflax import TrainLoop, every
from fitflax.callbacks import Callback, FigureSummary, HistogramSummary, ImageSummary, LambdaCallback, ModelCheckpoint, TensorBoard
from fitflax.callbacks.summaries import _as_uint8, check_images, flatten_sown
from fitflax.errors import CallbackError, NotReadyError
from fitflax.metrics import ConfusionMatrix, Metric, SampleCollector
from fitflax.parallel import DataParallel

RNG = np.random.default_rng(0)
X, Y = RNG.random((16, 4), np.float32), RNG.integers(0, 3, 16).astype(np.int32)  # 4 batches of 4
LOSS = "sparse_categorical_crossentropy"
PIL_IMAGE = pytest.importorskip("PIL.Image")


class Picture:
    """The part of matplotlib's `Figure` that is used."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def savefig(self, file: Any, format: str) -> None:  # noqa: A002 (matplotlib's name)
        PIL_IMAGE.fromarray((np.clip(self.rows, 0, 1) * 255).astype(np.uint8)).save(file, format)


def draw(rows: Any) -> Picture:
    assert type(rows) is np.ndarray
    return Picture(rows)


def plot(rows: Any) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 1), dpi=50)
    figure.subplots().imshow(rows)
    return figure


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        self.sow("summaries", "mean", x.mean())
        self.sow("summaries", "count", jnp.int32(7))
        self.sow("summaries", "outputs", x)
        return x


class Network(nn.Module):
    """Sows one value of each kind; one layer is called twice."""

    @nn.compact
    def __call__(self, x):
        layer = Layer()
        layer(x)
        self.sow("summaries", "inputs", ImageSummary(jnp.broadcast_to(x.reshape(-1, 2, 2, 1), (x.shape[0], 2, 2, 3))))
        self.sow("summaries", "picture", FigureSummary(draw, x))
        self.sow("summaries", "number", HistogramSummary(x[0, 0]))
        return layer(x)


def make(model: nn.Module | None = None, devices: int = 1, metrics: Any = None, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(model or Network(), parallel=DataParallel(jax.devices()[:devices]))
    trainer.compile("sgd", LOSS, metrics, **options)
    return trainer


def fit(trainer: fitflax.Trainer, *callbacks: Any, **options: Any) -> None:
    trainer.fit(X, Y, batch_size=4, shuffle=False, callbacks=callbacks, verbose=0, **options)


def opened(directory: Any) -> Any:
    runs = event_multiplexer.EventMultiplexer(size_guidance=dict.fromkeys(("scalars", "histograms", "images", "tensors"), 0))
    return runs.AddRunsFromDirectory(str(directory)).Reload()


class Recorder(Callback):
    needs_sown = ("summaries",)

    def __init__(self) -> None:
        self.every = every(steps=1)
        self.seen: list[Any] = []

    def on_checkpoint(self, checkpoint):
        self.seen.append(jax.tree.map(np.asarray, checkpoint.sown))


@pytest.mark.slow
def test_sown_values_of_every_kind_are_shown_under_the_path_of_their_module(tmp_path):
    recorder = Recorder()
    fit(make(), TensorBoard(tmp_path, every=every(steps=2)), recorder, steps=4)
    runs = opened(tmp_path)
    tags = runs.Runs()["train"]
    assert {tag for tag in tags["scalars"] if tag.startswith("summaries/")} == {
        f"summaries/Layer_0/{name}/{call}" for name in ("mean", "count") for call in (0, 1)
    }
    assert set(tags["histograms"]) == {"summaries/Layer_0/outputs/0", "summaries/Layer_0/outputs/1", "summaries/number"}
    assert set(tags["images"]) == {"summaries/inputs/0", "summaries/inputs/1", "summaries/inputs/2", "summaries/picture"}
    for event in runs.Scalars("train", "summaries/Layer_0/mean/0"):
        want = recorder.seen[event.step - 1]["summaries"]["Layer_0"]["mean"][0]
        assert event.value == pytest.approx(float(want), rel=1e-6)
    assert [event.step for event in runs.Images("train", "summaries/picture")] == [2, 4]
    assert {event.value for event in runs.Scalars("train", "summaries/Layer_0/count/1")} == {7.0}


def test_an_image_is_shown_as_it_was_sown(tmp_path):
    fit(make(), TensorBoard(tmp_path, every=every(steps=1)), steps=1)
    (event,) = opened(tmp_path).Images("train", "summaries/inputs/1")
    assert (event.width, event.height) == (2, 2)
    found = np.asarray(PIL_IMAGE.open(io.BytesIO(event.encoded_image_string)))
    np.testing.assert_array_equal(found, np.broadcast_to((X[1].reshape(2, 2, 1) * 255).round().astype(np.uint8), (2, 2, 3)))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, jnp.bfloat16])
@pytest.mark.mostly_slow
def test_images_of_any_dtype_and_channel_count_can_be_decoded_by_other_libraries(tmp_path, channels, dtype):
    image = RNG.integers(0, 256, (1, 5, 7, channels)).astype(np.uint8)
    given = image if dtype == np.uint8 else (image / 255).astype(dtype)

    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("summaries", "image", ImageSummary(jnp.asarray(given)))
            return nn.Dense(3)(x)

    fit(make(Sowing()), TensorBoard(tmp_path, every=every(steps=1)), steps=1)
    (event,) = opened(tmp_path).Images("train", "summaries/image")
    found = np.asarray(PIL_IMAGE.open(io.BytesIO(event.encoded_image_string))).reshape(5, 7, channels)
    np.testing.assert_allclose(found.astype(float), image[0].astype(float), atol=1 if dtype == jnp.bfloat16 else 0)


@pytest.mark.parametrize("options", [{}, {"steps_per_call": 2}, {"accumulate_steps": 2}])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.mostly_slow
def test_sown_values_are_only_those_of_the_last_step(devices, options):
    recorder = Recorder()
    fit(make(devices=devices, **options), recorder, steps=4)
    for number, sown in enumerate(recorder.seen):
        summaries = sown["summaries"]
        rows = X[4 * number : 4 * number + 4]
        if "accumulate_steps" in options:  # The last micro-batch of each replica's shard.
            rows = np.concatenate([shard[len(shard) // 2 :] for shard in np.split(rows, devices)])
        assert len(summaries["Layer_0"]["mean"]) == 2  # One for each call, and none from an earlier step.
        np.testing.assert_allclose(summaries["picture"][0].arrays[0], rows)
        np.testing.assert_allclose(summaries["Layer_0"]["mean"][0], summaries["Layer_0"]["outputs"][0].mean(), rtol=1e-5)


def test_sown_values_are_not_kept_if_no_callback_needs_them():
    trainer = make()
    with pytest.raises(NotReadyError, match="were not kept"):
        fit(trainer, LambdaCallback(on_checkpoint=lambda checkpoint: checkpoint.sown, every=every(steps=1)), steps=1)
    recorder = Recorder()
    fit(make(nn.Dense(3)), recorder, steps=1)
    assert recorder.seen == [{}]


@pytest.mark.slow
def test_another_collection_or_none_can_be_shown(tmp_path):
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "mean", x.mean())
            self.sow("summaries", "mean", x.mean())
            return nn.Dense(3)(x)

    fit(make(Sowing()), TensorBoard(tmp_path / "a", every=every(steps=1), sown="intermediates"), steps=1)
    fit(make(Sowing()), TensorBoard(tmp_path / "b", every=every(steps=1), sown=None), steps=1)
    shown = {name: [tag for tag in opened(tmp_path / name).Runs()["train"]["scalars"] if tag.endswith("/mean")] for name in "ab"}
    assert shown == {"a": ["intermediates/mean"], "b": []}


@pytest.mark.slow
def test_a_hand_written_loop_keeps_the_sown_values_that_it_is_asked_for(tmp_path):
    loop = TrainLoop(Network().init, Network().apply, optimizer="sgd", loss=LOSS, data=(X, Y), steps=2, sown="summaries")
    with TensorBoard(tmp_path, every=every(steps=1)) as board:
        for checkpoint in loop:
            board(checkpoint)
    assert "summaries/Layer_0/mean/0" in opened(tmp_path).Runs()["train"]["scalars"]
    with TensorBoard(tmp_path / "other", every=every(steps=1)) as board:  # It does not fail if the loop keeps no sown values.
        board(TrainLoop(Network().init, Network().apply, optimizer="sgd", loss=LOSS, data=(X, Y)).next_step())


@pytest.mark.slow
def test_a_resumed_run_shows_each_sown_value_once(tmp_path):
    def run(name: str, steps: int) -> None:
        board = TensorBoard(tmp_path / name / "board", every=every(steps=1))
        fit(make(), board, ModelCheckpoint(tmp_path / name / "all", every=every(steps=3), save_last=False), steps=steps, resume="auto")

    run("whole", 6)
    run("parts", 5)
    run("parts", 6)
    events = [
        [(event.step, event.value) for event in opened(tmp_path / name / "board").Scalars("train", "summaries/Layer_0/mean/0")] for name in ("whole", "parts")
    ]
    assert events[0] == events[1]
    assert [step for step, _ in events[0]] == [1, 2, 3, 4, 5, 6]


def test_an_array_that_is_not_a_batch_of_images_is_one_clear_error(tmp_path):
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("summaries", "image", ImageSummary(x))
            return nn.Dense(3)(x)

    with pytest.raises(CallbackError, match=r"summaries/image: ImageSummary needs images of shape \[images, height, width, channels\].*Received: \[4, 4\]"):
        fit(make(Sowing()), TensorBoard(tmp_path, every=every(steps=1)), steps=1)


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.mostly_slow
def test_a_drawing_function_may_be_created_again_in_each_call(tmp_path, steps_per_call, compilations):
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("summaries", "lambda", FigureSummary(lambda rows: draw(rows), x))
            self.sow("summaries", "partial", FigureSummary(functools.partial(draw), x))
            self.sow("summaries", "method", FigureSummary(self.draw, x))
            return nn.Dense(3)(x)

        @nn.nowrap
        def draw(self, rows):
            return draw(rows)

    trainer = make(Sowing(), steps_per_call=steps_per_call)
    fit(trainer, TensorBoard(tmp_path, every=every(steps=2)), steps=4)
    assert sorted(opened(tmp_path).Runs()["train"]["images"]) == ["summaries/lambda", "summaries/method", "summaries/partial"]
    with compilations.counted() as counted:
        fit(trainer, TensorBoard(tmp_path / "again", every=every(steps=2)), steps=4)
    assert counted.count == 0, counted.names


def test_matplotlib_figures_are_shown(tmp_path):
    pytest.importorskip("matplotlib")

    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("summaries", "figure", FigureSummary(plot, x))
            return nn.Dense(3)(x)

    fit(make(Sowing()), TensorBoard(tmp_path, every=every(steps=1)), steps=1)
    (event,) = opened(tmp_path).Images("train", "summaries/figure")
    assert (event.width, event.height) == (100, 50)


def test_a_figure_that_cannot_be_drawn_fails_the_run_with_the_reason(tmp_path):
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("summaries", "figure", FigureSummary(fail, x))
            return nn.Dense(3)(x)

    with pytest.raises(CallbackError, match="summaries/figure cannot be drawn: RuntimeError: no canvas"):
        fit(make(Sowing()), TensorBoard(tmp_path, every=every(steps=1)), steps=1)


def fail(rows: Any) -> Any:
    raise RuntimeError("no canvas")


# --- Metrics that show more than their value ---


@struct.dataclass
class Drawn(ConfusionMatrix):
    def summary(self, value):
        return {"table": FigureSummary(draw, value), "right": float(np.trace(value)), "classes": value.sum(axis=1)}


@pytest.mark.slow
def test_a_metric_shows_what_its_summary_returns(tmp_path):
    trainer = make(nn.Dense(3), metrics=[Drawn(name="drawn"), "accuracy"])
    fit(trainer, TensorBoard(tmp_path), epochs=1, validation_data=(X, Y))
    runs = opened(tmp_path)
    for name in ("train", "val"):
        tags = runs.Runs()[name]
        assert tags["images"] == ["drawn/table"]
        assert {"drawn/right", "drawn/classes/0", "drawn/classes/2", "accuracy"} <= set(tags["scalars"])
        assert "drawn" not in tags["scalars"]
    accuracy, right = (runs.Scalars("val", tag)[0].value for tag in ("accuracy", "drawn/right"))
    assert right == pytest.approx(16 * accuracy)


def test_a_sample_of_examples_is_shown_as_images(tmp_path):
    show = functools.partial(_as_images)
    collector = SampleCollector(2, fn=lambda outputs, targets: outputs, show=show)
    fit(make(nn.Dense(3), metrics=[collector]), TensorBoard(tmp_path), epochs=1, validation_data=(X, Y))
    assert opened(tmp_path).Runs()["val"]["images"] == ["samples/0", "samples/1"]


def test_sampled_uint8_images_are_shown_unchanged(tmp_path):
    images = RNG.integers(0, 256, (16, 2, 2, 3)).astype(np.uint8)

    class Flat(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x.reshape(len(x), -1).astype(jnp.float32))

    trainer = make(Flat(), metrics=[SampleCollector(1, fn=lambda outputs, targets: targets, show=ImageSummary)])
    trainer.compile("sgd", lambda outputs, targets: outputs.sum(axis=-1), [SampleCollector(1, fn=lambda outputs, targets: targets, show=ImageSummary)])
    history = trainer.fit(images, images, batch_size=4, epochs=1, callbacks=[TensorBoard(tmp_path), ModelCheckpoint(tmp_path / "all")], verbose=0)
    (event,) = opened(tmp_path).Images("train", "samples")
    found = np.asarray(PIL_IMAGE.open(io.BytesIO(event.encoded_image_string)))
    assert any(np.array_equal(found, image) for image in images)
    assert list(history.history) == ["loss"]  # Samples are not kept in the history.
    metadata = json.loads((tmp_path / "all/step_00000004/metadata.json").read_text())
    assert list(metadata["metrics"]["train"]) == ["loss"]


def _as_images(rows: Any) -> ImageSummary:
    return ImageSummary(np.asarray(rows).reshape(-1, 1, 3, 1))


def test_a_metric_shows_its_value_by_default():
    assert ConfusionMatrix().summary(0.5) == Metric.summary(ConfusionMatrix(), 0.5) == 0.5


def test_floats_outside_0_to_1_are_clipped_and_nan_becomes_0():
    image = np.array([-1.0, 0.0, 0.5, 1.0, 2.0, np.nan, np.inf, -np.inf], np.float32)
    assert _as_uint8(image).tolist() == [0, 0, 128, 255, 255, 0, 255, 0]


def test_a_sown_dataclass_has_a_tag_for_each_of_its_arrays():
    @struct.dataclass
    class Moments:
        mean: Any
        spread: Any

    assert flatten_sown("summaries", {"layer": (Moments(0.5, 2.0),)}) == {"summaries/layer/mean": 0.5, "summaries/layer/spread": 2.0}


def test_images_of_dtypes_other_than_uint8_and_floats_are_one_clear_error():
    with pytest.raises(CallbackError, match=r"tag: ImageSummary needs images of uint8, or of floats from 0 to 1\. Received: int32\."):
        check_images("tag", ImageSummary(np.zeros((1, 2, 2, 3), np.int32)))


def test_figures_drawn_by_the_same_code_have_the_same_tree_structure():
    one, other = (jax.tree.structure(FigureSummary(lambda rows: draw(rows), X)) for _ in range(2))
    assert one == other and hash(one.node_data()[1]) == hash(other.node_data()[1])
