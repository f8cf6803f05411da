"""`optimizers.freeze`: which parameters a pattern matches, and that nothing changes them."""

import io

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import fitflax
from fitflax import optimizers
from fitflax.errors import OptimizerError
from fitflax.parallel import DataParallel

PARAMS = {
    "encoder": {"Dense_0": {"kernel": np.ones(2), "bias": np.ones(1)}, "Dense_1": {"kernel": np.ones(2), "bias": np.ones(1)}},
    "encoder_2": {"kernel": np.ones(2)},
    "head": {"kernel": np.ones(2), "bias": np.ones(1)},
}
PATHS = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(PARAMS)]


def frozen(patterns):
    """Returns the paths of the parameters that an update leaves unchanged."""
    optimizer = optimizers.freeze(optax.sgd(1.0), patterns)
    updates, _ = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    return {path for path, leaf in zip(PATHS, jax.tree.leaves(updates), strict=True) if not np.asarray(leaf).any()}


@pytest.mark.parametrize(
    ("patterns", "paths"),
    [
        ("encoder", {path for path in PATHS if path.startswith("encoder/")}),
        ("encoder/Dense_0", {"encoder/Dense_0/kernel", "encoder/Dense_0/bias"}),
        ("encoder/Dense_0/bias", {"encoder/Dense_0/bias"}),
        ("encoder*", {path for path in PATHS if path.startswith("encoder")}),
        ("encoder/*/bias", {"encoder/Dense_0/bias", "encoder/Dense_1/bias"}),
        ("encoder/Dense_[1-9]", {"encoder/Dense_1/kernel", "encoder/Dense_1/bias"}),
        ("*/bias", {"head/bias"}),
        ("**/bias", {"encoder/Dense_0/bias", "encoder/Dense_1/bias", "head/bias"}),
        ("encoder/**/bias", {"encoder/Dense_0/bias", "encoder/Dense_1/bias"}),
        (["head", "encoder_2"], {"head/kernel", "head/bias", "encoder_2/kernel"}),
    ],
)
def test_a_pattern_matches_paths_and_everything_below_them(patterns, paths):
    assert frozen(patterns) == paths


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("encodr", r"'encodr' matches no parameter\. Did you mean 'encoder'"),
        (["head", "Dense_0"], "'Dense_0' matches no parameter"),
        ("params/head", "Leave out 'params/'"),
        ("head/kernel/w", "'head/kernel/w' matches no parameter"),
        ("**", "leaves nothing to train"),
        (["encoder*", "head"], "leaves nothing to train"),
    ],
)
def test_a_pattern_that_matches_no_parameter_or_all_is_an_error_that_lists_parameters(patterns, message):
    with pytest.raises(OptimizerError, match=message) as found:
        optimizers.freeze(optax.sgd(1.0), patterns).init(PARAMS)
    assert "encoder/Dense_0/bias" in str(found.value)


@pytest.mark.parametrize("patterns", ["", [], [1], [""], None, 3])
def test_an_invalid_pattern_is_an_error(patterns):
    with pytest.raises(OptimizerError, match="`patterns` must be a pattern of paths"):
        optimizers.freeze(optax.sgd(1.0), patterns)


def test_a_name_is_not_accepted_as_an_optimizer():
    with pytest.raises(OptimizerError, match=r"takes an optax transformation, such as optimizers.get\('adam'\)"):
        optimizers.freeze("adam", "head")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(8, name="backbone")(x))
        return nn.Dense(3, name="head")(nn.relu(x))


def test_in_fit_only_unfrozen_parameters_change_and_have_an_optimizer_state():
    x, y = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32), np.arange(32) % 3
    trainer = fitflax.Trainer(Net(), parallel=DataParallel(jax.devices()[:1]))
    trainer.compile(optimizers.freeze(optimizers.get("adamw", 0.01), ["backbone", "norm"]), "sparse_categorical_crossentropy")
    trainer.build((x, y))
    before = trainer.state
    trainer.fit(x, y, epochs=2, verbose=0)
    after = trainer.state
    for name in ("backbone", "norm"):
        assert jax.tree.map(np.array_equal, before.params[name], after.params[name]) == jax.tree.map(lambda leaf: True, before.params[name])
    assert not np.array_equal(before.params["head"]["kernel"], after.params["head"]["kernel"])
    # Batch statistics are not parameters.
    assert not np.array_equal(before.model_state["batch_stats"]["norm"]["mean"], after.model_state["batch_stats"]["norm"]["mean"])
    sizes = [leaf.size for leaf in jax.tree.leaves(after.opt_state) if leaf.size > 1]
    assert sum(sizes) == 2 * (8 * 3 + 3)
    assert trainer.learning_rate == pytest.approx(0.01)
    trainer.learning_rate = 0.5
    assert trainer.learning_rates == {"trained": 0.5}
    file = io.StringIO()
    trainer.summary(file=file)
    assert "  frozen: 56 = 224 B in 4 arrays, frozen" in file.getvalue() and "  trained: 27 = 108 B in 2 arrays, learning rate 0.5" in file.getvalue()


def test_a_double_asterisk_also_matches_zero_names():
    optimizer = optimizers.freeze(optax.sgd(1.0), "**/bias")
    params = {"bias": np.ones(1), "kernel": np.ones(1), "layer": {"bias": np.ones(1)}}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert [float(leaf[0]) for leaf in jax.tree.leaves(updates)] == [0.0, -1.0, 0.0]
