"""Optimizers whose update needs more than a gradient, or that evaluate other parameters than they train, compared with hand-written loops."""

import dataclasses
import functools
import warnings
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import BestCheckpoint, EarlyStopping, ModelCheckpoint
from fitflax.checkpoints import load_inference_state
from fitflax.errors import ConfigError, FitflaxWarning, OptimizerError
from fitflax.parallel import DataParallel, Sharded
from fitflax.steps.optimizer import loss_functions
from tests.test_docs import ROOT, blocks

X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 32).astype(np.int32)
MODEL = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(3)])
STEPS = 8


def one_device() -> DataParallel:
    return DataParallel(jax.devices()[:1])


def make(optimizer: Any, parallel: Any = None, model: nn.Module = MODEL, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(model, parallel=parallel or one_device())
    trainer.compile(optimizer, "sparse_categorical_crossentropy", **options)
    trainer.build((X, Y))
    return trainer


def train(optimizer: Any, *arguments: Any, steps: int = STEPS, xs: Any = None, **options: Any) -> tuple[list[float], list[Any]]:
    """Returns the loss of each step, and the parameters after it."""
    trainer = make(optimizer, *arguments, **options)
    losses, params = [], []
    for x in xs or [X] * steps:
        losses.append(trainer.train_on_batch((x, Y))["loss"])
        params.append(jax.tree.map(np.array, trainer.state.params))
    return losses, params


@functools.cache
def first_params() -> Any:
    return make("sgd").state.params


def inputs(name: str) -> list[Any]:
    """Returns the inputs of each step; for `apply_if_finite`, one example of two batches is NaN."""
    bad = np.where(np.arange(32)[:, None] == 5, np.float32(np.nan), X)
    return [bad if name == "apply_if_finite" and step in (2, 3) else X for step in range(STEPS)]


@functools.cache
def hand_written_loop(name: str) -> tuple[list[float], list[Any]]:
    """Runs the loop from Optax's documentation: the loss of the whole batch, and the arguments that the transformation needs."""
    optimizer, wants = OPTIMIZERS[name]
    params = first_params()
    if name == "lookahead":
        optimizer, params = optax.lookahead(*LOOKAHEAD), optax.LookaheadParams.init_synced(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(MODEL.apply({"params": params}, x), Y).mean()

        trained = trained_params(params)
        value, grad = optax.value_and_grad_from_state(loss)(trained, state=state) if name in STORES_GRADIENT else jax.value_and_grad(loss)(trained)
        known = {"value": value, "grad": grad, "value_fn": loss, "obj_fn": loss, "grad_fn": lambda params, _: jax.grad(loss)(params)}
        updates, state = optimizer.update(grad, state, params, **{name: known[name] for name in wants})
        return optax.apply_updates(params, updates), state, value

    state, losses, trained = optimizer.init(params), [], []
    for x in inputs(name):
        params, state, value = step(params, state, x)
        losses.append(float(value))
        trained.append(trained_params(params))
    return losses, trained


def trained_params(params: Any) -> Any:
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def documented_lookahead() -> Any:
    """Returns the function `lookahead` of the recipe for averages, which keeps the slow parameters in the optimizer state."""
    page = (ROOT / "docs" / "how-to" / "average-parameters.md").read_text(encoding="utf-8")
    code = next(block.code for block in blocks(page) if "def lookahead" in block.code)
    namespace: dict[str, Any] = {"optax": optax}
    exec(code[code.index("def lookahead") : code.index("trainer = ")], namespace)
    return namespace["lookahead"]


def by_layer(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "first" if "layers_0" in jax.tree_util.keystr(path) else "rest", params)


def dimensions(params: Any) -> Any:
    """Returns Muon's partition: the first kernel, with its output axis first; Adam trains the others."""
    transposed = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return jax.tree_util.tree_map_with_path(lambda path, _: transposed if "layers_0']['kernel" in jax.tree_util.keystr(path) else None, params)


def plateau() -> optax.GradientTransformation:
    """Returns a transformation that halves the updates at some of the steps: each step of Adam with a rate of 0.01 improves the loss by about 0.04."""
    return optax.contrib.reduce_on_plateau(patience=1, factor=0.5, rtol=0.0, atol=0.042)


def polyak() -> optax.GradientTransformation:
    """Returns an optimizer whose rate is below its maximum, so that it depends on the loss."""
    return optax.polyak_sgd(scaling=10.0)


def backtracking(**options: Any) -> optax.GradientTransformation:
    """Returns gradient descent with a line search that has to reduce the first step."""
    return optax.chain(optax.sgd(30.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=10, **options))


LOOKAHEAD = (optax.sgd(0.1, momentum=0.9), 3, 0.5)
NORMALIZED = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
# The optimizer of the trainer, and the arguments that the hand-written loop passes to its update.
OPTIMIZERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "plateau": (optax.chain(optax.adam(1e-2), plateau()), ("value",)),
    "lbfgs": (optax.lbfgs(), ("value", "grad", "value_fn")),
    "polyak": (polyak(), ("value",)),
    "momo": (optax.contrib.momo(10.0, lower_bound=0.8), ("value",)),
    "momo_adam": (optax.contrib.momo_adam(0.5, lower_bound=0.8), ("value",)),
    "backtracking": (backtracking(), ("value", "grad", "value_fn")),
    "backtracking with gradients": (backtracking(store_grad=True), ("value", "grad", "value_fn")),
    "multi_transform": (optax.multi_transform({"first": polyak(), "rest": optax.sgd(0.1)}, by_layer), ("value",)),
    "MultiSteps": (optax.MultiSteps(polyak(), 2).gradient_transformation(), ("value",)),
    "inject_hyperparams": (optax.inject_hyperparams(optax.polyak_sgd)(scaling=10.0), ("value",)),
    "schedule_free": (optax.contrib.schedule_free_adamw(1e-2), ()),
    "sam": (optax.contrib.sam(optax.sgd(0.1), NORMALIZED), ()),
    "opaque sam": (optax.contrib.sam(optax.sgd(0.1), NORMALIZED, opaque_mode=True), ("grad_fn",)),
    "sophia": (optax.contrib.sophia(1e-2), ("obj_fn",)),
    "muon": (optax.contrib.muon(1e-2), ()),
    "muon by dimensions": (optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dimensions), ()),
    "muon and adam": (optax.multi_transform({"first": optax.contrib.muon(1e-2), "rest": optax.adam(1e-2)}, by_layer), ()),
    "prodigy": (optax.contrib.prodigy(0.5, estim_lr0=1e-2), ()),
    "lookahead": (documented_lookahead()(*LOOKAHEAD), ()),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(1e-2), 5), ()),
}
LINE_SEARCHES = {"lbfgs", "backtracking", "backtracking with gradients"}
# Their state has the loss and the gradient at the new parameters, which the documented loop reuses.
STORES_GRADIENT = LINE_SEARCHES - {"backtracking"}
# One for each way to compute the arguments from several replicas; Muon, which needs whole kernels; and a NaN that only one replica has.
ON_SEVERAL = {*LINE_SEARCHES, "polyak", "opaque sam", "sophia", "muon by dimensions", "apply_if_finite"}
PLACES = {"one": one_device, "four": lambda: DataParallel(jax.devices()[:4]), "mesh": lambda: Sharded({"data": 4}, devices=jax.devices()[:4])}
# One for each kind of argument or wrapper.
QUICK = {("plateau", "one"), ("backtracking with gradients", "four"), ("opaque sam", "four"), ("lookahead", "one"), ("apply_if_finite", "four")}
CASES = [(name, place) for name in OPTIMIZERS for place in (PLACES if name in ON_SEVERAL else ["one"])]


