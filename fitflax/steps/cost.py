"""Costs of a traced function, counted from its jaxpr: the same on every platform, without compilation."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend import core

__all__ = ["UNKNOWN", "Cost", "cost_of", "peak_flops"]

# Dense bfloat16 operations per second of a device (float16 if it has no bfloat16), from the vendors' data sheets, by the beginning of JAX's name of
# the device. TPUs before v4 have two devices per chip.
_PEAKS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A100": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v6 lite": 918e12,
    "Tesla T4": 65e12,
    "Tesla V100": 125e12,
}


class Cost(NamedTuple):
    """Cost of one call of a function; infinite if it contains a loop of unknown length or a kernel that is not written in JAX."""

    flops: float  # Floating-point operations: two for each multiply-add of matrix products and convolutions, one for each element of other results.
    bytes_accessed: float  # Bytes that all operations read and write without fusion.
    has_convolution: bool
    matrix_flops: float  # Those of matrix products and convolutions only.

    def __add__(self, other: Any) -> "Cost":
        flops, accessed = self.flops + other.flops, self.bytes_accessed + other.bytes_accessed
        return Cost(flops, accessed, self.has_convolution or other.has_convolution, self.matrix_flops + other.matrix_flops)

    def times(self, count: float) -> "Cost":
        """Returns the cost of `count` calls, which may be a fraction."""
        return Cost(self.flops * count, self.bytes_accessed * count, self.has_convolution, self.matrix_flops * count)


_NOTHING = Cost(0.0, 0.0, False, 0.0)
UNKNOWN = Cost(math.inf, math.inf, False, math.inf)
"""The cost of a function that cannot be counted."""


def cost_of(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> Cost:
    """Returns the cost of one call of a function, given its jaxpr; for a function that is mapped over devices, on one of them.

    >>> import jax
    >>> import numpy as np
    >>> a, b = np.ones((2, 3), np.float32), np.ones((3, 5), np.float32)
    >>> cost_of(jax.make_jaxpr(lambda a, b: a @ b)(a, b))
    Cost(flops=60.0, bytes_accessed=124.0, has_convolution=False, matrix_flops=60.0)
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(map(_cost_of_equation, jaxpr.eqns), start=_NOTHING)


def _cost_of_equation(equation: Any) -> Cost:
    name, params = equation.primitive.name, equation.params
    if name in ("while", "pallas_call"):
        return UNKNOWN
    inner = [cost_of(jaxpr) for jaxpr in _jaxprs_in(params)]
    if name == "cond":
        return max(inner, key=lambda cost: cost.flops)
    if inner:
        return sum(inner, start=_NOTHING).times(params["length"] if name == "scan" else 1)
    outputs = [variable.aval for variable in equation.outvars]
    operands = [variable.aval for variable in equation.invars]
    accessed = sum(_num_bytes(aval) for aval in (*operands, *outputs))
    size = float(sum(math.prod(getattr(aval, "shape", ())) for aval in outputs))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        flops = 2 * size * math.prod(operands[0].shape[axis] for axis in contracted)
        return Cost(flops, accessed, False, flops)
    if name == "conv_general_dilated":
        kernel = operands[1].shape
        flops = 2 * size * math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
        return Cost(flops, accessed, True, flops)
    return Cost(size, accessed, False, 0.0)


def _jaxprs_in(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr | core.Jaxpr):
                yield one


def _num_bytes(aval: Any) -> float:
    dtype = getattr(aval, "dtype", None)  # Key dtypes have an item size, too.
    return 0.0 if dtype is None else float(math.prod(aval.shape) * dtype.itemsize)


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak bfloat16 operations per second of a device with this `jax.Device.device_kind`, or `None` if it is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989000000000000.0, None)
    """
    known = [name for name in _PEAKS if device_kind == name or device_kind.startswith((f"{name} ", f"{name}-"))]
    return _PEAKS[max(known, key=len)] if known else None
