import collections
import enum
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fitflax.checkpoints.restore.fit import from_saved
from fitflax.checkpoints.restore.load import load_checkpoint
from fitflax.checkpoints.save import save_checkpoint
from fitflax.data.loader_state import UnstorableError, decode, encode


def through_a_file(state: object, path) -> object:
    """Saves a state in a checkpoint and returns it as a resume reads it."""
    save_checkpoint(path, train={}, run={"data": {"loader": encode(state)}}, metadata={"step": 0, "epoch": 0, "metrics": {}})
    saved = load_checkpoint(path)
    return decode(from_saved(saved.run["data"], root="run/data", key_impls=saved.metadata["key_impls"])["loader"])


STATE = {
    "numbers": [0, -(2**63), 2**63, -(2**200), 1.5, math.inf, True, False, None],
    "tuple": (1, (2, [3, ()]), {}),
    "text": ["", "grün", "\ud800 is no text", b"", b"\x00\xff"],
    "keys": {1: "int", "1": "str", None: "none", (2, "a"): "tuple"},
    "mark": {"__fitflax__": "tuple", "value": [1]},
    "chunked": {"__msgpack_chunked_array__": 1},
    "a/b": {"~": {}},
    "random": __import__("random").Random(3).getstate(),
}


def test_a_state_is_restored_unchanged_from_a_checkpoint(tmp_path):
    restored = through_a_file(STATE, tmp_path / "checkpoint")
    assert restored == STATE
    assert [type(number) for number in restored["numbers"]] == [type(number) for number in STATE["numbers"]]


def test_arrays_are_restored_with_their_types(tmp_path):
    state = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "empty": np.zeros((0, 2), np.complex64),
        "scalar": np.float32(0.1),
        "bool": np.bool_(True),
        "jax": jnp.arange(3),
    }
    restored = through_a_file(state, tmp_path / "checkpoint")
    for name, value in state.items():
        assert type(restored[name]) is type(value) or (isinstance(value, jax.Array) and isinstance(restored[name], jax.Array))
        assert restored[name].dtype == value.dtype
        np.testing.assert_array_equal(restored[name], value)


def test_tensors_are_restored_as_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    state = {"generator": torch.Generator().manual_seed(3).get_state(), "step": torch.tensor(4)}
    restored = through_a_file(state, tmp_path / "checkpoint")
    assert all(torch.equal(restored[name], value) and restored[name].dtype == value.dtype for name, value in state.items())
    torch.Generator().set_state(restored["generator"])


def test_a_state_is_copied_when_it_is_encoded_and_decoded():
    state = {"array": np.zeros(2), "list": [0]}
    encoded = encode(state)
    state["array"][0] = state["list"][0] = 1
    first = decode(encoded)
    first["array"][1] = 1
    assert decode(encoded)["array"].tolist() == [0, 0] and encoded["list"] == [0]


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [0, object()]}, r"state\['a'\]\[1\] is a builtins.object"),
        ({"a": {1, 2}}, r"state\['a'\] is a builtins.set"),
        (Color.RED, r"state is a .*Color"),
        (collections.OrderedDict(a=1), "state is a collections.OrderedDict"),
        (np.array([None]), "state is a numpy.ndarray"),
        (np.array(["text"]), "state is a numpy.ndarray"),
        (np.datetime64("2020"), "state is a numpy.datetime64"),
        ({"key": jax.random.key(0)}, r"state\['key'\] is a"),
        ({object(): 1}, r"a key of state is a builtins.object"),
    ],
    ids=["object", "set", "enum", "ordered dict", "objects", "strings", "date", "key", "key of a dict"],
)
def test_the_error_names_what_cannot_be_stored(state, message):
    with pytest.raises(UnstorableError, match=message):
        encode(state)


def test_a_state_that_contains_itself_is_an_error():
    state: dict = {}
    state["again"] = state
    with pytest.raises(UnstorableError, match="more than 40 levels deep"):
        encode(state)


def test_a_sparse_tensor_cannot_be_stored():
    torch = pytest.importorskip("torch")
    with pytest.raises(UnstorableError, match=r"state is a torch\.Tensor"):
        encode(torch.zeros(2, 2).to_sparse())


def test_the_deepest_allowed_state_fits_in_a_checkpoint(tmp_path):
    state: object = 1
    for _ in range(40):
        state = (state,)
    assert through_a_file(state, tmp_path / "checkpoint") == state
