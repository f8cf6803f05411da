"""The code that creates an NNX module with another configuration for evaluation. `test_nnx_eval_model.py` tests it in a trainer."""

from typing import Any

import numpy as np
from flax import nnx

from fitflax.models.nnx_graph import view_code


class WithArrays:
    """A configuration that cannot be compared with another one, because it contains an array."""

    def __init__(self) -> None:
        self.table, self.deterministic = np.arange(3), False

    def __eq__(self, other: object) -> bool:
        return bool(self.table == vars(other)["table"])

    __hash__ = None  # type: ignore[assignment]


def test_the_code_handles_names_that_are_not_identifiers_and_configurations_that_cannot_be_compared():
    class Holder(nnx.Module):
        def __init__(self, config: Any) -> None:
            self.config = config

    class Nested(nnx.Module):
        def __init__(self) -> None:
            self.parts = nnx.Dict({"part-0": Holder(WithArrays()), "part-1": Holder(WithArrays())})

    code = view_code(Nested(), "model", ["deterministic"])
    assert code is not None and "model.parts['part-0'].config" in code and "model.parts['part-1'].config" in code
