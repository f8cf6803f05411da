"""What a step returns on request besides its loss and metrics."""

from typing import NamedTuple

from fitflax.state import PyTree
from fitflax.steps.nonfinite import Suspects

__all__ = ["NOTHING", "Keep", "Kept"]


class Keep(NamedTuple):
    """What a step returns besides its loss and metrics."""

    # Whether to compute the gradient's norm and check the gradient for NaN and infinity; `None` for a custom step, which returns no gradient. XLA must
    # then write the gradient to memory and read it again: a step of 100 MB of parameters and little else takes 1.4 times as long, one of 2000 arrays
    # 1.3 times.
    norm: bool | None = False
    grads: bool = False  # Whether to keep the gradient, which takes as much memory as the parameters.
    sown: tuple[str, ...] = ()  # Names of collections of sown values.
    # Whether to find what first was not finite: parts of the loss, the gradient and the updated parameters, all of which are read for it.
    culprit: bool = False


NOTHING = Keep()


class Kept(NamedTuple):
    """What a step returned besides its loss and metrics, equal on all replicas."""

    grads: PyTree  # The gradient, or `()`.
    sown: dict[str, PyTree]  # Sown values by collection: numbers averaged over replicas, arrays of all replicas concatenated along their first axis.
    suspects: Suspects = Suspects()  # Names of the values that were checked for NaN and infinity.
