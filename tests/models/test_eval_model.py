"""`Trainer(eval_model=...)`: models with different configurations for training and evaluation, as in Flax's language modeling and translation examples."""

import dataclasses
import pathlib
import re
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import ModelCheckpoint
from fitflax.errors import ConfigError, FitflaxWarning, ModelError
from fitflax.parallel import DataParallel, Sharded
from tests.models.configs import Config

VOCABULARY, LENGTH = 11, 6


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        config = self.config
        y = nn.MultiHeadDotProductAttention(
            config.heads,
            dropout_rate=config.dropout_rate,
            deterministic=config.deterministic,
            decode=config.decode,
            kernel_init=nn.with_logical_partitioning(config.kernel_init, config.attention_axes),
        )(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dropout(config.dropout_rate)(y, deterministic=config.deterministic)
        y = nn.Dense(2 * config.width, kernel_init=nn.with_logical_partitioning(config.kernel_init, config.axes))(nn.LayerNorm()(x))
        y = nn.Dense(config.width, kernel_init=nn.with_logical_partitioning(config.kernel_init, config.axes[::-1]))(nn.relu(y))
        return x + nn.Dropout(config.dropout_rate)(y, deterministic=config.deterministic)


class Language(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        config = self.config
        embedding = nn.Embed(
            VOCABULARY, config.width, embedding_init=nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed")), name="embed"
        )
        x = embedding(tokens)
        x = nn.Dropout(config.dropout_rate)(x, deterministic=config.deterministic)
        x = Block(config, name="block")(x, None if config.decode else nn.make_causal_mask(tokens))
        x = nn.LayerNorm(name="last")(x)
        return embedding.attend(x) / np.sqrt(config.width) if config.tied else nn.Dense(VOCABULARY, name="logits")(x)


TRAIN = Config()
EVAL = TRAIN.replace(deterministic=True)  # type: ignore[attr-defined]
DECODE = EVAL.replace(decode=True)

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCABULARY, (40, LENGTH))
TARGETS = np.roll(TOKENS, -1, axis=1)


def trainer_of(model: Any = None, eval_model: Any = None, *, num_devices: int = 1, seed: int = 0, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(
        model or Language(TRAIN),
        eval_model=eval_model or Language(EVAL),
        seed=seed,
        parallel=options.pop("parallel", DataParallel(jax.devices()[:num_devices])),
        **{name: options.pop(name) for name in ("rngs", "mutable", "eval_kwargs", "train_kwargs") if name in options},
    )
    trainer.compile(**{"optimizer": optax.adam(1e-2), "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **options})
    return trainer


def mean_loss(model: nn.Module, params: Any, tokens: Any = TOKENS, targets: Any = TARGETS, **rngs: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": params}, tokens, **rngs), targets).mean()


# -- what is computed --


def test_training_and_evaluation_equal_a_hand_written_loop_step_by_step():
    # Not Adam: the bias of the keys cancels out, so its gradient is only rounding error, which Adam would turn into full-size steps.
    optimizer = optax.sgd(0.5, momentum=0.9)
    trainer = trainer_of(optimizer=optimizer)
    trainer.build((TOKENS, TARGETS))
    state = trainer.state
    params, opt_state = state.params, optimizer.init(state.params)
    gradient = jax.jit(jax.value_and_grad(lambda params, *batch, rngs: mean_loss(Language(TRAIN), params, *batch, rngs=rngs)))
    update = jax.jit(lambda *args: optimizer.update(*args))
    apply, loss_of = jax.jit(Language(EVAL).apply), jax.jit(lambda params: mean_loss(Language(EVAL), params))
    for step in range(4):
        rngs = trainer.step_rngs(dataclasses.replace(state, step=jnp.int32(step)))
        rows = slice(10 * step, 10 * step + 10)
        loss, grads = gradient(params, TOKENS[rows], TARGETS[rows], rngs=rngs)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        logs = trainer.train_on_batch((TOKENS[rows], TARGETS[rows]))
        assert logs["loss"] == pytest.approx(float(loss), rel=1e-5)
        jax.tree.map(lambda have, want: np.testing.assert_allclose(have, want, rtol=2e-4, atol=2e-5), trainer.state.params, params)
        assert trainer.evaluate(TOKENS, TARGETS, verbose=0)["loss"] == pytest.approx(float(loss_of(trainer.state.params)), rel=1e-5)
        expected = apply({"params": trainer.state.params}, TOKENS)
        np.testing.assert_allclose(trainer.predict(TOKENS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_way_to_evaluate_applies_the_eval_model():
    trainer = trainer_of()
    trainer.fit(TOKENS, TARGETS, validation_data=(TOKENS, TARGETS), batch_size=20, verbose=0)
    params = trainer.state.params
    want = pytest.approx(float(mean_loss(Language(EVAL), params)), rel=1e-5)
    expected = np.asarray(Language(EVAL).apply({"params": params}, TOKENS))
    assert trainer.history.history["val_loss"] == [want]
    assert trainer.evaluate(TOKENS, TARGETS, verbose=0)["loss"] == want
    assert trainer.test_on_batch((TOKENS, TARGETS))["loss"] == want
    evaluate = trainer.eval_loop(TOKENS, TARGETS, name="valid")
    (checkpoint,) = trainer.train_loop(TOKENS, TARGETS, steps=1)
    assert evaluate(checkpoint).metrics["valid"]["loss"] == pytest.approx(float(mean_loss(Language(EVAL), checkpoint.state.params)), rel=1e-5)
    trainer = trainer.with_seed(0)
    assert trainer.eval_model == Language(EVAL) and trainer.model == Language(TRAIN)
    trainer.build((TOKENS, TARGETS))
    trainer.replace_state(dataclasses.replace(trainer.state, params=params))
    np.testing.assert_allclose(trainer.predict_on_batch(TOKENS), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(list(trainer.predict_iter(TOKENS, batch_size=8))), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mutable", [["cache"], flax.core.DenyList("params")], ids=["named", "default"])
def test_a_cache_that_only_evaluation_creates_is_allowed_and_not_kept(mutable: Any):
    trainer = trainer_of(eval_model=Language(DECODE), mutable=mutable)
    trainer.fit(TOKENS, TARGETS, verbose=0)
    assert trainer.state.model_state == {}
    expected, changed = Language(DECODE).apply({"params": trainer.state.params}, TOKENS, mutable=["cache"])
    assert set(changed) == {"cache"}
    np.testing.assert_allclose(trainer.predict(TOKENS), expected, rtol=1e-4, atol=1e-5)
    trainer.evaluate(TOKENS, TARGETS, verbose=0)
    assert trainer.state.model_state == {}


class Normalized(nn.Module):
    """Its axis name is bound only inside steps. A field sets its mode; in `ByKeyword`, a keyword does."""

    config: Any
    width: int = 4

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(use_running_average=not self.config["train"], axis_name="replica")(nn.Dense(self.width)(x))
        return nn.Dense(1)(x)


class ByKeyword(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return nn.Dense(1, name="Dense_1")(nn.BatchNorm(use_running_average=not train, name="BatchNorm_0")(nn.Dense(4, name="Dense_0")(x)))


class Headless(nn.Module):
    """Lacks the model's collection."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(4, name="Dense_0")(x)
        self.param("unused", nn.initializers.zeros, ())
        return nn.Dense(1, name="Dense_1")(x)


X = RNG.normal(size=(48, 3)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("eval_model", [Normalized({"train": False}), ByKeyword()], ids=["by field", "by keyword"])
def test_a_module_with_axis_name_and_collections_is_checked_and_evaluated_on_8_devices(eval_model: nn.Module):
    trainer = trainer_of(Normalized({"train": True}), eval_model, num_devices=8, loss="mse", metrics=None)
    trainer.fit(X, X[:, :1], batch_size=16, verbose=0)
    expected = ByKeyword().apply({"params": trainer.state.params, **trainer.state.model_state}, X, train=False)
    np.testing.assert_allclose(trainer.predict(X), expected, rtol=1e-5, atol=1e-6)
    assert trainer.evaluate(X, X[:, :1], verbose=0)["loss"] == pytest.approx(float(((expected - X[:, :1]) ** 2).mean()), rel=1e-5)


@pytest.mark.slow
def test_a_sharded_model_is_evaluated_with_its_eval_model():
    parallel = Sharded(mesh={"data": 4, "model": 2}, rules={"embed": None, "heads": None, "kv": None, "mlp": "model", "vocab": None})
    train = TRAIN.replace(attention_axes=("embed", "heads", "kv"))  # type: ignore[attr-defined]
    trainer = trainer_of(Language(train), Language(train.replace(deterministic=True)), parallel=parallel)
    trainer.fit(TOKENS, TARGETS, batch_size=8, verbose=0)
    params = jax.device_get(trainer.state.params)
    assert trainer.evaluate(TOKENS, TARGETS, verbose=0)["loss"] == pytest.approx(float(mean_loss(Language(EVAL), params)), rel=1e-5)


def test_the_mode_keyword_is_found_separately_in_each_module():
    class KeywordMode(nn.Module):
        @nn.compact
        def __call__(self, x: Any, training: bool, scale: int = 1) -> Any:
            assert training
            return scale * nn.Dense(1)(x)

    class FieldMode(nn.Module):
        deterministic: bool | None = None

        @nn.compact
        def __call__(self, x: Any, factor: int = 1) -> Any:
            assert self.deterministic
            return factor * nn.Dense(1)(x)

    trainer = trainer_of(KeywordMode(), FieldMode(), loss="mse", metrics=None, train_kwargs={"scale": 2}, eval_kwargs={"factor": 3})
    trainer.fit(X, X[:, :1], verbose=0)
    np.testing.assert_allclose(trainer.predict(X), 3 * nn.Dense(1).apply({"params": trainer.state.params["Dense_0"]}, X), rtol=1e-5)


@pytest.mark.slow
def test_resuming_with_an_eval_model_is_bit_for_bit_identical_to_an_uninterrupted_run(tmp_path: pathlib.Path):
    options: dict[str, Any] = {"batch_size": 8, "validation_data": (TOKENS, TARGETS), "verbose": 0}
    whole = trainer_of()
    whole.fit(TOKENS, TARGETS, epochs=3, **options)
    trainer_of().fit(TOKENS, TARGETS, steps=7, callbacks=[ModelCheckpoint(tmp_path, every=fitflax.every(steps=7))], **options)
    resumed = trainer_of()
    resumed.fit(TOKENS, TARGETS, epochs=3, callbacks=[ModelCheckpoint(tmp_path)], resume=True, **options)
    assert resumed.step == whole.step
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, whole.state.params)
    assert resumed.history.history == whole.history.history
    assert resumed.evaluate(TOKENS, TARGETS, verbose=0) == whole.evaluate(TOKENS, TARGETS, verbose=0)
    served = trainer_of()
    served.restore(tmp_path)
    np.testing.assert_array_equal(served.predict(TOKENS), whole.predict(TOKENS))


@pytest.mark.slow
def test_the_exported_model_is_the_eval_model(tmp_path: pathlib.Path):
    pytest.importorskip("flatbuffers")
    trainer = trainer_of()
    trainer.build((TOKENS, TARGETS))
    exported = jax.export.deserialize((trainer.export(tmp_path / "model", sample=TOKENS)).read_bytes())
    np.testing.assert_allclose(exported.call(TOKENS), Language(EVAL).apply({"params": trainer.state.params}, TOKENS), rtol=1e-4, atol=1e-5)
    wrong = trainer_of(eval_model=Language(EVAL.replace(width=4)))
    wrong.build((TOKENS, TARGETS))
    with pytest.raises(ModelError, match="must have the parameters of the model"):
        wrong.export(tmp_path / "wrong", sample=TOKENS)


@pytest.mark.slow
def test_without_jit_the_eval_model_is_used_too_and_nothing_is_traced():
    traced = []

    class Seen(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            traced.append(isinstance(x, jax.core.Tracer))
            return nn.Dense(2, name="Dense_0")(x)

    trainer = trainer_of(nn.Sequential([nn.Dense(2)]), nn.Sequential([nn.Dense(2), jnp.tanh]), loss="mse", metrics=None, run_eagerly=True)
    trainer.fit(X, X[:, :2], verbose=0)
    kernel, bias = (np.asarray(trainer.state.params["layers_0"][name]) for name in ("kernel", "bias"))
    np.testing.assert_allclose(trainer.predict(X), np.tanh(X @ kernel + bias), rtol=1e-5, atol=1e-6)
    trainer = trainer_of(nn.Dense(2), Seen(), loss="mse", metrics=None, run_eagerly=True)
    with pytest.raises(ModelError, match="The eval_model Seen must have the parameters of the model Dense"):
        trainer.fit(X, X[:, :2], validation_split=0.5, verbose=0)
    assert traced and not any(traced)


# -- a module that does not fit --


def test_parameters_that_differ_are_named_before_the_first_step():
    trainer = trainer_of(Language(TRAIN), Language(EVAL.replace(tied=False, width=4)))
    with pytest.raises(ModelError) as caught:
        trainer.fit(TOKENS, TARGETS, verbose=0)
    text = str(caught.value)
    assert text.startswith("The eval_model Language must have the parameters of the model Language, which it uses in evaluation (")
    assert "unexpected: params/logits/bias, params/logits/kernel; wrong shape: " in text
    assert text.count(", not (") == 5 and ", and 14 more). Create it from the model" in text and "missing" not in text
    assert trainer.step == 0
    missing = trainer_of(Language(TRAIN.replace(tied=False)), Language(EVAL))  # type: ignore[attr-defined]
    missing.build((TOKENS, TARGETS))
    for call in (lambda: missing.evaluate(TOKENS, TARGETS, verbose=0), lambda: missing.predict(TOKENS), lambda: missing.predict_on_batch(TOKENS)):
        with pytest.raises(ModelError, match=r"\(missing: params/logits/bias, params/logits/kernel\)\. Create it from the model"):
            call()


def test_an_eval_model_may_lack_collections_but_not_parameters():
    with pytest.raises(ModelError, match=r"missing: params/BatchNorm_0/bias, params/BatchNorm_0/scale; unexpected: params/unused\)\. "):
        trainer_of(ByKeyword(), Headless(), loss="mse", metrics=None).fit(X, X[:, :1], verbose=0)


class Head(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1, name="head")(x)


class Negated(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return -nn.Dense(1, name="head")(x)


class WithBody(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1, name="head")(nn.Dense(3, name="body")(x))


def functions_of(module: nn.Module) -> Any:
    return module.init, module.apply


@pytest.mark.mostly_slow
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["jit", "no jit"])
@pytest.mark.parametrize("kind", [functions_of, lambda module: module], ids=["functions", "modules"])
def test_parameters_are_compared_for_functions_and_without_jit(kind: Any, run_eagerly: bool):
    options: dict[str, Any] = {"loss": "mse", "metrics": None, "run_eagerly": run_eagerly}
    trainer = trainer_of(kind(WithBody()), kind(Head()), **options)  # Flax ignores parameters that it does not need.
    message = r"The eval_model Head must have the parameters of the model WithBody, .* \(missing: params/body/bias, params/body/kernel\)\. Create it"
    with pytest.raises(ModelError, match=message):
        trainer.fit(X, X[:, :1], verbose=0)
    assert trainer.step == 0
    trainer = trainer_of(kind(Head()), kind(Negated()), **options)
    trainer.fit(X, X[:, :1], validation_split=0.5, verbose=0)
    np.testing.assert_allclose(trainer.predict(X), -Head().apply({"params": trainer.state.params}, X), rtol=1e-5)


def test_an_eval_model_that_cannot_be_initialized_is_an_error_when_it_is_used():
    class Broken(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            if self.is_initializing():
                raise NotImplementedError("load a checkpoint")
            return -nn.Dense(1, name="head")(x)

    trainer = trainer_of(Head(), Broken(), loss="mse", metrics=None)
    trainer.fit(X, X[:, :1], verbose=0)
    with pytest.raises(ModelError, match=r"The eval_model Broken cannot be initialized on inputs float32\[\d+,3\] .*: NotImplementedError: load a checkpoint"):
        trainer.evaluate(X, X[:, :1], verbose=0)


@pytest.mark.slow
def test_an_eval_model_may_take_other_inputs_than_the_model():
    class Guided(nn.Module):
        @nn.compact
        def __call__(self, x: Any, guide: Any) -> Any:
            return nn.Dense(1, name="head")(x) + guide

    for eval_model in (Head(), WithBody()):
        trainer = trainer_of(Guided(), eval_model, loss="mse", metrics=None)
        trainer.fit((X, X[:, 1:2]), X[:, :1], verbose=0)
        if isinstance(eval_model, Head):
            np.testing.assert_allclose(trainer.predict(X), Head().apply({"params": trainer.state.params}, X), rtol=1e-5)
        else:
            with pytest.raises(ModelError, match="unexpected: params/body/bias, params/body/kernel"):
                trainer.predict(X)


class Decoder(nn.Module):
    """Cannot be called on the inputs of a batch, but by another method."""

    def setup(self):
        self.dense = nn.Dense(2)

    def __call__(self, x: Any) -> Any:
        return self.dense(x["inputs"])

    def decode(self, x: Any) -> Any:
        return self.dense(x)


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["jit", "no jit"])
def test_a_custom_loss_may_call_the_eval_model_by_a_method_that_accepts_the_inputs(run_eagerly: bool, monkeypatch: pytest.MonkeyPatch):
    class Custom(fitflax.Trainer):
        def compute_loss(self, params: Any, model_state: Any, batch: Any, *, rngs: Any, train: bool) -> Any:
            module = self.model if train else self.eval_model
            outputs = module.apply({"params": params, **model_state}, batch.x, method=None if train else "decode")
            return jnp.square(outputs).mean(axis=1), {}, {"outputs": outputs}

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2, name="dense")(x)

    trainer = Custom(Encoder(), eval_model=Decoder(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", run_eagerly=run_eagerly)
    x = np.ones((4, 3), np.float32)
    inits = []
    monkeypatch.setattr(Decoder, "init", lambda self, *args, **kwargs: inits.append(1) or nn.Module.init(self, *args, **kwargs))
    losses = [trainer.train_on_batch((x,))["loss"] for _ in range(3)]
    assert trainer.evaluate(x, verbose=0)["loss"] < losses[-1]
    assert len(inits) == 1
    with pytest.raises(ModelError, match="The eval_model Decoder cannot be initialized"):
        trainer.predict(x)


@pytest.mark.slow
def test_without_jit_a_model_is_exported_before_any_other_call(tmp_path: pathlib.Path):
    trainer = fitflax.Trainer(nn.Dense(2), eval_model=nn.Dense(2), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse", run_eagerly=True)
    trainer.build((np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)))
    assert trainer.export(tmp_path / "model").exists()


@pytest.mark.slow
def test_checking_the_eval_model_traces_it_once(monkeypatch: pytest.MonkeyPatch):
    calls = []
    init = nn.Module.init

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.config.deterministic)
        return init(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "init", counted)
    trainer = trainer_of()
    for _ in range(2):
        trainer.fit(TOKENS, TARGETS, validation_data=(TOKENS, TARGETS), batch_size=16, verbose=0)
        trainer.evaluate(TOKENS, TARGETS, batch_size=8, verbose=0)
        trainer.predict(TOKENS)
    assert calls.count(True) == 1


def test_an_eval_model_that_is_not_a_module_is_an_error():
    with pytest.raises(ConfigError, match=r"Trainer\(eval_model=\.\.\.\) takes an instance of a module\. .* Call it: Trainer\(eval_model=Language\(\.\.\.\)\)"):
        fitflax.Trainer(Language(TRAIN), eval_model=Language)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Trainer\(eval_model=\.\.\.\) takes a flax\.linen module, .* Received: a builtins\.dict"):
        fitflax.Trainer(Language(TRAIN), eval_model={})  # type: ignore[arg-type]


# -- dropout that is on in evaluation --


def eval_error(model: nn.Module, x: Any = TOKENS, **options: Any) -> str:
    trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:1]), **options)
    trainer.compile("sgd", "mse")
    trainer.build((x, x))
    with pytest.raises(ModelError) as caught:
        trainer.predict(x)
    return str(caught.value)


def test_the_error_says_which_eval_model_to_pass_and_that_model_works():
    text = eval_error(Language(TRAIN))
    assert "Dropout is on in evaluation, because the model is configured that way." in text and "rngs" not in text
    found = re.search(r"Trainer\(model, (eval_model=.*)\)\.$", text)
    assert found is not None and found[1] == "eval_model=model.clone(config=dataclasses.replace(model.config, deterministic=True))"
    assert eval(found[1].removeprefix("eval_model="), {"model": Language(TRAIN), "dataclasses": dataclasses}) == Language(EVAL)
    text = eval_error(Language(TRAIN), eval_model=Language(TRAIN))
    assert "Dropout is on in evaluation, because the eval_model is configured that way." in text
    assert "eval_model=eval_model.clone(config=dataclasses.replace(eval_model.config, deterministic=True))" in text


def test_the_error_for_dropout_that_nothing_turns_off_suggests_solutions():
    class Stubborn(nn.Module):
        stream: str = "dropout"

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dropout(0.5, deterministic=False, rng_collection=self.stream)(nn.Dense(2)(x))

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + jax.random.normal(self.make_rng("noise"), x.shape)

    for text in (eval_error(Stubborn(), X), eval_error(Stubborn("masks"), X, rngs=("masks",))):
        assert "Dropout is on in evaluation. Add an argument `train` or `deterministic` to __call__" in text
        assert "Trainer(eval_kwargs={...})" in text and "Trainer(model, eval_model=model.clone(...))" in text
        assert "'eval': ..." not in text
    assert "Trainer(rngs={'init': ..., 'train': ..., 'eval': ...})" in eval_error(Noisy(), X, rngs=("noise",))


def test_the_error_for_dropout_names_the_mode_argument_that_exists():
    class Unused(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(2)(x))

    text = eval_error(Unused(), X)
    assert "although the trainer passes train=False. Use that argument: nn.Dropout(rate, deterministic=not train)." in text
    assert "eval_kwargs=" in text and "'eval': ..." not in text


@pytest.mark.slow
def test_the_error_for_dropout_in_a_custom_loss_passes_the_mode_instead_of_a_random_stream():
    class Custom(fitflax.Trainer):
        def compute_loss(self, params: Any, model_state: Any, batch: Any, *, rngs: Any, train: bool) -> Any:
            outputs = self.model.apply({"params": params}, batch.x, rngs=rngs)
            return ((outputs - batch.x) ** 2).mean(-1), model_state, {}

    trainer = Custom(nn.Sequential([nn.Dense(X.shape[1]), nn.Dropout(0.5, deterministic=False)]), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd")
    trainer.train_on_batch(X)
    with pytest.raises(ModelError, match=r"Dropout is on in evaluation\. Pass the mode to the module, .*train=train") as caught:
        trainer.evaluate(X, verbose=0)
    assert "'eval': ..." not in str(caught.value)


def test_a_model_that_is_a_function_gets_a_hint_for_functions():
    x = X[:8]
    model = nn.Dropout(0.5, deterministic=False)
    loop = fitflax.TrainLoop(model.init, model.apply, optimizer="sgd", loss="mse", data=(x, x), steps=1, rngs=("dropout",))
    evaluate = fitflax.EvalLoop(model.apply, metrics=["mae"], data=(x, x))
    with pytest.raises(ModelError, match=r"Dropout is on in evaluation\. Pass a function that turns it off: functools\.partial"):
        evaluate(next(loop))


# -- a mode that was not set, but causes no error --


@pytest.mark.slow
def test_evaluation_with_a_training_configuration_warns_once():
    trainer = fitflax.Trainer(Normalized({"train": True}), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    trainer.fit(X, X[:, :1], verbose=0)
    with pytest.warns(FitflaxWarning, match=r"Normalized is configured for training, but.*eval_model=model\.clone\(config=\{\*\*model\.config, 'train'"):
        trainer.evaluate(X, X[:, :1], verbose=0)
    trainer.predict(X)  # Does not warn again.


class Merged(nn.Module):
    """Its field is a default, as in linen's own modules."""

    deterministic: bool = False
    inner: Any = None

    @nn.compact
    def __call__(self, x: Any, deterministic: bool | None = None) -> Any:
        return nn.Dropout(0.5, deterministic=self.deterministic if deterministic is None else deterministic)(nn.Dense(1)(x))


class WithField(nn.Module):
    config: Any
    train: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(x)


class Plain(nn.Module):
    """Dropout that is on in evaluation would be an error; this module has none, so its field has no effect."""

    config: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(x)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "model", [Merged(), Merged(inner=Config()), WithField(Config()), Plain(Config())], ids=["keyword", "keyword and configuration", "field", "no dropout"]
)
def test_a_module_that_receives_its_mode_or_needs_none_gives_no_warning(model: nn.Module):
    trainer = fitflax.Trainer(model, parallel=DataParallel(jax.devices()[:1]))
    trainer.compile("sgd", "mse")
    trainer.fit(X, X[:, :1], validation_split=0.5, verbose=0)
    trainer.predict(X)


@pytest.mark.slow
def test_passing_the_training_model_as_eval_model_gives_no_warning():
    model = Normalized({"train": True})
    trainer = trainer_of(model, model, loss="mse", metrics=None)
    trainer.fit(X, X[:, :1], verbose=0)
    trainer.evaluate(X, X[:, :1], verbose=0)
