"""`Trainer.summary`: what is counted, what it needs, and that nothing is computed for it."""

import io
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.errors import DataError, ModelError, NotReadyError
from fitflax.loops.summary import describe_costs, describe_size
from fitflax.parallel import DataParallel

X = np.zeros((8, 4), np.float32)
Y = np.zeros((8, 3), np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


def trainer_of(model=None, devices=1, optimizer="adam", loss="mse", **options):
    trainer = fitflax.Trainer(Net() if model is None else model, parallel=DataParallel(jax.devices()[:devices]), **options)
    if optimizer is not None:
        trainer.compile(optimizer, loss)
    return trainer


def summary(trainer, sample=None):
    file = io.StringIO()
    trainer.summary(sample, file=file)
    return file.getvalue()


def sizes(text):
    """The lines below the table that say how large things are."""
    return [line for line in text[text.rindex("┘") + 1 :].strip().splitlines() if line not in costs(text)]


def costs(text):
    """The lines that give the costs."""
    return [line for line in text.splitlines() if line.startswith(("Model FLOPs", "Memory"))]


def bytes_of(tree):
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


# --- Numbers ---


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (np.zeros(25, np.float32), "25 = 100 B"),
        (np.zeros(328960, np.float32), "328960 ~ 1.2 MB"),
        ({}, "0 = 0 B"),
        (np.zeros(1023, np.int8), "1023 = 1023 B"),
        (np.zeros(1024, np.int8), "1024 ~ 1.0 KB"),
        # Rounded down: less than a megabyte is never shown as a megabyte.
        (np.zeros(2**20 - 1, np.int8), "1048575 ~ 1023.9 KB"),
        (np.zeros(2**20, np.int8), "1048576 ~ 1.0 MB"),
        (jax.ShapeDtypeStruct((2**30,), np.float32), "1073741824 ~ 4.0 GB"),
        (jax.ShapeDtypeStruct((2**40,), np.float32), "1099511627776 ~ 4.0 TB"),
        (jax.ShapeDtypeStruct((2**50,), np.float32), "1125899906842624 ~ 4096.0 TB"),
        ({"half": jnp.zeros(10, jnp.bfloat16), "whole": jnp.zeros((), jnp.int32)}, "11 = 24 B"),
        # Random keys are not counted: they are not numbers that are trained.
        ({"key": jax.random.key(0), "w": jnp.zeros(2)}, "2 = 8 B"),
    ],
)
def test_sizes_are_exact_below_a_kilobyte_and_rounded_down_above(tree, text):
    assert describe_size(tree) == text


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.mostly_slow
def test_everything_is_counted_once_for_any_number_of_devices(devices):
    trainer = trainer_of(devices=devices)
    trainer.build((X, Y))
    state = trainer.state
    # 4 * 5 + 5, 5 + 5, 5 * 3 + 3; Adam has two of each, its count, and the rate.
    assert sizes(summary(trainer)) == [
        f"Total number of trainable weights: 53 = {bytes_of(state.params)} B",
        f"Collection batch_stats: 10 = {bytes_of(state.model_state)} B",
        f"Optimizer state: {2 * 53 + len(jax.tree.leaves(state.opt_state)) - 2 * 6} = {bytes_of(state.opt_state)} B",
    ]
    assert bytes_of(state.params) == 212


def test_the_whole_batch_is_shown_for_several_devices():
    texts = [summary(trainer_of(devices=devices), X) for devices in (1, 4)]
    assert texts[0] == texts[1] and "float32[8,4]" in texts[0]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_sample_may_have_fewer_rows_than_there_are_devices(rows):
    class Flat(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x.reshape(x.shape[0], -1))

    text = summary(trainer_of(Flat(), devices=4), np.zeros((rows, 2, 2), np.float32))
    assert f"float32[{rows},2,2]" in text and "Total number of trainable weights: 15 = 60 B" in text


def test_layers_are_shown_with_their_shapes_in_training_mode():
    text = summary(trainer_of(), X)
    for layer, shape in (("Dense_0", "float32[8,5]"), ("BatchNorm_0", "float32[8,5]"), ("Dense_1", "float32[8,3]")):
        assert re.search(rf"{layer} .*{re.escape(shape)}", text)
    assert "train: True" in text and "kernel: float32[4,5]" in text and "mean: float32[5]" in text


def test_an_optimizer_without_state_has_no_line():
    assert sizes(summary(trainer_of(optimizer=optax.sgd(0.1)), X)) == ["Total number of trainable weights: 53 = 212 B", "Collection batch_stats: 10 = 40 B"]


def test_an_optimizer_state_of_any_kind_is_counted():
    odd = optax.GradientTransformation(lambda params: jnp.zeros(7), lambda updates, state, params=None: (updates, state))
    assert sizes(summary(trainer_of(optimizer=odd), X))[-1] == "Optimizer state: 7 = 28 B"


