"""Fixtures for tests of checkpoints."""

import pytest

from fitflax.checkpoints.checkpoint_files import write_checkpoint
from tests.checkpoints.samples import METADATA, RUN, train_state


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "c").mkdir()
    write_checkpoint(tmp_path / "c", train=train_state(), run=RUN, metadata=METADATA)
    return tmp_path / "c"
