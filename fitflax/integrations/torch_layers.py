"""Weight rules that convert layers between PyTorch and Flax (linen or NNX), in both directions.

PyTorch itself is not needed. The mapping of a model is a list of these rules; see `examples/pretrained`. Placeholders such as `{layer}` match any part of a
name. Paths in the model are paths of modules, below `params`.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from fitflax.checkpoints import WeightRule

__all__ = ["attention", "batch_norm", "conv", "dense", "embedding", "fused_attention", "norm"]

Array = np.ndarray[Any, Any]


def dense(theirs: str, ours: str, *, bias: bool = True, transposed: bool = True) -> list[WeightRule]:
    """Returns the rules that map `torch.nn.Linear`, `[out, in]`, to a `Dense` or `nnx.Linear`, `[in, out]`.

    Args:
        theirs: The layer's name in the file.
        ours: The path of the module.
        bias: Whether the layer has a bias.
        transposed: Whether the two layouts differ. Pass `False` for the `Conv1D` of transformers, as in GPT-2.

    >>> [rule.ours for rule in dense("classifier", "head")]
    ['params/head/kernel', 'params/head/bias']
    """
    transpose = np.transpose if transposed else None
    return _weight_and_bias(theirs, ours, "kernel", transpose, transpose, bias=bias)


def conv(theirs: str, ours: str, *, bias: bool = True) -> list[WeightRule]:
    """Returns the rules that map `torch.nn.Conv1d`, `Conv2d` or `Conv3d`, `[out, in, *window]`, to a `Conv`, `[*window, in, out]`.

    Args:
        theirs: The layer's name in the file.
        ours: The path of the module.
        bias: Whether the layer has a bias.

    >>> len(conv("stem", "stem", bias=False))
    1
    """
    return _weight_and_bias(theirs, ours, "kernel", _window_first, _window_last, bias=bias)


def embedding(theirs: str, ours: str) -> list[WeightRule]:
    """Returns the rule that maps `torch.nn.Embedding` to an `Embed`.

    Args:
        theirs: The layer's name in the file.
        ours: The path of the module.

    >>> embedding("wte", "wte")[0].ours
    'params/wte/embedding'
    """
    return _weight_and_bias(theirs, ours, "embedding", bias=False)


def norm(theirs: str, ours: str) -> list[WeightRule]:
    """Returns the rules for `torch.nn.LayerNorm` or `GroupNorm`, with scale and bias.

    Args:
        theirs: The layer's name in the file.
        ours: The path of the module.

    >>> [rule.ours for rule in norm("ln_f", "norm")]
    ['params/norm/scale', 'params/norm/bias']
    """
    return _weight_and_bias(theirs, ours, "scale")


def batch_norm(theirs: str, ours: str, *, counter: bool = True) -> list[WeightRule]:
    """Returns the rules for `torch.nn.BatchNorm1d`, `BatchNorm2d` and `BatchNorm3d`. Flax does not count batches, so their number is saved as 0.

    Args:
        theirs: The layer's name in the file.
        ours: The path of the module.
        counter: Whether the file contains `num_batches_tracked`.

    >>> [rule.ours for rule in batch_norm("bn1", "norm")]
    ['params/norm/scale', 'params/norm/bias', 'batch_stats/norm/mean', 'batch_stats/norm/var']
    """
    mean, place = f"{theirs}.running_mean", f"batch_stats/{ours}/mean"
    with_counter = WeightRule((mean, f"{theirs}.num_batches_tracked"), place, lambda mean, _: mean, lambda mean: (mean, np.zeros((), np.int64)))
    return [*norm(theirs, ours), with_counter if counter else WeightRule(mean, place), WeightRule(f"{theirs}.running_var", f"batch_stats/{ours}/var")]


def attention(theirs: dict[str, str], ours: str, *, num_heads: int, bias: bool = True) -> list[WeightRule]:
    """Returns the rules that map four `torch.nn.Linear` to a `MultiHeadDotProductAttention` or `nnx.MultiHeadAttention`, whose kernels have a head axis.

    Args:
        theirs: The layers' names in the file, by `"query"`, `"key"`, `"value"` and `"out"`.
        ours: The path of the attention module.
        num_heads: The number of heads.
        bias: Whether the layers have biases.

    >>> rules = attention({name: f"attn.{name}" for name in ("query", "key", "value", "out")}, "attention", num_heads=12)
    >>> rules[0].load(np.zeros((768, 768))).shape
    (768, 12, 64)
    """
    rules = _output_projection(theirs["out"], ours, num_heads=num_heads, bias=bias, transposed=True)
    split = functools.partial(_to_heads, num_heads=num_heads)
    for name in ("value", "key", "query"):
        biases = [WeightRule(f"{theirs[name]}.bias", f"params/{ours}/{name}/bias", split, _from_heads)] if bias else []
        rules = [
            WeightRule(f"{theirs[name]}.weight", f"params/{ours}/{name}/kernel", lambda array: split(array.T), lambda array: _from_heads(array).T),
            *biases,
            *rules,
        ]
    return rules


def fused_attention(qkv: str, out: str, ours: str, *, num_heads: int, bias: bool = True, transposed: bool = True) -> list[WeightRule]:
    """Returns the rules for attention with one layer for query, key and value, `[3 * out, in]`, as in `torch.nn.MultiheadAttention` or GPT-2.

    Args:
        qkv: The name of that layer in the file. A name that ends with `_`, such as `"in_proj_"`, is joined without a dot.
        out: The name of the output layer in the file.
        ours: The path of the attention module.
        num_heads: The number of heads.
        bias: Whether the layers have biases.
        transposed: Whether the two layouts differ; see `dense`.

    >>> rules = fused_attention("c_attn", "c_proj", "attention", num_heads=12, transposed=False)
    >>> [array.shape for array in rules[0].load(np.zeros((768, 2304)))]
    [(768, 12, 64), (768, 12, 64), (768, 12, 64)]
    """
    dot = "" if qkv.endswith("_") else "."

    def load(array: Array) -> tuple[Array, ...]:
        array = array.T if transposed else array
        return tuple(_to_heads(part, num_heads=num_heads) for part in np.split(array, 3, axis=-1))

    def save(*parts: Array) -> Array:
        array = np.concatenate([_from_heads(part) for part in parts], axis=-1)
        return array.T if transposed else array

    kernels, biases = (tuple(f"params/{ours}/{name}/{kind}" for name in ("query", "key", "value")) for kind in ("kernel", "bias"))
    rules = [WeightRule(f"{qkv}{dot}weight", kernels, load, save)]
    rules += [WeightRule(f"{qkv}{dot}bias", biases, load, save)] if bias else []
    return [*rules, *_output_projection(out, ours, num_heads=num_heads, bias=bias, transposed=transposed)]


def _weight_and_bias(
    theirs: str, ours: str, name: str, load: Callable[[Array], Array] | None = None, save: Callable[[Array], Array] | None = None, *, bias: bool = True
) -> list[WeightRule]:
    """Returns the rules that map a layer's weight to the array `name`, and its bias, which both libraries store alike."""
    rules = [WeightRule(f"{theirs}.weight", f"params/{ours}/{name}", load, save)]
    return [*rules, WeightRule(f"{theirs}.bias", f"params/{ours}/bias")] if bias else rules


def _output_projection(theirs: str, ours: str, *, num_heads: int, bias: bool, transposed: bool) -> list[WeightRule]:
    def load(array: Array) -> Array:
        array = array.T if transposed else array
        return array.reshape(num_heads, -1, array.shape[-1])

    def save(array: Array) -> Array:
        array = array.reshape(-1, array.shape[-1])
        return array.T if transposed else array

    return _weight_and_bias(theirs, f"{ours}/out", "kernel", load, save, bias=bias)


def _to_heads(array: Array, *, num_heads: int) -> Array:
    return array.reshape(*array.shape[:-1], num_heads, -1)


def _from_heads(array: Array) -> Array:
    return array.reshape(*array.shape[:-2], -1)


def _window_first(array: Array) -> Array:
    return np.moveaxis(array, (0, 1), (-1, -2))


def _window_last(array: Array) -> Array:
    return np.moveaxis(array, (-1, -2), (0, 1))
