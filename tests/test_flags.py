"""A complete small run under the debugging options of JAX and Python; the table in docs/how-to/debug-a-run.md is made from this list."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any, Literal

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how-to" / "debug-a-run.md"
SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Flag:
    """An option, and the results of a run under it.

    Attributes:
        setting: What the user sets, as in the table.
        results: Bit-for-bit identical to a run without it, the same up to rounding, or other numbers, because it changes the random numbers or the precision.
        about: What it does, for the table.
        env: Environment variables.
        options: Options of the script.
    """

    setting: str
    results: Literal["bit-for-bit identical", "same up to rounding", "other numbers"]
    about: str
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def variable(setting: str, results: Any, about: str, **options: Any) -> Flag:
    name, value = setting.split("=")
    return Flag(f"`{setting}`", results, about, {name: value}, options)


FLAGS = (
    variable("JAX_DEBUG_NANS=1", "bit-for-bit identical", "the first NaN is a `FloatingPointError` at the line that made it"),
    variable("JAX_DISABLE_JIT=1", "same up to rounding", "nothing is compiled: `print` and debuggers see numbers; `with jax.disable_jit():` for a block"),
    Flag("`compile(..., run_eagerly=True)`", "same up to rounding", "the same for one trainer, which must use a single device", options={"run_eagerly": True}),
    variable("JAX_TRANSFER_GUARD=disallow", "bit-for-bit identical", 'an implicit transfer is an error; `with jax.transfer_guard("disallow"):` for a block'),
    variable("JAX_DEBUG_INFS=1", "bit-for-bit identical", "the same as `JAX_DEBUG_NANS` for infinities"),
    variable("JAX_TRANSFER_GUARD=log", "bit-for-bit identical", "implicit transfers are printed"),
    variable("JAX_CHECK_TRACER_LEAKS=1", "bit-for-bit identical", "a traced value that outlives its trace is an error"),
    variable("JAX_DEBUG_KEY_REUSE=1", "bit-for-bit identical", "a random key that is used twice is an error"),
    variable("JAX_LEGACY_PRNG_KEY=error", "bit-for-bit identical", "`jax.random.PRNGKey` is an error; the library uses typed keys"),
    variable("JAX_NUMPY_RANK_PROMOTION=raise", "bit-for-bit identical", "broadcasting of arrays of different ranks is an error"),
    variable("JAX_NUMPY_DTYPE_PROMOTION=strict", "other numbers", "mixing dtypes is an error; optax's Adam mixes them, its SGD does not", sgd=True),
    variable("JAX_ENABLE_CHECKS=1", "bit-for-bit identical", "JAX checks its own work"),
    variable("JAX_ENABLE_X64=1", "other numbers", "64-bit types are allowed"),
    variable("JAX_DEFAULT_PRNG_IMPL=rbg", "other numbers", "another random generator, faster on TPUs"),
    variable("JAX_DEFAULT_PRNG_IMPL=unsafe_rbg", "other numbers", "another one, faster still"),
    variable("JAX_THREEFRY_PARTITIONABLE=0", "other numbers", "random numbers as of older JAX versions"),
    variable("JAX_LOG_COMPILES=1", "bit-for-bit identical", "every compilation is printed"),
    variable("JAX_TRACEBACK_FILTERING=off", "bit-for-bit identical", "tracebacks show JAX's own frames"),
    variable("PYTHONOPTIMIZE=2", "bit-for-bit identical", "Python leaves out assertions and docstrings"),
    variable("PYTHONWARNINGS=error", "bit-for-bit identical", "every warning is an error"),
    Flag("eight CPU devices", "other numbers", "dropout and batch statistics are those of each device's shard", options={"devices": 8}),
)
# Options that are set together, because a process takes longer to start than to train.
PROCESSES = {
    "finite": ("JAX_DEBUG_NANS=1", "JAX_DEBUG_INFS=1"),
    "no jit": ("JAX_DISABLE_JIT=1",),
    "eager": ("compile(..., run_eagerly=True)",),
    "errors": ("JAX_TRANSFER_GUARD=disallow", "JAX_LEGACY_PRNG_KEY=error", "JAX_NUMPY_RANK_PROMOTION=raise", "PYTHONWARNINGS=error", "JAX_ENABLE_CHECKS=1"),
    "leaks": ("JAX_CHECK_TRACER_LEAKS=1", "JAX_DEBUG_KEY_REUSE=1"),
    "logs": ("JAX_TRANSFER_GUARD=log", "JAX_LOG_COMPILES=1", "JAX_TRACEBACK_FILTERING=off", "PYTHONOPTIMIZE=2"),
    "other types": ("JAX_ENABLE_X64=1", "JAX_THREEFRY_PARTITIONABLE=0"),
    "strict types": ("JAX_NUMPY_DTYPE_PROMOTION=strict", "JAX_DEFAULT_PRNG_IMPL=rbg"),
    "devices": ("eight CPU devices", "JAX_DEFAULT_PRNG_IMPL=unsafe_rbg"),
}
REFERENCES: dict[str, Any] = {}


def run(tmp_path: pathlib.Path, env: dict[str, str], flag_env: dict[str, str], options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    given = json.dumps({**options, "directory": str(tmp_path)})
    command = [sys.executable, str(ROOT / "tests" / "flags_script.py"), given]
    done = subprocess.run(command, env=env | flag_env, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT ")), done.stderr


@pytest.fixture
def flag_env(process_env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in process_env.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}


@pytest.fixture
def reference(tmp_path_factory, flag_env):
    if not REFERENCES:
        REFERENCES["found"] = run(tmp_path_factory.mktemp("reference"), flag_env, {}, {})[0]
    return REFERENCES["found"]


def assert_close(found: Any, want: Any, where: str = "") -> None:
    if isinstance(want, dict):
        assert list(found) == list(want), where
        for key in want:
            if key != "hash":
                assert_close(found[key], want[key], f"{where}/{key}")
    else:
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5, err_msg=where)


def all_finite(found: Any) -> bool:
    if isinstance(found, dict):
        return all(all_finite(value) for key, value in found.items() if key != "hash")
    return bool(np.isfinite(found).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_a_complete_run_passes_under_debugging_options(name, reference, tmp_path, flag_env):
    flags = [flag for flag in FLAGS if flag.setting.strip("`") in PROCESSES[name]]
    env = {key: value for flag in flags for key, value in flag.env.items()}
    options = {key: value for flag in flags for key, value in flag.options.items()}
    (results,) = {flag.results for flag in flags}
    if name == "logs":
        env, options = env | {"JAX_EXPLAIN_CACHE_MISSES": "1"}, options | {"again": True}
    found, log = run(tmp_path, flag_env, env, options)
    if results == "bit-for-bit identical":
        assert found == reference
    elif results == "same up to rounding":
        assert_close(found, reference)
    else:
        assert {kind: values["step"] for kind, values in found.items()} == {kind: values["step"] for kind, values in reference.items()}
        assert all_finite(found)
    if name == "logs":
        # A second `fit` on the same shapes retraces nothing; `JAX_EXPLAIN_CACHE_MISSES` explains anything that is retraced.
        _, first, second = log.split("--- again")
        assert "CACHE MISS" in first
        assert "CACHE MISS" not in second, second[:3000]


def test_each_option_is_set_in_one_process():
    assert sorted(setting for settings in PROCESSES.values() for setting in settings) == sorted(flag.setting.strip("`") for flag in FLAGS)
    for settings in PROCESSES.values():
        names = [setting.split("=")[0] for setting in settings]
        assert len(set(names)) == len(names)


def table() -> str:
    rows = ["| set | a run under it gives | what it does |", "|---|---|---|"]
    return "\n".join(rows + [f"| {flag.setting} | {flag.results} | {flag.about} |" for flag in FLAGS])


def test_the_table_of_options_in_the_docs_matches_the_tested_list():
    assert table() in PAGE.read_text(encoding="utf-8"), f"docs/how-to/debug-a-run.md needs this table:\n{table()}"