@pytest.mark.parametrize(("name", "place"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES])
def test_an_optimizer_trains_as_in_a_hand_written_loop(name, place):
    """Parameters are equal up to rounding after each step. A line search amplifies rounding, so its tolerance is larger after the first steps."""
    want, params = hand_written_loop(name)
    found, trained = train(OPTIMIZERS[name][0], PLACES[place](), xs=inputs(name))
    np.testing.assert_allclose(found, want, rtol=1e-5)
    for step in range(STEPS):
        tight = name not in LINE_SEARCHES or step < 3
        for one, other in zip(jax.tree.leaves(trained[step]), jax.tree.leaves(params[step]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5 if tight else 1e-4, atol=1e-6 if tight else 1e-5)
    assert want[-1] < want[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("one", {"accumulate_steps": 4}),
        ("two", {"accumulate_steps": 4}),
        ("mesh", {"accumulate_steps": 4}),
        ("two", {"precision": "bfloat16"}),
        ("one", {"run_eagerly": True}),
        ("two", {"precision": "float16"}),
        ("mesh", {"precision": "float16"}),
    ],
    ids=str,
)
def test_a_line_search_works_with_all_ways_to_compute_an_update(place, options):
    want, _ = hand_written_loop("lbfgs")
    parallel = DataParallel(jax.devices()[:2]) if place == "two" else PLACES[place]()
    steps = 4 if "run_eagerly" in options else STEPS  # Each step takes a second or two.
    found, _ = train(optax.lbfgs(), parallel, steps=steps, **options)
    assert found == pytest.approx(want[:steps], rel=2e-1 if "precision" in options else 1e-4)


