"""`Trainer.restore`: into another model, under other names, over an existing state, and from checkpoints that fitflax did not write."""

import gc
import pathlib
import re
import weakref
from typing import Any

import flax
import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.checkpoints.checkpoint_files import Saved
from fitflax.checkpoints.resume import load_checkpoint
from fitflax.errors import ConfigError, ModelError, NotReadyError, RestoreError
from fitflax.parallel import DataParallel
from tests.run_script import TRAIN, differences, state_of


class Net(nn.Module):
    """A body with batch statistics and a head, with configurable names."""

    body: str = "body"
    head: str = "head"
    classes: int = 3

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(8, name=self.body)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name=f"{self.body}_norm")(x))
        return nn.Dense(self.classes, name=self.head)(nn.Dropout(0.5, deterministic=not train)(x))


def bare(model: nn.Module, devices: int = 1, seed: int = 0) -> fitflax.Trainer:
    return fitflax.Trainer(model, seed=seed, parallel=DataParallel(jax.devices()[:devices]))


def compiled(model: nn.Module, devices: int = 1, seed: int = 0, optimizer: Any = None) -> fitflax.Trainer:
    trainer = bare(model, devices, seed)
    trainer.compile(optax.adam(0.05) if optimizer is None else optimizer, "sparse_categorical_crossentropy", ["accuracy"])
    return trainer


def built(model: nn.Module, devices: int = 1, seed: int = 0, optimizer: Any = None) -> fitflax.Trainer:
    trainer = compiled(model, devices, seed, optimizer)
    trainer.build((jax.ShapeDtypeStruct((4, 4), np.float32),))
    return trainer


def train(trainer: fitflax.Trainer, steps: int) -> None:
    trainer.fit(TRAIN, batch_size=4, steps=steps, verbose=0)


def at(tree: Any, path: str) -> np.ndarray:
    for key in path.split("/"):
        tree = tree[key]
    return np.asarray(tree)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> tuple[pathlib.Path, fitflax.TrainState]:
    """A checkpoint at step 6 of a network with five classes, and its state."""
    trainer = compiled(Net(body="backbone", head="classes", classes=5), seed=9)
    train(trainer, 6)
    return trainer.save(tmp_path_factory.mktemp("pretrained") / "final"), trainer.state


RENAMED: dict[str, str | None] = {
    "params/encoder": "params/backbone",
    "params/encoder_norm": "params/backbone_norm",
    "batch_stats/encoder_norm": "batch_stats/backbone_norm",
}
ENCODER = Net(body="encoder")


def check_fine_tuned(trainer: fitflax.Trainer, source: fitflax.TrainState) -> None:
    """Checks that a trainer of `ENCODER` has the body of `source`, and the head and everything else as `build` makes them."""
    state, fresh = trainer.state, built(ENCODER).state
    for name in ("kernel", "bias"):
        assert np.array_equal(at(state.params, f"encoder/{name}"), at(source.params, f"backbone/{name}"))
        assert np.array_equal(at(state.params, f"head/{name}"), at(fresh.params, f"head/{name}"))
    for name in ("mean", "var"):
        assert np.array_equal(at(state.model_state, f"batch_stats/encoder_norm/{name}"), at(source.model_state, f"batch_stats/backbone_norm/{name}"))
    assert trainer.step == 0 and int(state.step) == 0 and np.array_equal(jax.random.key_data(state.key), jax.random.key_data(fresh.key))
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_part_is_restored_and_the_rest_is_as_build_makes_it(devices, pretrained):
    path, source = pretrained
    trainer = built(ENCODER, devices)
    report = trainer.restore(path, partial=True, mapping=RENAMED)
    check_fine_tuned(trainer, source)
    assert report.restored == (
        *("batch_stats/encoder_norm/mean", "batch_stats/encoder_norm/var"),
        *("params/encoder/bias", "params/encoder/kernel", "params/encoder_norm/bias", "params/encoder_norm/scale"),
    )
    assert report.initialized == ("params/head/bias", "params/head/kernel")
    assert report.unused == ("params/classes/bias", "params/classes/kernel")
    train(trainer, 2)
    assert trainer.step == 2


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_initialized_arrays_are_fresh_even_if_the_trainer_has_trained(devices, pretrained):
    path, source = pretrained
    trainer = compiled(ENCODER, devices)
    train(trainer, 1)
    trainer.restore(path, partial=True, mapping=RENAMED)
    check_fine_tuned(trainer, source)


