"""The input pipelines that `input.py` measures, and the files that they read. Worker processes import this module, so it does not import JAX.

Images: a file is read, decoded, cropped at random (8 to 100 percent of the area, 3:4 to 4:3), resized to the model's size, and flipped at random. The random
numbers of an example depend only on the seed, the pass and the example, so a resume in the middle of a pass repeats them.
"""

import dataclasses
import io
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

CLASSES = 10
WIDTH, HEIGHT = 500, 375
QUALITY = 90
# The image pipelines, and the package that each needs.
PACKAGES = {"grain": "grain", "torch": "torch", "torchdata": "torchdata", "tf.data": "tensorflow", "tf.data-seeking": "tensorflow"}
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """The input of an image pipeline.

    Attributes:
        paths: The files of a pass; a file may occur several times.
        labels: Their classes.
        size: Rows and columns of the output.
        batch: Images per batch; a pass has only whole batches.
        workers: Number of processes, or of threads for `tf.data`.
        seed: The seed of order and augmentation.
    """

    paths: list[str]
    labels: "np.ndarray[Any, Any]"
    size: int = 224
    batch: int = 32
    workers: int = 2
    seed: int = 0

    @property
    def batches(self) -> int:
        """The number of batches per pass."""
        return len(self.paths) // self.batch


# -- files --


def _clouds(rng: np.random.Generator, rows: int, columns: int) -> "np.ndarray[Any, Any]":
    """Returns noise whose amplitude falls with the frequency, like that of photographs: `[rows, columns, 3]`, mean 0 and variance 1."""
    spectrum = np.fft.rfft2(rng.standard_normal((3, rows, columns)))
    frequency = np.hypot(np.fft.fftfreq(rows)[:, None], np.fft.rfftfreq(columns)[None, :])
    frequency[0, 0] = np.inf
    noise = np.fft.irfft2(spectrum / frequency, s=(rows, columns)).transpose(1, 2, 0)
    return noise / noise.std()


def write_images(directory: pathlib.Path, count: int, seed: int = 0) -> tuple[list[str], "np.ndarray[Any, Any]"]:
    """Writes JPEG files of 500 x 375 with shapes in front of clouds, and returns their paths and labels."""
    rng = np.random.default_rng(seed)
    base = _clouds(rng, 3 * HEIGHT, 3 * WIDTH)
    grain_of_film = rng.standard_normal((HEIGHT, WIDTH, 1))
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    paths, labels = [], rng.integers(0, CLASSES, count)
    for number in range(count):
        top, left = rng.integers(2 * HEIGHT), rng.integers(2 * WIDTH)
        image = 128 + 50 * base[top : top + HEIGHT, left : left + WIDTH] @ rng.dirichlet(np.ones(3), 3)
        for _ in range(4):
            center, radius = rng.uniform(0, (HEIGHT, WIDTH)), rng.uniform(20, 90)
            image[np.hypot(rows - center[0], columns - center[1]) < radius] += rng.uniform(-60, 60, 3)
        image += 4 * grain_of_film
        path = directory / f"{number:05}.jpg"
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
        paths.append(str(path))
    return paths, labels.astype(np.int32)


def write_tokens(path: pathlib.Path, count: int, vocabulary: int, seed: int = 0) -> None:
    """Writes a file of 16-bit tokens."""
    np.random.default_rng(seed).integers(0, vocabulary, count, dtype=np.uint16).tofile(path)


# -- augmentation --


def random_box(rng: np.random.Generator, width: int, height: int) -> tuple[int, int, int, int]:
    """Returns the left, top, right and bottom of a random crop of an image."""
    for _ in range(10):
        area = width * height * rng.uniform(*AREA)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            left, top = int(rng.integers(width - columns + 1)), int(rng.integers(height - rows + 1))
            return left, top, left + columns, top + rows
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def load(path: str, size: int, rng: np.random.Generator) -> "np.ndarray[Any, Any]":
    """Returns a random crop of an image, `[size, size, 3]` of uint8."""
    with Image.open(io.BytesIO(pathlib.Path(path).read_bytes())) as image:
        part = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, random_box(rng, *image.size))
    return np.array(part)[:, :: -1 if rng.random() < 0.5 else 1].copy()


# -- pipelines --


class _Files:
    """Files and labels by index, for Grain, which checks the name of its source when it resumes."""

    def __init__(self, images: ImageSet) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images.paths)

    def __getitem__(self, index: Any) -> tuple[str, Any]:
        return self._images.paths[index], self._images.labels[index]

    def __repr__(self) -> str:
        return f"_Files({len(self)})"