@pytest.mark.slow
def test_value_fn_uses_the_random_keys_and_collections_of_its_step():
    """With dropout and batch statistics, its value and gradient at the step's parameters equal the loss and gradient of the step."""
    seen = []

    def update(grads, state, params, *, value, grad, value_fn):
        again, slope = jax.value_and_grad(value_fn)(params)
        difference = optax.tree.norm(optax.tree.sub(slope, grad)) / optax.tree.norm(grad)
        return jax.tree.map(lambda leaf: -0.1 * leaf, grads), jnp.stack([value - again, difference])

    probe = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(2), update)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))

    for place in (one_device(), DataParallel(jax.devices()[:4])):
        for options in ({}, {"accumulate_steps": 2}):
            trainer = make(probe, place, Net(), **options)
            for _ in range(3):
                trainer.train_on_batch((X, Y))
                seen.append(np.abs(trainer.state.opt_state))
    assert np.max(seen) < 1e-5


@pytest.mark.slow
def test_lbfgs_converges_on_the_digits():
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    trainer = fitflax.Trainer(nn.Dense(10), parallel=one_device())
    trainer.compile(optax.lbfgs(), "sparse_categorical_crossentropy", ["accuracy"])
    history = trainer.fit(x, y, batch_size=len(x), epochs=40, verbose=0).history
    assert history["accuracy"][-1] > 0.99 and history["loss"][-1] < 0.06


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lbfgs", "plateau"])
def test_resumed_runs_with_these_optimizers_are_bit_for_bit_identical(tmp_path, name):
    def fit(steps: int, directory: str, **options: Any) -> fitflax.Trainer:
        trainer = fitflax.Trainer(MODEL, parallel=one_device())
        trainer.compile(OPTIMIZERS[name][0], "sparse_categorical_crossentropy")
        trainer.fit(X, Y, batch_size=16, steps=steps, verbose=0, callbacks=[ModelCheckpoint(tmp_path / directory)], **options)
        return trainer

    whole = fit(9, "whole")
    fit(5, "parts")
    resumed = fit(9, "parts", resume="auto")
    for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        if not jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(one, other)


def test_value_fn_can_be_linearized_and_transposed():
    """`scale_by_backtracking_linesearch(store_grad=True)` computes the gradient in this way, with a Python number as the cotangent."""
    value_fn = loss_functions(lambda params: jnp.sum(params**3), one_device(), jnp.float32(8))["value_fn"]
    value, linear = jax.linearize(value_fn, X)
    assert value == pytest.approx((X**3).sum(), rel=1e-5)
    np.testing.assert_allclose(jax.linear_transpose(linear, X)(1.0)[0], 3 * X**2, rtol=1e-6)


def test_an_optimizer_gets_only_the_arguments_that_it_accepts():
    got = []

    def update(grads, state, params=None, *, value):
        got.append("value")
        return jax.tree.map(lambda leaf: -0.1 * leaf, grads), state

    trainer = make(optax.GradientTransformationExtraArgs(lambda params: (), update))
    trainer.train_on_batch((X, Y))
    assert got


