"""Measures input pipelines: their rate alone, in `fit` and in a hand-written loop, how long steps wait for data, and the cost of a resume mid-pass.

    python -m benchmarks.input                                  # all pipelines, 25 minutes on two cores
    python -m benchmarks.input --pipeline grain --models light  # a single pipeline
    python -m benchmarks.input --json numbers.json              # also saves the numbers; those of other pipelines in the file are kept
    python -m benchmarks.input --write                          # also writes the tables to benchmarks/RESULTS-input.md
    python -m benchmarks.input --quick                          # only to check that it runs

Images are generated JPEG files of 500 x 375, about 100 KB each. They are decoded, cropped at random, resized to 224 x 224 and flipped at random, by Grain and
by PyTorch's and torchdata's loaders in worker processes, and by `tf.data` in threads. `tokens` is a `fitflax.data.TokenFile`. Files are read from the page
cache.

Each pipeline runs in a separate process. A round is pipeline, step, hand, fit, fit, hand, step, pipeline, with the same number of batches each time: the
pipeline alone; the jitted step alone, on batches in memory; that step in a hand-written loop over the pipeline; and `fit` over the pipeline. The clock starts
after eight batches, when all workers run, and stops when the last step is computed. The step of `light` takes less time than loading a batch, that
of `heavy` takes more, and that of `even` is in between.

Waiting is the time that the training thread spends requesting batches from the pipeline. For `fit`, the progress bar calls it "waiting for data".

A resume is timed from the position of a checkpoint in the middle of a pass until the first batch is available, including the start of workers. The table also
shows the first batch of a new pass. The batches after a resume are compared with those of the uninterrupted run.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import json
import pathlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import fitflax
from benchmarks.checkpoint import printed
from benchmarks.pipelines import CLASSES, PACKAGES, ImageSet, iterate, make_images, write_images, write_tokens
from benchmarks.run import machine, say
from fitflax.callbacks import LambdaCallback
from fitflax.data import Batcher, Feed, Position, TokenFile, adapt
from fitflax.parallel import DataParallel

RESULTS = pathlib.Path(__file__).resolve().parent / "RESULTS-input.md"
PIPELINES = (*PACKAGES, "tokens")
# The models, and the number of steps in a stretch, not counting the steps in which workers start.
WARM = 8
STEPS = {"light": 40, "even": 24, "heavy": 20}
MODELS = tuple(STEPS)
LIMIT = 0.97
VOCABULARY, LENGTH = 256, 256
LOG_EVERY = 50
# Not `-m`: worker processes would import this module, and JAX with it.
RUN = "from benchmarks import input; input.main()"


class ConvNet(nn.Module):
    """Convolutions of one width on images downsampled to a quarter of the rows and columns."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.relu(nn.Conv(self.width, (8, 8), strides=8)(images.astype(jnp.float32) / 255))
        for _ in range(self.depth):
            x = nn.relu(nn.Conv(self.width, (3, 3))(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class TokenNet(nn.Module):
    """Dense layers for each token."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(VOCABULARY, self.width)(tokens)
        for _ in range(self.depth):
            x += nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(VOCABULARY)(x)


IMAGE_MODELS = {"light": ConvNet(8, 1), "even": ConvNet(32, 2), "heavy": ConvNet(64, 2)}
TOKEN_MODELS = {"light": TokenNet(4, 0), "even": TokenNet(64, 1), "heavy": TokenNet(256, 2)}


class Pipeline(NamedTuple):
    """A pipeline: `make` creates it as `fit` takes it, `batches` yields its batches as NumPy arrays, and `options` are those of `fit`."""

    name: str
    make: Callable[[], Any]
    batches: Callable[[Any], Iterator[tuple[Any, Any]]]
    options: dict[str, Any]
    units_of_batch: int
    batches_of_pass: int


class Stretch(NamedTuple):
    """The seconds of some steps, the seconds that they waited for data, and the mean loss."""

    seconds: float
    waited: float
    loss: float = 0.0


def _triples(source: Any) -> Iterator[tuple[Any, Any]]:
    return ((triple.x, triple.y) for triple in source.open(Position()))


@dataclasses.dataclass
class Sizes:
    """The sizes of the benchmark.

    Attributes:
        batches: Batches per pass; a resume begins in the middle.
        steps: Steps per stretch; `None` for the default of each model.
        rounds: Number of rounds.
        files: Number of distinct images.
        size: Rows and columns of the model's images.
        batch: Examples per batch.
        workers: Workers of an image pipeline.
        tokens: Tokens in the token file.
    """

    batches: int = 64
    steps: int | None = None
    rounds: int = 3
    files: int = 256
    size: int = 224
    batch: int = 32
    workers: int = 2
    tokens: int = 50_000_000


QUICK = Sizes(batches=12, steps=2, rounds=1, files=16, size=32, batch=4, workers=1, tokens=10_000)


def make_pipeline(name: str, sizes: Sizes, directory: pathlib.Path) -> Pipeline:
    """Returns a pipeline, with its files in a directory."""
    if name == "tokens":
        write_tokens(directory / "tokens.bin", sizes.tokens, VOCABULARY)
        tokens = TokenFile(directory / "tokens.bin", length=LENGTH, dtype="uint16")
        options = {"batch_size": sizes.batch, "shuffle": True}
        source = adapt(tokens, seed=0, **options)
        assert source.num_batches is not None
        return Pipeline(name, lambda: tokens, lambda data: _triples(source), options, sizes.batch * LENGTH, source.num_batches)
    paths, labels = write_images(directory, sizes.files)
    rows = np.arange(sizes.batches * sizes.batch) % sizes.files
    images = ImageSet([paths[row] for row in rows], labels[rows], sizes.size, sizes.batch, sizes.workers)
    return Pipeline(name, functools.partial(make_images, name, images), functools.partial(iterate, name), {}, sizes.batch, images.batches)


# -- consumers of the batches --


class Hand:
    """A jitted step with donated state and sums. Values are read every 50 steps."""

    def __init__(self, model: nn.Module, batch: tuple[Any, Any]) -> None:
        optimizer = optax.adam(1e-3)
        params = jax.jit(model.init)(jax.random.key(0), batch[0])["params"]
        self._state = params, optimizer.init(params)

        def step(state: Any, sums: Any, x: Any, y: Any) -> Any:
            params, opt_state = state

            def loss_of(params: Any) -> Any:
                return optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": params}, x), y).mean()

            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), sums + loss

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def train(self, batches: Iterator[tuple[Any, Any]], steps: int) -> Stretch:
        """Trains on the given number of batches."""
        batch, sums, waited, begin = next(batches), jnp.zeros(()), 0.0, 0.0
        for number in range(1, WARM + steps + 1):
            self._state, sums = self._step(self._state, sums, *batch)
            if number == WARM:
                float(sums)
                waited, begin = 0.0, time.perf_counter()
            elif number % LOG_EVERY == 0:
                float(sums)
            if number < WARM + steps:
                asked = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - asked
        jax.block_until_ready(self._state)
        return Stretch(time.perf_counter() - begin, waited, float(sums) / (WARM + steps))


class Fit:
    """`Trainer.fit`, which begins with the parameters of the hand-written loop."""

    def __init__(self, model: nn.Module, batch: tuple[Any, Any]) -> None:
        self._trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:1]))
        self._trainer.compile(optax.adam(1e-3), "sparse_categorical_crossentropy")
        self._trainer.build(batch)
        params = jax.jit(model.init)(jax.random.key(0), batch[0])["params"]
        self._trainer.replace_state(dataclasses.replace(self._trainer.state, params=params))

    def train(self, data: Any, steps: int, **options: Any) -> Stretch:
        """Trains on the given number of batches. The clock stops when the loss of the epoch is available."""
        begin, end = Stretch(0.0, 0.0), Stretch(0.0, 0.0)

        def now(logs: Any) -> Stretch:
            loss = float(logs["loss"])
            return Stretch(time.perf_counter(), watch.params["time_spent"].seconds["data"], loss)

        def after_step(step: int, logs: Any) -> None:
            nonlocal begin
            if step == WARM - 1:
                begin = now(logs)

        def at_end(epoch: int, logs: Any) -> None:
            nonlocal end
            end = now(logs)

        watch = LambdaCallback(on_train_batch_end=after_step, on_epoch_end=at_end)
        self._trainer.fit(data, steps=WARM + steps, steps_per_epoch=WARM + steps, callbacks=[watch], verbose=0, **options)
        return Stretch(end.seconds - begin.seconds, end.waited - begin.waited, end.loss)


def _over_and_over(batches: Sequence[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    while True:
        yield from batches


def _alone(pipeline: Pipeline, steps: int) -> Stretch:
    batches = pipeline.batches(pipeline.make())
    for _ in range(WARM):
        next(batches)
    begin = time.perf_counter()
    for _ in range(steps):
        next(batches)
    seconds = time.perf_counter() - begin
    return Stretch(seconds, seconds)


def measure(pipeline: Pipeline, model: nn.Module, steps: int, rounds: int) -> dict[str, Any]:
    """Returns the times of a pipeline, of a step, and of both together.

    Raises:
        AssertionError: `fit` did different work from the hand-written loop.
    """
    there = [batch for batch, _ in zip(pipeline.batches(pipeline.make()), range(min(4, pipeline.batches_of_pass)), strict=False)]
    there = [(np.array(x), np.array(y)) for x, y in there]
    hand, fit, step = (kind(model, there[0]) for kind in (Hand, Fit, Hand))
    contenders: dict[str, Callable[[], Stretch]] = {
        "pipeline": lambda: _alone(pipeline, steps),
        "step": lambda: step.train(_over_and_over(there), steps),
        "hand": lambda: hand.train(pipeline.batches(pipeline.make()), steps),
        "fit": lambda: fit.train(pipeline.make(), steps, **pipeline.options),
    }
    first = {who: contender().loss for who, contender in contenders.items()}  # Compiles.
    assert abs(first["fit"] - first["hand"]) <= 1e-2 * first["hand"], first
    found: dict[str, list[Stretch]] = {who: [] for who in contenders}
    for who in [*contenders, *reversed(contenders)] * rounds:
        found[who].append(contenders[who]())
    return {who: [stretch._asdict() for stretch in stretches] for who, stretches in found.items()}


# -- resume --


def _digest(batch: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves((batch.x, batch.y)))).hexdigest()


def measure_resume(pipeline: Pipeline) -> dict[str, Any]:
    """Returns the time of the first batch of a pass, and of the first batch after a resume in the middle of a pass.

    Raises:
        AssertionError: The batches differ from those of the uninterrupted run.
    """

    def feed(position: Position = Position()) -> Feed:  # noqa: B008 (frozen)
        return Feed(adapt(pipeline.make(), seed=0, **pipeline.options), Batcher(), position, is_saved=True)

    def timed(feed: Feed) -> tuple[float, str]:
        begin = time.perf_counter()
        fed = feed.next()
        assert fed is not None
        return time.perf_counter() - begin, _digest(fed.batch)

    before, after = pipeline.batches_of_pass // 2, min(pipeline.batches_of_pass - pipeline.batches_of_pass // 2, 8)
    with closing(feed()) as run:
        start, _ = timed(run)
        for _ in range(before - 1):
            run.next()
        position, state = run.position, run.state_dict(run.position)
        expected = [timed(run)[1] for _ in range(after)]
    with closing(feed(position)) as run, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This data source cannot seek")  # This cost is measured here.
        run.load_state_dict(state)
        seconds, digest = timed(run)
        found = [digest, *(timed(run)[1] for _ in range(after - 1))]
    assert found == expected, f"{pipeline.name}: a resume continues with different batches"
    return {"start": start, "resume": seconds, "examples": position.examples, "batches_compared": after}


# -- tables --


def _rate(found: dict[str, Any], who: str) -> list[float]:
    """Returns the units per second of each round."""
    seconds = np.reshape([stretch["seconds"] for stretch in found["stretches"][who]], (-1, 2)).sum(axis=1)
    return list(2 * found["steps"] * found["units_of_batch"] / seconds)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def _shown(value: float) -> str:
    return f"{value:.0f}" if value < 1e4 else f"{value / 1e6:.2f}M"


def _share(found: dict[str, Any], who: str) -> float:
    stretches = found["stretches"][who]
    return sum(stretch["waited"] for stretch in stretches) / sum(stretch["seconds"] for stretch in stretches)


def verdict(over_hand: float, over_least: float) -> str:
    """Returns whether a target was met, and which one. The rate of the pipeline and that of the step assume that each has separate cores."""
    return "ok" if over_least >= LIMIT else "ok, hand-written" if over_hand >= LIMIT else "under"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns the rates as a Markdown table."""
    names = ("pipeline", "step", "hand-written", "fit")
    head = ("pipeline", "model", *(f"{who} /s" for who in names), "fit / hand-written", "fit / slower", "waiting, hand-written", "waiting, fit", "verdict")
    lines = [head, ("---",) * len(head)]
    for found in results:
        rates = {who: _rate(found, who) for who in found["stretches"]}
        medians = {who: statistics.median(values) for who, values in rates.items()}
        over_hand = [mine / other for mine, other in zip(rates["fit"], rates["hand"], strict=True)]
        over_least = [mine / min(others) for mine, *others in zip(rates["fit"], rates["pipeline"], rates["step"], strict=True)]
        cells = [found["pipeline"], found["model"], *(_shown(medians[who]) for who in ("pipeline", "step", "hand", "fit"))]
        shares = [f"{_share(found, who):.0%}" for who in ("hand", "fit")]
        ending = verdict(statistics.median(over_hand), statistics.median(over_least))
        lines.append((*cells, _spread(over_hand), _spread(over_least), *shares, ending))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def resume_table(resumes: Sequence[dict[str, Any]]) -> str:
    """Returns the costs of resumes as a Markdown table."""
    lines = ["| pipeline | first batch, s | first batch after a resume, s | examples before the resume |", "|---|---|---|---|"]
    lines += [f"| {one['pipeline']} | {one['start']:.3g} | {one['resume']:.3g} | {one['examples']} |" for one in resumes]
    return "\n".join(lines)


def part(name: str, models: Sequence[str], sizes: Sizes, directory: pathlib.Path) -> dict[str, Any]:
    """Returns the numbers of a pipeline, measured in this process."""
    kinds, results = TOKEN_MODELS if name == "tokens" else IMAGE_MODELS, []
    with tempfile.TemporaryDirectory(dir=directory) as files:
        pipeline = make_pipeline(name, sizes, pathlib.Path(files))
        for model in models:
            steps = sizes.steps or STEPS[model]
            named = {"pipeline": name, "model": model, "steps": steps, "units_of_batch": pipeline.units_of_batch}
            results.append(named | {"stretches": measure(pipeline, kinds[model], steps, sizes.rounds)})
            say(f"{name}, {model}: done")
        resume = {"pipeline": name} | measure_resume(pipeline)
    return {"results": results, "resumes": [resume]}


def joined(earlier: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns earlier numbers, with those of the same pipeline and model replaced."""

    def key(row: dict[str, Any]) -> tuple[int, int]:
        return PIPELINES.index(row["pipeline"]), MODELS.index(row.get("model", MODELS[0]))

    both = {name: {key(row): row for row in [*earlier.get(name, []), *found[name]]} for name in ("results", "resumes")}
    return {name: [rows[number] for number in sorted(rows)] for name, rows in both.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", nargs="+", choices=PIPELINES, default=list(PIPELINES))
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: all, or one with --quick")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="batches per measurement")
    parser.add_argument("--workers", type=int, help="worker processes of an image pipeline, or threads of tf.data")
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()), help="for temporary files")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to check that the benchmark runs")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this JSON file; numbers of other pipelines in it are kept")
    parser.add_argument("--write", nargs="?", type=pathlib.Path, const=RESULTS, help="write the tables to this file")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    given = {name: getattr(options, name) for name in ("rounds", "steps", "workers") if getattr(options, name) is not None}
    models = options.models or (MODELS[:1] if options.quick else MODELS)
    sizes = dataclasses.replace(QUICK if options.quick else Sizes(), **given)
    if options.part:
        print(json.dumps(part(options.pipeline[0], models, sizes, options.directory)))
        return
    exists = options.json is not None and options.json.exists()
    found = json.loads(options.json.read_text(encoding="utf-8")) if exists else {}
    passed = [f"--{name}={value}" for name, value in given.items()] + ["--quick"] * options.quick
    for name in options.pipeline:
        if importlib.util.find_spec(PACKAGES.get(name, "fitflax")) is None:
            say(f"{name} is left out: {PACKAGES[name]} is not installed")
            continue
        arguments = ("--part", "--pipeline", name, "--models", *models, "--directory", str(options.directory), *passed)
        found = joined(found, json.loads(printed("-c", RUN, *arguments).splitlines()[-1])) | {"machine": machine()}
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if not found:
        return
    here = found["machine"]
    steps = sizes.steps or ", ".join(f"{steps} ({model})" for model, steps in STEPS.items())
    size = f"{sizes.workers} workers, {sizes.rounds} rounds of {steps} batches of {sizes.batch}"
    title = f"{', '.join(f'{name} {value}' for name, value in here.items())}; {size}."
    text = f"{title}\n\n{table(found['results'])}\n\n{resume_table(found['resumes'])}\n"
    print(text)
    if options.write:
        head = "# Input pipelines\n\nWritten by `python -m benchmarks.input --write`; the docstring of `input.py` describes the method.\n\n"
        options.write.write_text(head + text, encoding="utf-8")


if __name__ == "__main__":
    main()
