"""Unmodified Flax modules from transformers: their `ModelOutput`, and a hand-written loop, step by step. Parameters are random; nothing is downloaded."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fitflax
from fitflax.parallel import DataParallel

pytest.importorskip("transformers", reason="make peers installs it")
bert = pytest.importorskip("transformers.models.bert.modeling_flax_bert", reason="versions before 5 have modules of linen")
gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_flax_gpt2", reason="versions before 5 have modules of linen")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH, ROWS = 31, 7, 40
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
MASK = (np.arange(LENGTH) < RNG.integers(3, LENGTH + 1, (ROWS, 1))).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)).copy()
LABELS = RNG.integers(0, 3, ROWS).astype(np.int32)
NEXT = np.roll(TOKENS, -1, axis=1)


@dataclasses.dataclass(frozen=True)
class Case:
    module: Any
    inputs: dict[str, Any]
    targets: Any
    kwargs: dict[str, Any]


def case_of(name: str) -> Case:
    inputs = {"input_ids": TOKENS, "attention_mask": MASK, "position_ids": POSITIONS}
    if name == "bert":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 16}
        config = transformers.BertConfig(vocab_size=VOCABULARY, num_labels=3, **sizes)
        inputs["token_type_ids"] = np.zeros_like(TOKENS)
        return Case(bert.FlaxBertForSequenceClassificationModule(config), inputs, LABELS, {"head_mask": None})
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return Case(gpt2.FlaxGPT2LMHeadModule(config), inputs, NEXT, {})


def trainer_of(case: Case, *, num_devices: int = 1, eval_kwargs: dict[str, Any] | None = None, **options: Any) -> fitflax.Trainer:
    trainer = fitflax.Trainer(
        case.module,
        inputs={name: name for name in case.inputs},
        targets="labels",
        train_kwargs=case.kwargs,
        eval_kwargs={**case.kwargs, **(eval_kwargs or {})},
        parallel=DataParallel(jax.devices()[:num_devices]),
    )
    options = {"loss": {"logits": "sparse_categorical_crossentropy"}, "metrics": {"logits": ["accuracy"]}, **options}
    trainer.compile(optax.sgd(0.1, momentum=0.9), **options)
    return trainer


def data_of(case: Case, rows: slice = slice(None)) -> dict[str, Any]:
    return {name: value[rows] for name, value in {**case.inputs, "labels": case.targets}.items()}


@pytest.fixture(params=["bert", "gpt2"])
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


def test_training_and_evaluation_equal_a_hand_written_loop_step_by_step(case: Case):
    optimizer, trainer = optax.sgd(0.1, momentum=0.9), trainer_of(case)
    trainer.build(data_of(case))
    start = trainer.state
    params, opt_state = start.params, optimizer.init(start.params)

    def mean_loss(params: Any, data: dict[str, Any], rngs: Any, deterministic: bool) -> Any:
        inputs = {name: data[name] for name in case.inputs}
        outputs = case.module.apply({"params": params}, **inputs, **case.kwargs, deterministic=deterministic, rngs=rngs)
        hits = (outputs.logits.argmax(axis=-1) == data["labels"]).mean()
        return optax.softmax_cross_entropy_with_integer_labels(outputs.logits, data["labels"]).mean(), hits

    gradient = jax.jit(jax.value_and_grad(lambda params, data, rngs: mean_loss(params, data, rngs, False), has_aux=True))
    evaluated = jax.jit(lambda params: mean_loss(params, data_of(case), None, True))
    for step in range(4):
        rngs = trainer.step_rngs(dataclasses.replace(start, step=jnp.int32(step)))
        data = data_of(case, slice(10 * step, 10 * step + 10))
        (loss, hits), grads = gradient(params, data, rngs)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        logs = trainer.train_on_batch(data)
        assert list(logs) == ["loss", "logits_loss", "logits_accuracy"]
        assert logs["loss"] == logs["logits_loss"] == pytest.approx(float(loss), rel=1e-5)
        assert logs["logits_accuracy"] == pytest.approx(float(hits), abs=1e-6)
        jax.tree.map(lambda have, want: np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5), trainer.state.params, params)
    loss, hits = evaluated(trainer.state.params)
    values = trainer.evaluate(data_of(case), batch_size=16, verbose=0)
    assert values["loss"] == pytest.approx(float(loss), rel=1e-5) and values["logits_accuracy"] == pytest.approx(float(hits), abs=1e-6)


@pytest.mark.parametrize(("name", "num_devices"), [("bert", 8), ("gpt2", 1)])
def test_predictions_equal_the_outputs_of_the_module(name: str, num_devices: int):
    case = case_of(name)
    trainer = trainer_of(case, num_devices=num_devices)
    trainer.build(data_of(case))
    want = case.module.apply({"params": trainer.state.params}, **case.inputs, **case.kwargs)
    inputs = data_of(case)
    for outputs in (
        trainer.predict(inputs, batch_size=24),
        trainer.predict_on_batch(inputs),
        next(trainer.predict_iter(inputs, batch_size=ROWS)),
    ):
        assert type(outputs) is type(want) and list(outputs) == list(want) == ["logits"]
        assert isinstance(outputs.logits, np.ndarray) and outputs["logits"] is outputs.logits and outputs[0] is outputs.logits
        np.testing.assert_allclose(outputs.logits, want.logits, rtol=1e-4, atol=1e-5)


def test_hidden_states_are_returned_in_evaluation_and_need_no_targets(case: Case):
    trainer = trainer_of(case, eval_kwargs={"output_hidden_states": True, "output_attentions": True})
    trainer.fit(data_of(case), batch_size=16, verbose=0)
    plain = trainer_of(case)
    plain.fit(data_of(case), batch_size=16, verbose=0)
    assert trainer.evaluate(data_of(case), verbose=0) == pytest.approx(plain.evaluate(data_of(case), verbose=0), rel=1e-5)
    outputs = trainer.predict(data_of(case), batch_size=8)
    assert list(outputs) == ["logits", "hidden_states", "attentions"]
    assert isinstance(outputs.hidden_states, tuple) and [leaf.shape for leaf in outputs.hidden_states] == [(ROWS, LENGTH, 16)] * 2
    np.testing.assert_allclose(outputs.logits, plain.predict(data_of(case)).logits, rtol=1e-4, atol=1e-5)


def test_custom_losses_and_loss_names_work_on_8_devices_and_half_precision_works():
    case = case_of("bert")  # Compiling GPT-2 for eight devices takes minutes.

    def custom_loss(outputs: Any, targets: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(outputs.logits, targets)

    results = []
    for loss in (custom_loss, "sparse_categorical_crossentropy", {"logits": "sparse_categorical_crossentropy"}):
        trainer = trainer_of(case, num_devices=8, loss=loss, metrics=None)
        trainer.fit(data_of(case), batch_size=16, verbose=0)
        results.append(trainer.evaluate(data_of(case), verbose=0)["loss"])
    assert results == [pytest.approx(results[0], rel=1e-6)] * 3
    half = trainer_of(case, precision="bfloat16")
    half.fit(data_of(case), batch_size=16, verbose=0)
    assert half.predict(data_of(case)).logits.dtype == np.float32


def test_labels_are_checked_and_steps_run_without_jit():
    case = case_of("gpt2")
    trainer = trainer_of(case)
    with pytest.raises(fitflax.errors.DataError, match="y holds labels from"):
        trainer.fit({**data_of(case), "labels": np.full_like(case.targets, 99)}, verbose=0)
    eager = trainer_of(case, run_eagerly=True)
    eager.fit(data_of(case, slice(8)), batch_size=8, verbose=0)
    outputs = eager.predict(data_of(case, slice(8)))
    assert list(outputs) == ["logits"] and len(outputs.logits) == 8