@pytest.mark.parametrize("inner", [False, True])
def test_an_optimizer_that_requires_an_unknown_argument_is_a_clear_error(inner):
    def update(grads, state, params=None, *, curvature, **extra):
        return grads, state

    odd = optax.GradientTransformationExtraArgs(lambda params: (), update)
    with pytest.raises(OptimizerError, match=r"'curvature'.*A step passes value, grad, value_fn.*override train_step"):
        make(optax.chain(odd, optax.sgd(0.1)) if inner else odd).train_on_batch((X, Y))


FROZEN_MASK = flax.core.freeze({"layers_0": {"kernel": True, "bias": False}, "layers_2": {"kernel": True, "bias": True}})
FAULTS = {
    "mask": (optax.masked(optax.sgd(0.1), FROZEN_MASK), r"initialized: a mask or labels are a FrozenDict.*flax\.core\.unfreeze\(mask\)"),
    "mask function": (optax.adamw(0.1, mask=lambda params: FROZEN_MASK), r"flax\.core\.unfreeze\(mask\)"),
    "labels": (optax.multi_transform({True: optax.sgd(0.1), False: optax.set_to_zero()}, FROZEN_MASK), r"flax\.core\.unfreeze\(mask\)"),
    "missing label": (optax.multi_transform({"a": optax.sgd(0.1)}, {"layers_0": "a"}), r"upper part of it: layers_0/bias, layers_0/kernel, layers_2/bias"),
    "unknown label": (optax.multi_transform({"a": optax.sgd(0.1)}, {"layers_0": "a", "layers_2": "b"}), r"no corresponding transformation.*\['a', 'b'\]"),
    "lookahead": (optax.chain(optax.clip(1.0), optax.lookahead(optax.sgd(0.1), 5, 0.5)), r"failed in its update: .*Keep the slow parameters.*ema_decay"),
    "init": (optax.GradientTransformation(lambda params: params.missing, None), "could not be initialized: AttributeError: 'dict' object has no attribute"),
    "update": (optax.GradientTransformation(lambda params: (), lambda grads, state, params: grads.missing), "failed in its update: AttributeError"),
    "updates": (optax.GradientTransformation(lambda params: (), lambda grads, state, params: ({}, state)), "must return an update for each parameter"),
    "state": (optax.GradientTransformation(lambda params: (), lambda grads, state, params: (grads, (1,))), r"same structure.*\[0\] is new"),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_inside_the_optimizer_is_an_optimizer_error_with_the_remedy(fault):
    optimizer, message = FAULTS[fault]
    with pytest.raises(OptimizerError, match=message):
        make(optimizer).train_on_batch((X, Y))


@pytest.mark.slow
def test_an_optimizer_may_keep_python_numbers_in_its_state():
    counter = optax.GradientTransformation(lambda params: 0, lambda grads, state, params: (jax.tree.map(lambda leaf: -0.1 * leaf, grads), state + 1))
    trainer = make(counter)
    for _ in range(2):
        trainer.train_on_batch((X, Y))
    assert trainer.state.opt_state == 2
    _, params = train(optax.sgd(0.1), steps=2)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.params, params[-1])


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))], ids=["sgd", "chain"])
def test_arguments_that_the_optimizer_does_not_use_are_not_computed(optimizer):
    """A step calls the module once, and its program is the same with an optimizer that accepts any argument as with one that accepts none."""
    calls = []

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            calls.append(x)
            return nn.Dense(3)(x)

    def program(optimizer: Any) -> str:
        trainer = make(optimizer, model=Net())
        task, batch = trainer._session.task.need_compiled("test").task, fitflax.state.Batch(X, Y, np.ones(32, bool))
        calls.clear()
        text = jax.jit(lambda state: task.update(state, batch).state).lower(trainer.state).as_text()
        assert len(calls) == 1
        return text

    takes_all = optax.with_extra_args_support(optimizer)
    takes_none = optax.GradientTransformation(optimizer.init, lambda grads, state, params=None: optimizer.update(grads, state, params))
    assert program(takes_all) == program(takes_none)


# -- parameters for evaluation --

OTHER_PARAMETERS = r"evaluated parameters that \w+ computes from the optimizer state\. The trained parameters are used here instead\."