def test_a_head_of_another_size_is_an_error_that_a_mapping_fixes(pretrained):
    path, source = pretrained
    trainer = built(Net(body="backbone", head="classes"))
    with pytest.raises(RestoreError, match=r"mapping=.*'params/classes/kernel': None.*params/classes/kernel has shape \(8, 5\), expected \(8, 3\)"):
        trainer.restore(path, partial=True)
    report = trainer.restore(path, partial=True, mapping={"params/classes": None})
    assert report.initialized == report.unused == ("params/classes/bias", "params/classes/kernel")
    assert np.array_equal(at(trainer.state.params, "backbone/kernel"), at(source.params, "backbone/kernel"))


def test_partial_needs_the_shapes_of_the_model(pretrained):
    path, _ = pretrained
    for trainer in (bare(ENCODER), compiled(ENCODER)):
        with pytest.raises(NotReadyError, match=r"build\(batch\) first"):
            trainer.restore(path, partial=True, mapping=RENAMED)
    trainer = bare(Net(body="backbone", head="classes", classes=5))
    trainer.restore(path)
    with pytest.raises(NotReadyError, match=r"build\(batch\) first"):
        trainer.restore(path, partial=True)
    trainer.predict(TRAIN[0][:4])  # Determines the shapes, too.
    assert trainer.restore(path, partial=True).initialized == ()


def test_failures_leave_everything_as_it_was(pretrained):
    path, _ = pretrained
    trainer = compiled(ENCODER)
    train(trainer, 1)
    before, run_id = state_of(trainer), trainer._session.run_id
    failures: list[tuple[type[Exception], dict[str, Any]]] = [
        (RestoreError, {}),
        (RestoreError, {"weights_only": True}),
        (RestoreError, {"partial": True}),
        (RestoreError, {"partial": True, "mapping": {**RENAMED, "params/foot": None}}),
        (RestoreError, {"partial": True, "mapping": {"params/head": "params/classes"}}),
        (RestoreError, {"mapping": RENAMED}),
        (ConfigError, {"mapping": {"params/head": None}}),
    ]
    for kind, arguments in failures:
        with pytest.raises(kind):
            trainer.restore(path, **arguments)
        assert not differences(state_of(trainer), before) and trainer.step == 1 and trainer._session.run_id == run_id
    train(trainer, 1)
    assert trainer.step == 2


def test_an_optimizer_that_cannot_be_initialized_leaves_the_state_as_it_was(pretrained):
    path, _ = pretrained

    def picky(params: Any) -> Any:
        if "backbone" in params:
            raise ValueError("not with a backbone")
        return ()

    trainer = compiled(Net(body="backbone", head="classes", classes=5), optimizer=optax.GradientTransformation(picky, optax.sgd(0.1).update))
    with pytest.raises(ValueError, match="not with a backbone"):
        trainer.restore(path, weights_only=True)
    assert trainer._session.state.live is None
    kept = built(Net(body="backbone", head="classes", classes=5))
    before = state_of(kept)
    with pytest.raises(ValueError, match="not with a backbone"):
        kept.compile(optax.GradientTransformation(picky, optax.sgd(0.1).update), "sparse_categorical_crossentropy")
    assert not differences(state_of(kept), before)


