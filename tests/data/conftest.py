"""Fixtures of the tests of data."""

import pytest


@pytest.fixture(autouse=True)
def end_workers_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes PyTorch wait one second, not five, for a worker to end before it terminates it. Forked workers often cannot end, because JAX has threads."""
    try:
        import torch.utils.data
    except ImportError:
        return
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 1.0)