def schedule_free() -> optax.GradientTransformation:
    return optax.contrib.schedule_free_adamw(1e-2)


def averages_of(state: Any, params: Any) -> Any:
    """Returns the averages of the parameters that a schedule-free state has trained."""
    return params | {name: jax.tree.map(lambda y, z: (y - (1 - state.b1) * z) / state.b1, params[name], z) for name, z in state.z.items() if jax.tree.leaves(z)}


SCHEDULE_FREE: dict[str, Any] = {
    "itself": (schedule_free, lambda opt_state: opt_state),
    "chain": (lambda: optax.chain(optax.clip(1.0), schedule_free()), lambda opt_state: opt_state[1]),
    "every second step": (lambda: optax.MultiSteps(schedule_free(), 2), lambda opt_state: opt_state.inner_opt_state),
    "frozen": (lambda: fitflax.optimizers.freeze(schedule_free(), "layers_0"), lambda opt_state: opt_state.inner_states["trained"].inner_state),
}


@pytest.mark.parametrize("name", SCHEDULE_FREE)
@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.mostly_slow
def test_schedule_free_optimizers_are_evaluated_at_their_averages(name, place, tmp_path):
    make_optimizer, state_of = SCHEDULE_FREE[name]
    trainer = make(make_optimizer(), PLACES[place]())
    best = BestCheckpoint(tmp_path / "best", monitor="val_loss")
    history = trainer.fit(X, Y, batch_size=16, epochs=3, validation_data=(X, Y), verbose=0, callbacks=[best]).history
    outputs = MODEL.apply({"params": averages_of(state_of(trainer.state.opt_state), trainer.state.params)}, X)
    loss = float(optax.softmax_cross_entropy_with_integer_labels(outputs, Y).mean())
    assert history["val_loss"][-1] == pytest.approx(loss, abs=1e-5)
    assert trainer.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(loss, abs=1e-5)
    np.testing.assert_allclose(trainer.predict(X), outputs, atol=1e-4)
    assert not np.allclose(MODEL.apply({"params": trainer.state.params}, X), outputs, atol=1e-5)
    exported = jax.export.deserialize(bytearray(trainer.export(tmp_path / "net.jaxexport").read_bytes()))
    np.testing.assert_allclose(exported.call(X), outputs, atol=1e-4)
    trainer.load_weights(trainer.save_weights(tmp_path / "weights.safetensors"))
    np.testing.assert_allclose(trainer.predict(X), outputs, atol=1e-4)
    trainer.restore(tmp_path / "best")
    assert trainer.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(min(history["val_loss"]), abs=1e-5)


@pytest.mark.slow
def test_members_of_an_ensemble_are_evaluated_at_their_own_averages():
    ensemble = fitflax.Trainer(MODEL, ensemble=2, parallel=one_device())
    ensemble.compile(schedule_free(), "sparse_categorical_crossentropy")
    ensemble.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    for member in range(2):
        np.testing.assert_allclose(ensemble.predict(X)[:, member], ensemble.select(member).predict(X), atol=1e-5)