@pytest.mark.parametrize("prepare", [bare, built])
@pytest.mark.slow
def test_a_renamed_model_continues_with_its_optimizer_as_if_it_had_kept_its_names(prepare, pretrained):
    path, _ = pretrained
    same = compiled(Net(body="backbone", head="classes", classes=5), seed=9)
    same.restore(path)
    renamed = prepare(Net(body="trunk", head="head", classes=5), seed=9)
    mapping = {"params/trunk": "params/backbone", "params/trunk_norm": "params/backbone_norm", "params/head": "params/classes"}
    report = renamed.restore(path, mapping={**mapping, "batch_stats/trunk_norm": "batch_stats/backbone_norm"})
    assert len(report.restored) == 8 and report.initialized == report.unused == ()
    if prepare is bare:
        renamed.compile(optax.adam(0.05), "sparse_categorical_crossentropy", ["accuracy"])
    for trainer in (same, renamed):
        assert trainer.step == 6
        train(trainer, 2)
    for one, other in zip(jax.tree.leaves(same.state.params["backbone"]), jax.tree.leaves(renamed.state.params["trunk"]), strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(same.state.params["classes"]["kernel"], renamed.state.params["head"]["kernel"])


def test_names_that_the_model_does_not_have_are_an_error_at_the_first_batch(pretrained):
    path, _ = pretrained
    trainer = bare(Net(body="trunk", head="head", classes=5))
    trainer.restore(path, mapping={"params/trunc": "params/backbone"})
    with pytest.raises(RestoreError, match=r"partial=True.* Missing: batch_stats/trunk_norm/mean, .* and 5 more\. Unexpected: "):
        trainer.predict(TRAIN[0][:4])


@pytest.mark.slow
def test_a_rate_that_was_saved_in_the_dtype_of_the_parameters_is_restored_as_float32(tmp_path):
    # In version 0.1, the rate of an optimizer by name had the dtype of the parameters, as here.
    older = optax.inject_hyperparams(optax.sgd, static_args=("momentum", "nesterov", "accumulator_dtype"))(learning_rate=3e-4)
    saved, trainer = (compiled(nn.Dense(3, param_dtype=jax.numpy.bfloat16), optimizer=optimizer) for optimizer in (older, "sgd"))
    for each in (saved, trainer):
        each.build(np.ones((8, 4), np.float32))
    assert saved.state.opt_state.hyperparams["learning_rate"].dtype == jax.numpy.bfloat16
    saved.save(tmp_path / "older")
    trainer.restore(tmp_path / "older")
    rate = trainer.state.opt_state.hyperparams["learning_rate"]
    assert rate.dtype == np.float32 and float(rate) == float(jax.numpy.bfloat16(3e-4))
    trainer.learning_rate = 0.1
    for _ in range(3):
        trainer.learning_rate *= 0.999
        train(trainer, 1)
    assert trainer.learning_rate == pytest.approx(0.1 * 0.999**3, rel=1e-6)


def test_a_state_that_is_restored_and_saved_before_compile_keeps_its_optimizer_state(tmp_path):
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.adam(0.05))
    original, other, server = compiled(nn.Dense(3), optimizer=optimizer), compiled(nn.Dense(3), optimizer=optimizer), bare(nn.Dense(3))
    train(original, 2)
    server.restore(original.save(tmp_path / "saved"))
    other.restore(server.save(tmp_path / "saved"))
    assert not differences(state_of(other), state_of(original))


def test_only_process_0_reads_the_optimizer_state_to_save_before_compile(tmp_path, monkeypatch):
    original, server = compiled(nn.Dense(3)), bare(nn.Dense(3))
    train(original, 1)
    server.restore(original.save(tmp_path / "saved"))
    state = server._session.state
    assert jax.tree.leaves(state.state_to_save().opt_state)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert not jax.tree.leaves(state.state_to_save().opt_state)


def test_a_restore_before_compile_keeps_only_the_optimizer_state_in_host_memory(pretrained, monkeypatch):
    arrays: dict[str, list[weakref.ref[np.ndarray]]] = {}

    def load(*arguments: Any, **options: Any) -> Saved:
        saved = load_checkpoint(*arguments, **options)
        arrays.update({name: [weakref.ref(leaf) for leaf in jax.tree.leaves(part) if isinstance(leaf, np.ndarray)] for name, part in saved.train.items()})
        return saved

    monkeypatch.setattr("fitflax.trainer.load_checkpoint", load)
    trainer = bare(Net(body="backbone", head="classes", classes=5))
    trainer.restore(pretrained[0])
    gc.collect()
    alive = {name for name, part in arrays.items() if any(array() is not None for array in part)}
    assert arrays["params"] and alive == {"opt_state"}


