"""Exports the inference function and the variables of a trained module with `jax.export`, to a file that needs neither fitflax nor the module's code."""

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from fitflax.checkpoints.json_documents import write_file
from fitflax.data.batch import has_rows
from fitflax.errors import ConfigError, ModelError
from fitflax.leaves import describe_shapes, key_of, through_key_data
from fitflax.parallel.placement import spans_processes, whole
from fitflax.parallel.processes import after_first
from fitflax.state import Batch, PyTree, TrainState
from fitflax.steps.outputs import in_plain_containers
from fitflax.steps.program import Program
from fitflax.storage import Location, ObjectPath, locate

# The file format has 32-bit offsets.
_MAX_BYTES = 2**31 - 2**20


def export_inference(
    path: str | os.PathLike[str],
    program: Program,
    state: TrainState,
    batch: Batch,
    *,
    batch_size: int | None,
    platforms: Sequence[str] | None,
    storage_options: Mapping[str, Any] | None,
) -> Location:
    """Writes the prediction function of a module, with its variables, to a file and returns the path.

    The shapes and dtypes are those of `batch`; the other arguments are as in `Trainer.export`. The parameters are those for evaluation, such as averaged ones.
    If the state is split between processes, all of them must call it.
    """
    target = locate(path, owner="export(path)", error=ConfigError, options=storage_options)
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ImportError("trainer.export needs the package flatbuffers: pip install 'fitflax[export]'.") from error
    known = ["cpu", "cuda", "rocm", "tpu"]
    if platforms is not None and (isinstance(platforms, str) or not platforms or set(platforms) - set(known)):
        raise ConfigError(f"export(platforms=...) must be a list of names from {known}. Received: {platforms!r}.")
    program.preparation.check_eval_model(state, batch)
    carry = program.eval_carry(state)
    is_split = spans_processes(carry.leaves)
    params, model_state = jax.tree.map(through_key_data(whole), jax.tree.unflatten(carry.treedef, carry.leaves))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((params, model_state)))
    if size > _MAX_BYTES:
        raise ConfigError(f"The parameters take {size / 2**30:.1f} GB, but a file of jax.export can hold less than 2 GB. Use trainer.save(path) instead.")
    key = key_of(whole(jax.random.key_data(carry.key)), jax.random.key_impl(carry.key))
    if not has_rows(batch.x, len(batch.mask)):
        raise ConfigError(
            "export needs inputs whose arrays all have an axis of examples, but this batch is passed whole. Export a custom function with jax.export instead."
        )
    has_several_inputs = type(batch.x) is tuple
    inputs = batch.x if has_several_inputs else (batch.x,)

    def predict(*inputs: Any) -> PyTree:
        outputs = program.task.predict_step(params, model_state, key, jnp.int32(0), inputs if has_several_inputs else inputs[0])
        return in_plain_containers(outputs)  # The file must not depend on the module's classes.

    def write() -> Location:
        if is_split and jax.process_index():
            return target  # All processes have gathered the variables, and the first one writes them.
        try:
            rows = jax_export.symbolic_shape("batch")[0] if batch_size is None else batch_size
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), inputs)
            data = jax_export.export(program.strategy.alone(predict), platforms=platforms)(*shapes).serialize()
        except Exception as error:
            raise _export_error(error, program.task.model.name, inputs, batch_size) from error
        return _write_file(target, bytes(data))

    return after_first(write) if is_split else write()


def _export_error(error: Exception, name: str, inputs: PyTree, batch_size: int | None) -> Exception:
    """Returns an error that says why a module cannot be exported, and what to do."""
    cause = error.__cause__ if isinstance(error, ModelError) and error.__cause__ is not None else error
    text = str(cause).partition("\n")[0].rstrip(".")
    full_text = f"{type(cause).__name__} {cause}"
    advice = ""
    if batch_size is None and any(sign in full_text for sign in ("_DimExpr", "symbolic", "InconclusiveDimensionOperation")):
        advice = " Its code depends on the batch size. Pass batch_size=, or use x.shape[0] instead of len(x) and do not compare sizes."
    elif "PyTree" in full_text or "serializ" in full_text:
        advice = " Inputs and outputs must be arrays in tuples, lists and dicts. Register other containers with jax.export."
    elif isinstance(error, ModelError):
        return ModelError(f"{name} cannot be exported: {error}")
    return ModelError(f"{name} cannot be exported for inputs {describe_shapes(inputs)}: {type(cause).__name__}: {text}.{advice}")


def _write_file(path: Location, data: bytes) -> Location:
    """Writes a file atomically: an existing file is replaced when the new one is complete."""
    if isinstance(path, ObjectPath):
        if not path.key:
            raise ConfigError(f"export(path) must be an object, but {path} is a bucket. Pass a path such as {path / 'model.jaxexport'}.")
        path.write_bytes(data)
        return path
    if path.is_dir():
        raise ConfigError(f"export(path) must be a file, but {path} is a directory. Pass a path such as {path / 'model.jaxexport'}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        write_file(temporary, [data])
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
