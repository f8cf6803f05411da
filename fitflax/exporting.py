"""A trained module as one file that needs neither fitflax nor the module's code: its inference function and weights through `jax.export`."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from fitflax.errors import ConfigError, ModelError
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.model import describe_shapes
from fitflax.steps.program import Program

__all__ = ["export_inference"]

# The format has 32-bit offsets.
_LARGEST = 2**31 - 2**20


def export_inference(
    path: str | os.PathLike[str], program: Program, state: TrainState, batch: Batch, *, batch_size: int | None, platforms: Sequence[str] | None
) -> Path:
    """Writes what `predict` computes of a batch, with its weights, to a file, and returns its path.

    Args:
        path: The file.
        program: Whose module is exported.
        state: Its weights; averaged parameters if there are any.
        batch: The shapes of a batch.
        batch_size: The rows that it takes; any number by default.
        platforms: What it runs on, of `"cpu"`, `"cuda"`, `"rocm"` and `"tpu"`; the present platform by default.

    Raises:
        ImportError: The package flatbuffers is not installed.
        ConfigError: There is no such platform, the weights are too large for one file, or `path` is a directory.
        ModelError: The module cannot be exported, and why.
    """
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ImportError("trainer.export writes with the package flatbuffers: pip install 'fitflax[export]'.") from error
    known = ("cpu", "cuda", "rocm", "tpu")
    names = tuple(platforms) if platforms is not None else None
    if names is not None and (isinstance(platforms, str) or not names or set(names) - set(known)):
        raise ConfigError(f"export(platforms=...) takes names out of {list(known)}. Received: {platforms!r}.")
    used = program.in_use(state)
    params, model_state = jax.tree.map(np.asarray, jax.tree.unflatten(used.treedef, used.leaves))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((params, model_state)))
    if size > _LARGEST:
        raise ConfigError(f"The weights take {size / 2**30:.1f} GB, and a file of jax.export holds less than 2. Save them with trainer.save(path).")
    key = jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(used.key))), impl=jax.random.key_impl(used.key))
    inputs = batch.x if isinstance(batch.x, tuple) else (batch.x,)

    def predict(*inputs: Any) -> PyTree:
        return program.task.predict_step(params, model_state, key, jnp.int32(0), inputs if isinstance(batch.x, tuple) else inputs[0])

    shapes = _shapes(inputs, batch_size)
    exporter = jax_export.export(program.strategy.alone(predict), platforms=names)
    try:
        exported = exporter(*shapes)
        data = exported.serialize()
    except Exception as error:
        raise _explained(error, program.task.model.name, inputs, batch_size) from error
    return _write(Path(path), bytes(data))


def _shapes(inputs: PyTree, batch_size: int | None) -> PyTree:
    """Returns the shapes of inputs with so many rows, or any number."""
    if batch_size is not None:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((batch_size, *leaf.shape[1:]), leaf.dtype), inputs)
    (rows,) = jax_export.symbolic_shape("batch")
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), inputs)


def _explained(error: Exception, name: str, inputs: PyTree, batch_size: int | None) -> Exception:
    """Returns an error that says why a module cannot be exported, and what to do."""
    cause = error.__cause__ if isinstance(error, ModelError) and error.__cause__ is not None else error
    text = str(cause).partition("\n")[0]
    whole = f"{type(cause).__name__} {cause}"
    if batch_size is None and any(sign in whole for sign in ("_DimExpr", "symbolic", "InconclusiveDimensionOperation")):
        advice = " Its code asks for the number of rows where any number must do: pass batch_size=, or write x.shape[0] for len(x) and compare no sizes."
    elif "PyTree" in whole or "serializ" in whole:
        advice = " What goes in and comes out must be arrays in tuples, lists and dicts: register other containers with jax.export."
    elif isinstance(error, ModelError):
        return ModelError(f"{name} cannot be exported: {error}")
    else:
        advice = ""
    return ModelError(f"{name} cannot be exported for inputs {describe_shapes(inputs)}: {type(cause).__name__}: {text.rstrip('.')}.{advice}")


def _write(path: Path, data: bytes) -> Path:
    """Writes a file, which replaces another one once it is complete."""
    if path.is_dir():
        raise ConfigError(f"export writes one file, and {path} is a directory. Give the file's path, such as {path / 'model.jaxexport'}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