def test_a_full_restore_reports_all_arrays_and_its_errors_say_how_to_restore_a_part(pretrained):
    path, _ = pretrained
    trainer = bare(Net(body="backbone", head="classes", classes=5))
    assert str(trainer.restore(path)) == "Restored 8 of 8 arrays."
    with pytest.raises(
        RestoreError,
        match=r"To restore only what matches, call Trainer\.restore\(path, partial=True\)\. Missing: batch_stats/encoder_norm/mean, .* and 5 more",
    ):
        built(ENCODER).restore(path, weights_only=True)
    wider = built(Net(body="backbone", head="classes", classes=7))
    with pytest.raises(RestoreError, match=r"call Trainer\.restore\(path, partial=True, mapping=") as caught:
        wider.restore(path, weights_only=True)
    report = wider.restore(path, partial=True, mapping=advised(caught))
    assert report.initialized == ("params/classes/bias", "params/classes/kernel")


def advised(caught):
    """What the error advises as a mapping."""
    return eval(re.search(r"mapping=(\{.*?\})", str(caught.value))[1])


@pytest.mark.slow
def test_the_advice_of_an_error_can_be_added_to_the_users_mapping(pretrained):
    other, mapping = (
        compiled(Net(body="torso", head="classes", classes=7)),
        {"params/torso": "params/backbone", "batch_stats/torso_norm": "batch_stats/backbone_norm"},
    )
    mapping["params/torso_norm"] = "params/backbone_norm"
    other.build((jax.ShapeDtypeStruct((4, 4), np.float32),))
    for options in ({"weights_only": True}, {"partial": True}):
        with pytest.raises(RestoreError, match="If you pass a mapping, map these to None in it") as caught:
            other.restore(pretrained[0], mapping=mapping, **options)
        report = other.restore(pretrained[0], partial=True, mapping={**mapping, **advised(caught)})
        assert report.initialized == ("params/classes/bias", "params/classes/kernel") and len(report.restored) == 6


@pytest.mark.slow
def test_the_advice_of_an_error_does_not_name_averaged_parameters(tmp_path):
    def averaged(classes):
        trainer = bare(Net(classes=classes))
        trainer.compile("adam", "sparse_categorical_crossentropy", ema_decay=0.9)
        trainer.build((jax.ShapeDtypeStruct((4, 4), np.float32),))
        return trainer

    path = averaged(5).save(tmp_path / "saved")
    other = averaged(7)
    with pytest.raises(RestoreError, match=r"Different: params/head/bias .*; params/head/kernel [^;]*$") as caught:
        other.restore(path)
    assert "ema_params" not in str(caught.value)
    assert other.restore(path, partial=True, mapping=advised(caught)).initialized == ("params/head/bias", "params/head/kernel")


def test_a_model_with_unknown_shapes_can_restore_another_checkpoint_after_a_wrong_one(pretrained, tmp_path):
    wrong = built(nn.Dense(2), optimizer=optax.sgd(0.1)).save(tmp_path / "wrong")
    trainer = bare(Net(body="backbone", head="classes", classes=5))
    trainer.restore(wrong)
    with pytest.raises((ModelError, RestoreError)):
        trainer.predict(TRAIN[0][:4])
    trainer.restore(pretrained[0])
    assert trainer.predict(TRAIN[0][:4]).shape == (4, 5) and trainer.step == 6


def test_after_a_restore_of_the_weights_the_order_of_examples_starts_over(pretrained):
    trainer, histories = compiled(Net(body="backbone", head="classes", classes=5)), []
    for _ in range(2):
        trainer.restore(pretrained[0], weights_only=True)
        histories.append(trainer.fit(TRAIN, batch_size=4, verbose=0).history)
    assert histories[0] == histories[1]


def test_a_state_that_a_failed_step_consumed_can_be_restored(pretrained):
    path, source = pretrained
    trainer = built(Net(body="backbone", head="classes", classes=5))
    for leaf in jax.tree.leaves(trainer._session.state.live.borrow()):
        leaf.delete()
    trainer.restore(path)
    assert np.array_equal(at(trainer.state.params, "backbone/kernel"), at(source.params, "backbone/kernel"))


# -- memory --


