import random
import sys
import types

import numpy as np
import pytest

from fitflax.data.randomness import undisturbed


def draws() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def test_the_global_generators_are_restored():
    random.seed(3)
    np.random.seed(3)
    expected = draws()
    random.seed(3)
    np.random.seed(3)
    with undisturbed():
        assert draws() == expected
        draws()
    assert draws() == expected


def test_the_global_generators_are_restored_after_an_error():
    random.seed(3)
    np.random.seed(3)
    with pytest.raises(KeyError), undisturbed():
        first = draws()
        raise KeyError
    assert draws() == first


def test_pytorchs_generator_is_restored():
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    with undisturbed():
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), inside)


def test_a_partially_imported_library_is_ignored(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    with undisturbed():
        pass
