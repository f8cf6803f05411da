"""What a traced function costs, counted from its jaxpr: the same on every platform, and before anything is compiled."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend import core

__all__ = ["Cost", "cost_of", "peak_flops"]

# Dense floating-point operations a second of a device's matrix units in bfloat16 (float16 where there is no such thing), from the makers' data sheets, by the
# beginning of the name that JAX gives it. A TPU before v4 has two devices a chip.
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
    """What one call of a function costs; infinite where it holds a loop of unknown length or a kernel that is not written in JAX.

    Attributes:
        flops: Floating-point operations: two for each multiplication and addition of matrix products and convolutions, one for each element of all other
            results.
        bytes_accessed: What all operations read and write, each by itself, in bytes; a compiler that fuses them needs less.
        has_convolution: Whether there is a convolution among them.
        matrix_flops: Those of matrix products and convolutions alone.
    """

    flops: float
    bytes_accessed: float
    has_convolution: bool
    matrix_flops: float

    def __add__(self, other: Any) -> "Cost":
        flops, accessed = self.flops + other.flops, self.bytes_accessed + other.bytes_accessed
        return Cost(flops, accessed, self.has_convolution or other.has_convolution, self.matrix_flops + other.matrix_flops)

    def times(self, count: float) -> "Cost":
        """Returns the cost of so many calls, or of a part of one."""
        return Cost(self.flops * count, self.bytes_accessed * count, self.has_convolution, self.matrix_flops * count)


_NOTHING = Cost(0.0, 0.0, False, 0.0)
_UNKNOWN = Cost(math.inf, math.inf, False, math.inf)


def cost_of(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> Cost:
    """Returns what one call costs; of a function that is mapped over devices, on one of them.

    Args:
        jaxpr: What `jax.make_jaxpr` returns.

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
        return _UNKNOWN
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
    dtype = getattr(aval, "dtype", None)  # A key's has an item size as well.
    return 0.0 if dtype is None else float(math.prod(aval.shape) * dtype.itemsize)


def peak_flops(device_kind: str) -> float | None:
    """Returns how many floating-point operations a second a device can make at best, in bfloat16; `None` where that is not known.

    Args:
        device_kind: `jax.Device.device_kind`.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989000000000000.0, None)
    """
    known = [name for name in _PEAKS if device_kind == name or device_kind.startswith((f"{name} ", f"{name}-"))]
    return _PEAKS[max(known, key=len)] if known else None