class Wide(nn.Module):
    """Half a megabyte of parameters in each of its two arrays, and next to nothing else."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(512, name="head", use_bias=False)(nn.Dense(256, name="body", use_bias=False)(x))


SIZE = 2 * 512 * 256 * 4


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


class Watched(DataParallel):
    """Measures the memory in use on the devices whenever something new has been put there."""

    def __init__(self) -> None:
        super().__init__(jax.devices()[:1])
        self.peak = 0

    def _measured(self, result: Any) -> Any:
        self.peak = max(self.peak, live_bytes())
        return result

    def put(self, tree: Any) -> Any:
        return self._measured(super().put(tree))

    def copy(self, tree: Any) -> Any:
        return self._measured(super().copy(tree))

    def compile(self, fn: Any, **layout: Any) -> Any:
        function = super().compile(fn, **layout)

        def measured(*arguments: Any) -> Any:
            return self._measured(function(*arguments))

        measured.lower = function.lower
        return measured


def watched(model: nn.Module, optimizer: Any) -> tuple[fitflax.Trainer, Watched]:
    strategy = Watched()
    trainer = fitflax.Trainer(model, parallel=strategy)
    trainer.compile(optimizer, "mse")
    return trainer, strategy


X, Y = np.ones((4, 512), np.float32), np.ones((4, 512), np.float32)


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Excludes the objects of other tests from the garbage collections that precede each count of live bytes; otherwise each would take a second."""
    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def wide(few_objects, tmp_path_factory) -> pathlib.Path:
    trainer, _ = watched(Wide(), optax.adam(0.1))
    trainer.build((X, Y))
    return trainer.save(tmp_path_factory.mktemp("wide") / "final")


@pytest.mark.parametrize(
    ("begin", "arguments"),
    [
        ("nothing", {}),
        ("build", {}),
        pytest.param("train", {"weights_only": True}, marks=pytest.mark.slow),
        ("build", {"partial": True, "mapping": {"params/head": None}}),
        pytest.param("change", {"partial": True, "mapping": {"params/head": None}}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_parameters_and_optimizer_are_never_on_the_device_twice(begin, arguments, wide):
    trainer, strategy = watched(Wide(), optax.adam(0.1))
    before = live_bytes()
    if begin in ("build", "change"):
        trainer.build((X, Y))
    if begin == "change":
        trainer.replace_state(trainer.state)
    if begin == "train":
        trainer.fit(X, Y, batch_size=4, steps=1, verbose=0)
    strategy.peak = 0
    trainer.restore(wide, **arguments)
    after = live_bytes() - before
    assert 3 * SIZE <= after < 3.05 * SIZE  # Parameters and Adam's two averages.
    assert strategy.peak - before < 3.05 * SIZE


@pytest.mark.slow
def test_building_and_compiling_again_free_what_they_replace(few_objects):
    trainer, strategy = watched(Wide(), optax.adam(0.1))
    before = live_bytes()
    trainer.build((X, Y))
    strategy.peak = 0
    trainer.build((X, Y))
    trainer.compile(optax.adam(0.2), "mse")
    assert strategy.peak - before < 3.05 * SIZE


@pytest.mark.slow
def test_a_state_that_was_lent_stays_valid(wide):
    trainer, _ = watched(Wide(), optax.sgd(0.1))
    trainer.build((X, Y))
    lent = trainer.state
    values = np.array(lent.params["body"]["kernel"])
    trainer.restore(wide, weights_only=True)
    trainer.build((X, Y))
    assert np.array_equal(lent.params["body"]["kernel"], values)


@pytest.mark.slow
def test_an_optimizer_that_keeps_the_parameters_gets_its_own_copy(wide):
    trainer, _ = watched(Wide(), optax.GradientTransformation(lambda params: params, lambda grads, state, params=None: (grads, state)))
    trainer.restore(wide, weights_only=True)
    state = trainer.state
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.params, state.opt_state))}
    assert len(pointers) == 4 and np.array_equal(state.params["body"]["kernel"], state.opt_state["body"]["kernel"])


