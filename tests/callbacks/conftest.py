"""A small trainer that the tests of callbacks share."""

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
    """A trainer at step 0. The tests of a module share its compiled steps."""
    shared.build((np.zeros((4, 4), np.float32), np.zeros(4, np.int32)))
    return shared
