"""Pipelines that augment images in workers, as in docs/speed.md: a run resumed inside a pass gets each example once, with the same augmentation."""

import pathlib
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from benchmarks.pipelines import CLASSES, PACKAGES, ImageSet, iterate, make_images, random_box, write_images
from fitflax.callbacks import ModelCheckpoint
from fitflax.parallel import DataParallel
from tests.data.same_training import CANNOT_SEEK, assert_same, warned
from tests.run_script import rows_of, state_of

BATCH, BATCHES = 4, 6  # An even number: Grain's two workers alternate, and each makes batches of every second example.

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata


class Net(nn.Module):
    @nn.compact
    def __call__(self, images: Any) -> Any:
        return nn.Dense(CLASSES)(images.reshape(len(images), -1) / 255)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    paths, labels = write_images(tmp_path_factory.mktemp("images"), BATCH * BATCHES)
    return ImageSet(paths, labels, size=8, batch=BATCH, workers=2)


def run(root: pathlib.Path, data: Any, steps: int, **options: Any) -> dict[str, Any]:
    trainer = fitflax.Trainer(Net(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optax.sgd(0.1), "sparse_categorical_crossentropy")
    history = trainer.fit(data, steps=steps, verbose=0, resume="auto", callbacks=[ModelCheckpoint(root)], **options)
    return {**state_of(trainer), "history": rows_of(history)}


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", list(PACKAGES))
def test_resuming_inside_a_pass_neither_repeats_nor_loses_an_example(pipeline, images, tmp_path):
    pytest.importorskip(PACKAGES[pipeline])
    options = {"steps_per_epoch": BATCHES} if pipeline == "grain" else {}
    uninterrupted = run(tmp_path / "never", make_images(pipeline, images), 9, **options)
    run(tmp_path / "stopped", make_images(pipeline, images), 3, **options)
    for begin, end in ((3, 7), (7, 9)):
        with warned(*([CANNOT_SEEK.format(begin % BATCHES * BATCH)] if pipeline in ("torch", "tf.data") else [])):
            resumed = run(tmp_path / "stopped", make_images(pipeline, images), end, **options)
    assert_same(resumed, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", list(PACKAGES))
def test_each_pass_has_every_image_once_in_a_new_order_with_new_augmentations(pipeline, images):
    pytest.importorskip(PACKAGES[pipeline])
    numbered = ImageSet(images.paths, np.arange(len(images.paths), dtype=np.int32), size=8, batch=BATCH, workers=2)
    loader, passes = make_images(pipeline, numbered), []
    batches = iterate(pipeline, loader)
    for number in range(2):
        if number and pipeline != "grain":
            batches = iterate(pipeline, loader)
        found = [(x.copy(), y.copy()) for _, (x, y) in zip(range(BATCHES), batches, strict=False)]
        passes.append([np.concatenate(part) for part in zip(*found, strict=True)])
    orders = [y.tolist() for _, y in passes]
    assert [sorted(order) for order in orders] == [list(range(BATCH * BATCHES))] * 2 and orders[0] != orders[1]
    one, other = (x[np.argsort(y)] for x, y in passes)
    assert not any(np.array_equal(*pair) for pair in zip(one, other, strict=True))


def test_random_boxes_are_inside_the_image_and_have_all_sizes():
    rng = np.random.default_rng(0)
    boxes = np.array([random_box(rng, 40, 30) for _ in range(1000)])
    left, top, right, bottom = boxes.T
    assert (left >= 0).all() and (top >= 0).all() and (right <= 40).all() and (bottom <= 30).all()
    area, ratio = (right - left) * (bottom - top) / 1200, (right - left) / (bottom - top)
    assert 0.06 < area.min() < 0.15 and area.max() > 0.8 and ratio.min() > 0.6 and ratio.max() < 1.6
    assert random_box(rng, 200, 2) == (99, 0, 101, 2)  # The fallback: no box with an allowed area and ratio fits.