@pytest.mark.slow
def test_a_failure_on_the_device_leaves_no_partial_state(wide, monkeypatch):
    trainer, strategy = watched(Wide(), optax.sgd(0.1))
    trainer.build((X, Y))

    def full(tree: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(strategy, "put", full)
        trainer.restore(wide, weights_only=True)
    with pytest.raises(NotReadyError, match="no state yet"):
        _ = trainer.state
    trainer.restore(wide, weights_only=True)
    assert trainer.step == 0


@pytest.mark.slow
def test_an_optimizer_that_does_not_fit_into_memory_keeps_the_parameters(few_objects, monkeypatch):
    trainer, strategy = watched(Wide(), optax.sgd(0.1))
    trainer.build((X, Y))
    before = np.array(trainer.state.params["body"]["kernel"])

    def full(result: Any) -> Any:
        raise MemoryError("no room")

    large = optax.adam(0.1)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(strategy, "_measured", full)
        trainer.compile(large, "mse")
    assert np.array_equal(trainer.state.params["body"]["kernel"], before)
    with pytest.raises(NotReadyError, match="compile"):
        trainer.train_on_batch((X, Y))
    trainer.compile(large, "mse")
    assert len(jax.tree.leaves(trainer.state.opt_state)) == 5


# -- other containers, other writers --


class Two(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3, name="head")(nn.Dense(4, name="body")(x))


@pytest.mark.slow
def test_modules_with_frozen_dicts_restore_before_and_after_build(tmp_path):
    flax.config.update("flax_return_frozendict", True)
    try:
        trainer = built(Two(), seed=3)
        path = trainer.save(tmp_path / "frozen")
        late, early, part = bare(Two()), built(Two()), built(Two())
        for again in (late, early):
            again.restore(path)
        late.compile(optax.adam(0.05), "sparse_categorical_crossentropy", ["accuracy"])
        assert part.restore(path, partial=True, mapping={"params/head": None}).initialized == ("params/head/bias", "params/head/kernel")
        assert jax.tree.structure(part.state) == jax.tree.structure(trainer.state)
        for again in (late, early):
            again.train_on_batch((TRAIN[0][:4], TRAIN[1][:4]))
            assert isinstance(again.state.params, flax.core.FrozenDict) and again.step == 1
            assert jax.tree.structure(again.state) == jax.tree.structure(trainer.state)
        assert not differences(state_of(late), state_of(early))
    finally:
        flax.config.update("flax_return_frozendict", False)


def foreign(trainer: fitflax.Trainer, *names: str) -> Saved:
    """A checkpoint as other libraries write it: some parts of the state, and no metadata."""
    state = flax.serialization.to_state_dict(jax.device_get({"params": trainer.state.params, "model_state": trainer.state.model_state}))
    rest = {"step": np.int32(7), "opt_state": flax.serialization.to_state_dict(jax.device_get(trainer.state.opt_state))}
    return Saved(pathlib.Path("theirs"), {"key_impls": {}}, {**state, **{name: rest[name] for name in names}}, {})


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [bare, compiled, built])
def test_what_other_libraries_omit_is_kept_or_named_in_the_error(prepare, monkeypatch):
    theirs = compiled(Net(), seed=4)
    train(theirs, 2)
    trainer = prepare(Net())
    for names, lacks in ((("step",), "no optimizer state"), (("opt_state",), "no step"), ((), "no step and no optimizer state")):
        monkeypatch.setattr(fitflax.trainer, "load_checkpoint", lambda path, roots, names=names, **options: foreign(theirs, *names))
        with pytest.raises(RestoreError, match=rf"theirs has {lacks}\. To restore only .*, pass weights_only=True"):
            trainer.restore("theirs")
    trainer.restore("theirs", weights_only=True)
    assert np.array_equal(at(trainer.state.params, "body/kernel"), at(theirs.state.params, "body/kernel")) and trainer.step == 0
    monkeypatch.setattr(fitflax.trainer, "load_checkpoint", lambda path, roots, **options: foreign(theirs, "step", "opt_state"))
    trainer.restore("theirs")
    if prepare is bare:
        trainer.compile(optax.adam(0.05), "sparse_categorical_crossentropy")
    expected = state_of(theirs) | {".step": state_of(trainer)[".step"], ".key": state_of(built(Net()))[".key"]}
    assert trainer.step == 7 and trainer.state.ema_params is None and not differences(state_of(trainer), expected)


# -- other floating dtypes --