def make_grain(images: ImageSet) -> Any:
    """Returns an infinite `grain.DataLoader`, whose sampler shuffles in each pass."""
    import grain.python as grain
    from absl import flags

    if images.workers and not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's workers read flags, which only programs run by `absl.app` parse.

    class Augment(grain.RandomMapTransform):  # type: ignore[misc]
        def random_map(self, element: tuple[str, Any], rng: np.random.Generator) -> tuple[Any, Any]:
            return load(element[0], images.size, rng), element[1]

    return grain.DataLoader(
        data_source=_Files(images),
        sampler=grain.IndexSampler(len(images.paths), grain.NoSharding(), shuffle=True, num_epochs=None, seed=images.seed),
        operations=[Augment(), grain.Batch(images.batch, drop_remainder=True)],
        worker_count=images.workers,
    )


class _TorchImages:
    """A PyTorch dataset. Random numbers come from a seed that the sampler passes with each index."""

    def __init__(self, images: ImageSet) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images.paths)

    def __getitem__(self, drawn: tuple[int, int]) -> tuple[Any, Any]:
        index, seed = drawn
        images = self._images
        return load(images.paths[index], images.size, np.random.default_rng([seed, index])), images.labels[index]


class _Shuffled:
    """A sampler that yields pairs of an index and the seed of its pass."""

    def __init__(self, length: int, generator: Any) -> None:
        self._length = length
        self.generator = generator

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        import torch

        seed = int(torch.randint(2**31, (), generator=self.generator))
        for index in torch.randperm(self._length, generator=self.generator).tolist():
            yield index, seed


def make_torch(images: ImageSet, *, stateful: bool = False) -> Any:
    """Returns PyTorch's `DataLoader`, or torchdata's `StatefulDataLoader`."""
    import torch

    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    else:
        from torch.utils.data import DataLoader as Loader
    return Loader(
        _TorchImages(images),
        batch_size=images.batch,
        sampler=_Shuffled(len(images.paths), torch.Generator().manual_seed(images.seed)),
        drop_last=True,
        num_workers=images.workers,
        multiprocessing_context="forkserver" if images.workers else None,
        prefetch_factor=4 if images.workers else None,
    )


def make_tensorflow(images: ImageSet) -> Any:
    """Returns a `tf.data.Dataset` that decodes only the necessary part of a file."""
    import tensorflow as tf

    seeds = tf.data.Dataset.random(seed=images.seed, rerandomize_each_iteration=True)
    files = tf.data.Dataset.from_tensor_slices((images.paths, images.labels)).shuffle(len(images.paths), seed=images.seed)
    return _decoded(tf.data.Dataset.zip(seeds, files).map(lambda seed, file: (seed, *file)), images)


def _decoded(data: Any, images: ImageSet) -> Any:
    """Returns the batches of a `tf.data.Dataset` of seeds, paths and labels."""
    import tensorflow as tf

    def augment(seed: Any, path: Any, label: Any) -> tuple[Any, Any]:
        content = tf.io.read_file(path)
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(content), [[[0.0, 0.0, 1.0, 1.0]]], [seed, 0], min_object_covered=0.0, aspect_ratio_range=RATIO, area_range=AREA
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        part = tf.image.resize(tf.io.decode_and_crop_jpeg(content, window, channels=3), (images.size, images.size))
        flipped = tf.image.stateless_random_flip_left_right(part, [seed, 1])
        return tf.cast(flipped, tf.uint8), label

    return data.map(augment, num_parallel_calls=images.workers).batch(images.batch, drop_remainder=True).prefetch(2)


class SeekingImages:
    """Batches of `tf.data` whose order and seeds depend only on the seed and the pass, so a resume skips paths and decodes nothing."""

    def __init__(self, images: ImageSet) -> None:
        self._images = images
        self._pass, self._batches = -1, 0
        self._resume: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        import tensorflow as tf

        images = self._images
        (self._pass, self._batches), self._resume = self._resume or (self._pass + 1, 0), None
        rng = np.random.default_rng([images.seed, self._pass])
        order, seeds = rng.permutation(len(images.paths)), rng.integers(2**31, size=len(images.paths))
        rows = slice(self._batches * images.batch, None)
        data = tf.data.Dataset.from_tensor_slices((seeds[rows], np.array(images.paths)[order][rows], images.labels[order][rows]))
        return self._counted(_decoded(data, images).as_numpy_iterator())

    def _counted(self, batches: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for batch in batches:
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"pass": self._pass, "batches": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._resume = state["pass"], state["batches"]


def make_images(pipeline: str, images: ImageSet) -> Any:
    """Returns a new instance of one of `PACKAGES`."""
    if pipeline.startswith("torch"):
        return make_torch(images, stateful=pipeline == "torchdata")
    return {"grain": make_grain, "tf.data": make_tensorflow, "tf.data-seeking": SeekingImages}[pipeline](images)


def iterate(pipeline: str, loader: Any) -> Iterator[tuple[Any, Any]]:
    """Yields a loader's batches as NumPy arrays, as for a hand-written loop."""
    if pipeline.startswith("torch"):
        return ((x.numpy(), y.numpy()) for x, y in loader)
    return loader.as_numpy_iterator() if pipeline == "tf.data" else iter(loader)