def test_a_module_without_parameters_has_a_table():
    class Double(nn.Module):
        @nn.compact
        def __call__(self, x):
            return 2 * x

    assert sizes(summary(trainer_of(Double(), optimizer=None), X)) == ["Total number of trainable weights: 0 = 0 B"]


# --- When ---


def test_before_compile_a_sample_is_enough():
    text = summary(trainer_of(optimizer=None), X)
    assert sizes(text) == ["Total number of trainable weights: 53 = 212 B", "Collection batch_stats: 10 = 40 B"]


def test_a_sample_may_be_a_batch_or_only_shapes():
    texts = {summary(trainer_of(), sample) for sample in (X, (X, Y), (X,), jax.ShapeDtypeStruct((8, 4), jnp.float32))}
    assert len(texts) == 1


def test_without_a_sample_and_without_a_batch_the_error_says_what_to_do():
    for trainer in (trainer_of(), trainer_of(optimizer=None)):
        with pytest.raises(NotReadyError, match=r"summary\(\) needs the shapes of a batch, but there has been none yet\. Pass summary\(sample=x\)\."):
            trainer.summary()


@pytest.mark.parametrize(
    "begin",
    [
        lambda trainer: trainer.build((X, Y)),
        lambda trainer: trainer.fit(X, Y, batch_size=8, verbose=0),
        lambda trainer: trainer.train_on_batch((X, Y)),
    ],
)
@pytest.mark.mostly_slow
def test_after_a_batch_its_shapes_are_used(begin):
    trainer = trainer_of(devices=2)
    begin(trainer)
    assert "float32[8,4]" in summary(trainer)
    # A sample takes precedence.
    assert "float32[2,4]" in summary(trainer, X[:2])


def test_after_a_restore_a_sample_is_needed_and_the_state_is_what_was_restored(tmp_path):
    trainer = trainer_of()
    trainer.build((X, Y))
    path = trainer.save(tmp_path / "saved")
    other = trainer_of()
    other.restore(path)
    with pytest.raises(NotReadyError, match="sample=x"):
        other.summary()
    assert summary(other, X) == summary(trainer)
    other.test_on_batch((X, Y))
    assert summary(other) == summary(trainer)


def test_summary_prints_to_standard_output_and_does_nothing_else(capsys):
    trainer = trainer_of()
    assert trainer.summary(X) is None
    out, err = capsys.readouterr()
    assert out == summary(trainer, X) and err == ""
    # Files and pipes: no colors, no cursor.
    assert "\x1b" not in out


def test_nothing_is_computed_and_nothing_changes(compilations):
    summary(trainer_of(devices=4), X)  # Making a key compiles small programs of JAX, once per process.
    trainer = trainer_of(devices=4)
    with compilations.counted() as before_build:
        summary(trainer, X)
    trainer.build((X, Y))
    state, step = trainer.state, trainer.step
    with compilations.counted() as after_build:
        summary(trainer)
    assert (before_build.count, after_build.count) == (0, 0), before_build.names + after_build.names
    assert trainer.step == step and all(map(lambda a, b: a is b, jax.tree.leaves(trainer.state), jax.tree.leaves(state)))


# --- What it runs on ---


def test_several_inputs_are_a_tuple():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, a, b):
            return nn.Dense(2)(a) + nn.Dense(2, use_bias=False)(b)

    text = summary(trainer_of(Two()), ((X, np.zeros((8, 6), np.float32)),))
    assert "float32[8,4]" in text and "float32[8,6]" in text and "weights: 22 = 88 B" in text


@pytest.mark.parametrize("inputs", [("left", "right"), {"b": "right", "a": "left"}])
def test_inputs_are_taken_from_dicts_by_the_names_of_the_trainer(inputs):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, a, b, deterministic):
            return nn.Dropout(0.1, deterministic=deterministic)(nn.Dense(2)(a) + nn.Dense(2, use_bias=False)(b))

    sample = {"left": X, "right": np.zeros((8, 6), np.float32), "y": np.zeros((8, 2), np.float32)}
    for given in (sample, {key: sample[key] for key in ("left", "right")}):
        text = summary(trainer_of(Two(), inputs=inputs, targets="y", rngs=("dropout",), optimizer=None), given)
        assert "weights: 22 = 88 B" in text and "deterministic: False" in text and "float32[8,6]" in text