class Typed(nn.Module):
    """Stores its parameters in a dtype."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=True, dtype=self.dtype, param_dtype=self.dtype)(x)
        return nn.Dense(3, dtype=self.dtype, param_dtype=self.dtype)(x).astype(np.float32)


def typed(dtype: Any, optimizer: Any = "adam") -> fitflax.Trainer:
    trainer = bare(Typed(dtype))
    trainer.compile(optimizer, "sparse_categorical_crossentropy", learning_rate=0.05 if isinstance(optimizer, str) else None)
    return trainer


@pytest.mark.parametrize("form", ["msgpack", "orbax", "safetensors"])
@pytest.mark.parametrize("how", [{}, {"weights_only": True}, {"partial": True}], ids=["whole", "weights_only", "partial"])
@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.mostly_slow
def test_cast_restores_a_checkpoint_of_another_floating_dtype(form: str, how: dict[str, Any], is_built: bool, tmp_path: pathlib.Path):
    if (form == "safetensors" and not how) or ("partial" in how and not is_built):
        pytest.skip("not possible in any dtype")
    half = typed("bfloat16")
    callbacks = [] if form == "safetensors" else [ModelCheckpoint(tmp_path, backend=form)]
    half.fit(TRAIN, batch_size=4, steps=3, verbose=0, callbacks=callbacks)
    path = half.save_weights(tmp_path / "model.safetensors") if form == "safetensors" else tmp_path
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), (half.state.params, half.state.model_state))
    trainer = typed("float32")
    if is_built:
        trainer.build((jax.ShapeDtypeStruct((4, 4), np.float32),))
        with pytest.raises(RestoreError, match=r"pass cast=True to Trainer\.restore\. Different: .* is bfloat16, expected float32") as caught:
            trainer.restore(path, **how)
        assert "partial=True" not in str(caught.value)
    trainer.restore(path, cast=True, **how)
    trainer.predict(TRAIN[0])
    jax.tree.map(np.testing.assert_array_equal, (trainer.state.params, trainer.state.model_state), expected)
    moments = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), half.state.opt_state[3][0].mu if not how else jax.tree.map(np.zeros_like, expected[0]))
    jax.tree.map(np.testing.assert_array_equal, trainer.state.opt_state[3][0].mu, moments)
    assert trainer.step == (0 if how else 3)
    train(trainer, 2)


def test_cast_converts_only_floats_and_rejects_numbers_that_do_not_fit(tmp_path: pathlib.Path):
    trainer = typed("float32")
    trainer.build((jax.ShapeDtypeStruct((4, 4), np.float32),))
    trainer.replace_params(jax.tree.map(lambda leaf: np.full(leaf.shape, 1e6, np.float32), trainer.state.params))
    path = trainer.save(tmp_path / "saved")
    narrow = typed("float16")
    narrow.build((jax.ShapeDtypeStruct((4, 4), np.float32),))
    with pytest.raises(RestoreError, match="Dense_0/bias has numbers that are too large for float16"):
        narrow.restore(path, cast=True)
    trainer.replace_state(trainer.state.replace_step(5))
    integers = typed("float32", optax.GradientTransformation(lambda params: np.float32(0), lambda grads, state, params: (grads, state)))
    with pytest.raises(RestoreError, match="does not fit this optimizer"):
        integers.restore(path, cast=True)


def test_a_resume_does_not_convert_dtypes(tmp_path: pathlib.Path):
    typed("bfloat16").fit(TRAIN, batch_size=4, steps=1, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    with pytest.raises(RestoreError, match="is bfloat16, expected float32"):
        typed("float32").fit(TRAIN, batch_size=4, steps=2, verbose=0, callbacks=[ModelCheckpoint(tmp_path)], resume="auto")


@pytest.mark.slow
def test_cast_before_compile_converts_the_optimizer_state_when_it_is_known(tmp_path: pathlib.Path):
    half = typed("bfloat16")
    train(half, 2)
    path = half.save(tmp_path / "saved")
    trainer = bare(Typed("float32"))
    trainer.restore(path, cast=True)
    trainer.compile("adam", "sparse_categorical_crossentropy", learning_rate=0.05)
    train(trainer, 1)
    assert trainer.step == 3 and {str(leaf.dtype) for leaf in jax.tree.leaves(trainer.state.opt_state)} == {"int32", "float32"}