@pytest.mark.slow
def test_schedule_free_optimizers_can_be_evaluated_otherwise(tmp_path):
    trainer = make(optax.chain(schedule_free()), eval_params=lambda opt_state, params: params)
    trainer.fit(X, Y, verbose=0, epochs=3)
    np.testing.assert_allclose(trainer.predict(X), MODEL.apply({"params": trainer.state.params}, X), atol=1e-5)
    averaged = make(schedule_free(), ema_decay=0.5)
    averaged.fit(X, Y, verbose=0)
    np.testing.assert_allclose(averaged.predict(X), MODEL.apply({"params": averaged.state.ema_params}, X), atol=1e-5)
    with pytest.raises(OptimizerError, match=r"Leave eval_params out: schedule-free optimizers are found in the state"):
        make(optax.chain(schedule_free()), eval_params=optax.contrib.schedule_free_eval_params).evaluate(X, Y, verbose=0)
    make(optax.chain(schedule_free())).fit(X, Y, verbose=0, callbacks=[ModelCheckpoint(tmp_path)])
    with pytest.warns(FitflaxWarning, match=OTHER_PARAMETERS):
        load_inference_state(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("place", list(PLACES))
def test_evaluation_uses_the_parameters_that_eval_params_computes(place, tmp_path):
    tx = schedule_free()
    trainer = make(tx, PLACES[place](), metrics=["accuracy"], eval_params=optax.contrib.schedule_free_eval_params)
    history = trainer.fit(X, Y, batch_size=16, epochs=3, validation_data=(X, Y), verbose=0, callbacks=[ModelCheckpoint(tmp_path / "run")]).history
    evaluated = optax.contrib.schedule_free_eval_params(trainer.state.opt_state, trainer.state.params)
    outputs = MODEL.apply({"params": evaluated}, X)
    loss = optax.softmax_cross_entropy_with_integer_labels(outputs, Y).mean()
    assert history["val_loss"][-1] == pytest.approx(float(loss), abs=1e-5)
    assert trainer.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(float(loss), abs=1e-5)
    np.testing.assert_allclose(trainer.predict(X), outputs, atol=1e-4)
    np.testing.assert_allclose(trainer.predict_on_batch(X), outputs, atol=1e-4)
    served = trainer.inference_state()
    trainer.train_on_batch((X, Y))
    for one, other in zip(jax.tree.leaves(served.params), jax.tree.leaves(evaluated), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    other = fitflax.Trainer(MODEL, parallel=PLACES[place]())
    other.compile(tx, "sparse_categorical_crossentropy", eval_params=optax.contrib.schedule_free_eval_params)
    other.replace_state(served)
    np.testing.assert_allclose(other.predict(X), outputs, atol=1e-4)
    with pytest.warns(FitflaxWarning, match=OTHER_PARAMETERS):
        load_inference_state(tmp_path / "run")


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["frozen", "itself"])
def test_using_the_trained_parameters_of_a_run_that_evaluated_their_averages_causes_a_warning(name, tmp_path):
    optimizer = SCHEDULE_FREE[name][0]()
    trainer, server = make(optimizer), fitflax.Trainer(MODEL, parallel=one_device())
    trainer.fit(X, Y, verbose=0, callbacks=[ModelCheckpoint(tmp_path / "run")])
    averaged = trainer.predict_on_batch(X)
    uses = [
        *(functools.partial(load_inference_state, path) for path in (tmp_path / "run", trainer.save(tmp_path / "saved"))),
        *(functools.partial(trainer.restore, tmp_path / "saved", **{only: True}) for only in ("weights_only", "partial")),
        *(functools.partial(use, X) for use in (server.predict, server.predict_on_batch, server.predict_iter)),
        server.inference_state,
        functools.partial(server.export, tmp_path / "net.jaxexport"),
        functools.partial(server.save_weights, tmp_path / "net.safetensors"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server.restore(tmp_path / "run")  # `compile` may follow.
        server.save(tmp_path / "again")  # With the optimizer state.
    for use in uses:
        with pytest.warns(FitflaxWarning, match=OTHER_PARAMETERS):
            use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server.compile(optimizer, "sparse_categorical_crossentropy")
        trainer.restore(tmp_path / "again")
    for each in (server, trainer):
        np.testing.assert_array_equal(each.predict_on_batch(X), averaged)


def test_using_the_trained_parameters_of_a_run_with_eval_params_causes_a_warning(tmp_path):
    optimizer = optax.sgd(0.1)
    path = make(optimizer, eval_params=functools.partial(lambda _, params: params)).save(tmp_path / "saved")
    compiled, server = make(optimizer), fitflax.Trainer(MODEL, parallel=one_device())
    server.restore(path)
    again = server.save(tmp_path / "again")  # Before `compile`.
    for use in (
        lambda: load_inference_state(path),
        lambda: load_inference_state(again),
        lambda: server.predict_on_batch(X),
        lambda: server.compile(optimizer, "sparse_categorical_crossentropy"),  # Without `eval_params`.
        lambda: compiled.restore(path),
        lambda: compiled.restore(path, weights_only=True),
    ):
        with pytest.warns(FitflaxWarning, match=OTHER_PARAMETERS.replace(r"\w+", "partial")):
            use()


def test_eval_params_is_used_with_an_optimizer_whose_state_has_no_arrays():
    trainer = make(optax.sgd(0.1), eval_params=lambda _, params: jax.tree.map(jnp.sign, params))
    signs = jax.tree.map(jnp.sign, trainer.state.params)
    np.testing.assert_allclose(trainer.predict(X), MODEL.apply({"params": signs}, X), atol=1e-5)
    other = make(optax.sgd(0.1), eval_params=lambda _, params: jax.tree.map(jnp.negative, params))
    other.replace_state(trainer.inference_state())  # It has the parameters that are evaluated.
    np.testing.assert_allclose(other.predict(X), trainer.predict(X), atol=1e-5)


@pytest.mark.slow
def test_a_second_evaluation_does_not_compile_eval_params_again(compilations):
    trainer = make(schedule_free(), eval_params=optax.contrib.schedule_free_eval_params)
    trainer.train_on_batch((X, Y))
    trainer.evaluate(X, Y, verbose=0)
    with compilations.counted() as again:
        trainer.train_on_batch((X, Y))
        trainer.evaluate(X, Y, verbose=0)
    assert again.count == 0


def test_invalid_eval_params_are_clear_errors():
    with pytest.raises(ConfigError, match=r"takes a function \(opt_state, params\)"):
        make("sgd", eval_params="ema")
    with pytest.raises(ConfigError, match="both define the parameters for evaluation"):
        make("sgd", eval_params=optax.contrib.schedule_free_eval_params, ema_decay=0.9)
    with pytest.raises(OptimizerError, match=r"schedule_free_eval_params.*failed on the state of this optimizer"):
        make("sgd", eval_params=optax.contrib.schedule_free_eval_params).evaluate(X, Y, verbose=0)
    with pytest.raises(OptimizerError, match=r"must return parameters like the trained ones. Differences: .*is missing"):
        make("sgd", eval_params=lambda state, params: {"layers_0": params["layers_0"]}).evaluate(X, Y, verbose=0)
    with pytest.raises(ConfigError, match=r"EarlyStopping\(restore_best=True\)"):
        make(schedule_free(), eval_params=optax.contrib.schedule_free_eval_params).fit(X, Y, callbacks=[EarlyStopping("loss", restore_best=True)], verbose=0)


def labeled_schedule_free(*, masked: bool) -> optax.GradientTransformation:
    """Returns an optimizer that trains one layer without a schedule, and that can be initialized only with the parameters of the model."""
    labels = jax.tree.map_with_path(lambda path, _: "free" if path[0].key == "layers_0" else "sgd", first_params())
    if masked:
        return optax.masked(schedule_free(), jax.tree.map(lambda label: label == "free", labels))
    return optax.multi_transform({"free": schedule_free(), "sgd": optax.sgd(0.1)}, labels)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_schedule_free_optimizer_behind_labels_of_parameters_rejects_restore_best_before_the_first_step(masked):
    trainer = fitflax.Trainer(MODEL, parallel=one_device())
    trainer.compile(labeled_schedule_free(masked=masked), "sparse_categorical_crossentropy", run_eagerly=not masked)
    with pytest.raises(ConfigError, match=r"EarlyStopping\(restore_best=True\) cannot be combined with a schedule-free optimizer"):
        trainer.fit(X, Y, callbacks=[EarlyStopping("loss", restore_best=True)], verbose=0)
    assert trainer.state.step == 0


@pytest.mark.slow
def test_averages_of_a_labeled_schedule_free_optimizer_can_be_restored():
    trainer = make(labeled_schedule_free(masked=True), ema_decay=0.5)
    trainer.fit(X, Y, callbacks=[EarlyStopping("loss", restore_best=True)], verbose=0)


@pytest.mark.slow
def test_eval_params_gets_the_state_of_the_optimizer_itself_with_loss_scaling():
    trainer = make(schedule_free(), precision="float16", eval_params=optax.contrib.schedule_free_eval_params)
    trainer.train_on_batch((X, Y))
    assert np.isfinite(trainer.evaluate(X, Y, verbose=0)["loss"])
    assert dataclasses.is_dataclass(trainer.inference_state())