@pytest.mark.parametrize("devices", [1, 4])
def test_a_module_may_require_the_name_of_the_replica_axis(devices):
    class Synced(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            seen = self.variable("seen", "replicas", lambda: jnp.zeros((), jnp.int32))
            seen.value = jax.lax.psum(jnp.int32(1), "replica")
            return nn.Dense(3)(nn.BatchNorm(use_running_average=not train, axis_name="replica")(x))

    lines = sizes(summary(trainer_of(Synced(), devices=devices), X))
    assert lines[:1] == ["Total number of trainable weights: 23 = 92 B"]
    assert sorted(lines[1:3]) == ["Collection batch_stats: 8 = 32 B", "Collection seen: 1 = 4 B"]


def test_modules_under_scan_and_remat_are_counted_in_full():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4)(x), None

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
            return nn.remat(nn.Dense)(2)(layers(x, None)[0])

    text = summary(trainer_of(Deep(), devices=2), X)
    assert sizes(text)[0] == f"Total number of trainable weights: {3 * 20 + 10} = {4 * (3 * 20 + 10)} B"
    assert "float32[3,4,4]" in text


def test_sown_values_are_not_shown_as_a_collection():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "x", x)
            return nn.Dense(3)(x)

    assert sizes(summary(trainer_of(Sowing(), optimizer=optax.sgd(0.1)), X)) == ["Total number of trainable weights: 15 = 60 B"]


def test_a_sample_that_does_not_fit_the_model_is_an_error():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, a, b):
            return nn.Dense(2)(a + b)

    with pytest.raises(ModelError, match=r"Wide cannot be (initialized|tabulated) on inputs float32\[8,4\]"):
        summary(trainer_of(Wide()), X)
    with pytest.raises(DataError):
        summary(trainer_of(), (X, Y[:3]))


# --- What it costs ---


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(5)(x)))


@pytest.mark.parametrize("devices", [1, 2])
def test_model_flops_count_the_matrix_products_for_one_example(devices):
    lines = costs(summary(trainer_of(Layers(), devices=devices), X))
    forward = 2 * (4 * 5 + 5 * 3)
    assert f"Model FLOPs per example: {forward} forward, {3 * forward} in training" in lines


def test_large_numbers_have_units():
    assert describe_costs(1.5e12, None) == ["Model FLOPs per example: 1.5 T forward, 4.5 T in training"]
    assert describe_costs(None, None) == describe_costs(0.0, None) == []


@pytest.mark.slow
def test_memory_is_measured_on_the_compiled_step_which_is_compiled_only_on_request():
    trainer = trainer_of(Layers())
    trainer.build((X, Y))
    assert "Memory" not in summary(trainer)
    with pytest.raises(NotReadyError, match=r"Pass summary\(sample=\(x, y\), memory=True\)"):
        trainer.summary(memory=True)
    file = io.StringIO()
    trainer.summary((X, Y), memory=True, file=file)
    asked = next(line for line in costs(file.getvalue()) if line.startswith("Memory"))
    assert re.fullmatch(r"Memory of a training step per device: arguments [\d.]+ K?B, temporaries [\d.]+ K?B, peak [\d.]+ K?B", asked)
    trainer.fit(X, Y, verbose=0)
    assert asked in costs(summary(trainer))
    larger = io.StringIO()
    trainer.summary((np.zeros((65536, 4), np.float32), np.zeros((65536, 3), np.float32)), memory=True, file=larger)
    assert " MB" in next(line for line in costs(larger.getvalue()) if line.startswith("Memory"))  # That of its own shapes.
    trainer.fit(X, Y, verbose=0)
    assert asked in costs(summary(trainer))
    with pytest.raises(NotReadyError, match=r"summary\(memory=True\) requires a compiled trainer"):
        fitflax.Trainer(Layers()).summary(X, memory=True)


@pytest.mark.slow
def test_accumulation_needs_less_memory_for_temporaries():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.relu(nn.Dense(4096)(x)))

    def temporaries(steps):
        trainer = fitflax.Trainer(Wide(), parallel=DataParallel(jax.devices()[:1]))
        trainer.compile("sgd", "mse", accumulate_steps=steps)
        file = io.StringIO()
        trainer.summary((np.zeros((1024, 4), np.float32), np.zeros((1024, 3), np.float32)), memory=True, file=file)
        found = re.search(r"temporaries ([\d.]+) MB", file.getvalue())
        assert found is not None
        return float(found[1])

    assert temporaries(8) < temporaries(1) / 3


@pytest.mark.parametrize(("reported", "peak"), [(0, "6.0 KB"), (2048, "6.0 KB"), (8192, "8.0 KB")])
def test_peak_memory_is_never_less_than_what_is_in_use_at_the_same_time(reported, peak):
    sizes = {"argument_size_in_bytes": 2048, "output_size_in_bytes": 1024, "alias_size_in_bytes": 1024, "temp_size_in_bytes": 4096}
    memory = types.SimpleNamespace(**sizes, peak_memory_in_bytes=reported)
    assert describe_costs(None, memory) == [f"Memory of a training step per device: arguments 2.0 KB, temporaries 4.0 KB, peak {peak}"]
