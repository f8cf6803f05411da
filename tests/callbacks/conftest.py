"""A small trainer that tests of callbacks share."""

import numpy as np
import pytest
from flax import linen as nn

import fitflax
from tests.run_script import make_trainer


@pytest.fixture(scope="module")
def shared() -> fitflax.Trainer:
    return make_trainer(model=nn.Dense(3), optimizer="sgd")


@pytest.fixture
def trainer(shared: fitflax.Trainer) -> fitflax.Trainer:
    """At step 0, in a run of its own; the compiled steps are shared."""
    shared.build((np.zeros((4, 4), np.float32), np.zeros(4, np.int32)))
    return shared
