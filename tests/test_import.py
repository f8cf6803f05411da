"""What `import fitflax` requires and what it imports."""

import ast
import email
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile

import pytest

pytestmark = pytest.mark.optimized
ROOT = pathlib.Path(__file__).resolve().parent.parent
REQUIRED = {"jax", "flax", "optax", "msgpack", "tqdm", "tensorboardx", "typing-extensions"}
NEVER_IMPORTED = ("tensorflow", "torch", "matplotlib", "pandas", "polars", "sklearn", "datasets", "grain", "clu")
# What `import fitflax` may import; anything else is imported when it is used. Flax code imports these packages anyway.
IMPORTED = {"fitflax", "jax", "jaxlib", "flax", "optax", "numpy", "msgpack", "typing_extensions"}
# The heavy packages among those that are required or often installed; each is named in case jax or flax start to import one.
LATER = ("tqdm", "tensorboardX", "tensorboard", "orbax.checkpoint", "google.protobuf", "concurrent.futures.process", "IPython", "scipy.stats", *NEVER_IMPORTED)
SUB_MODULES = ("callbacks", "losses", "metrics", "optimizers", "data", "parallel", "checkpoints", "diagnostics", "errors")

# Stands in for an installed library: prints who imports it, and ends the process, so that no `except` can hide it.
TELL_TALE = """
import os, sys, traceback
traceback.print_stack()
print("imported", __name__, file=sys.stderr, flush=True)
os._exit(3)
"""


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def distribution(requirement: str) -> str:
    """`tensorboardx` for `tensorboardX>=2.6; python_version > "3"`."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def run(*command: str | pathlib.Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)


@pytest.mark.slow
def test_import_loads_no_other_framework(tmp_path, process_env):
    for name in NEVER_IMPORTED:
        (tmp_path / f"{name}.py").write_text(TELL_TALE)
    process_env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), process_env["PYTHONPATH"]])
    code = f"import sys, fitflax; print(sorted(set({NEVER_IMPORTED!r}) & set(sys.modules)))"
    result = run(sys.executable, "-c", code, cwd=tmp_path, env=process_env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
def test_import_loads_no_package_that_flax_code_does_not_load_already(tmp_path, process_env):
    code = f"""
import sys, jax, flax, optax, flax.linen
before = set(sys.modules)
import fitflax
new = set(sys.modules) - before
print(sorted({{name.partition(".")[0] for name in new}} - set(sys.stdlib_module_names) - {IMPORTED!r}), sorted(new & set({LATER!r})))
"""
    result = run(sys.executable, "-c", code, cwd=tmp_path, env=process_env)
    assert (result.returncode, result.stdout.strip()) == (0, "[] []"), result.stderr


@pytest.mark.slow
def test_the_version_is_looked_up_when_it_is_accessed(tmp_path, process_env):
    code = """
import importlib.metadata
asked = []
version = importlib.metadata.version
importlib.metadata.version = lambda name: asked.append(name) or version(name)
import fitflax
assert "fitflax" not in asked, asked
print(bool(fitflax.__version__), asked.count("fitflax"), hasattr(fitflax, "no_such_name"))
"""
    result = run(sys.executable, "-c", code, cwd=tmp_path, env=process_env)
    assert (result.returncode, result.stdout.strip()) == (0, "True 1 False"), result.stderr


@pytest.mark.slow
def test_import_does_not_initialize_devices(tmp_path, process_env):
    # A user sets the number of devices, or starts `jax.distributed`, after the imports.
    code = "import fitflax, jax; jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices('cpu')))"
    result = run(sys.executable, "-c", code, cwd=tmp_path, env=process_env)
    assert (result.returncode, result.stdout.strip()) == (0, "3"), result.stderr


@pytest.mark.slow
def test_without_scikit_learn_the_estimators_say_what_to_install(tmp_path, process_env):
    code = "import sys; sys.modules['sklearn'] = None; import fitflax.sklearn"
    result = run(sys.executable, "-c", code, cwd=tmp_path, env=process_env)
    assert result.returncode == 1
    message = "ImportError: fitflax.sklearn needs scikit-learn 1.6 or newer, and cloudpickle: pip install 'fitflax[sklearn]'."
    assert result.stderr.splitlines()[-1] == message


def test_submodules_are_attributes(tmp_path, process_env):
    code = "import fitflax; " + "; ".join(f"fitflax.{name}" for name in SUB_MODULES)
    result = run(sys.executable, "-W", "error", "-c", code, cwd=tmp_path, env=process_env)
    assert result.returncode == 0, result.stderr


def test_requirements_are_the_agreed_ones():
    assert {distribution(requirement) for requirement in project()["dependencies"]} == REQUIRED


@pytest.mark.slow
def test_no_test_needs_a_peer_to_be_collected():
    """A module that imports one of them first skips itself if it is missing."""
    peers = {re.split("[^a-z-]", one.lower())[0] for one in project()["optional-dependencies"]["peers"]} | {"tensorflow", "lightning"}
    faults = []
    for path in (ROOT / "tests").rglob("*.py"):
        skips: set[str] = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            skips |= set(re.findall(r"importorskip\(['\"](\w+)", ast.unparse(node)))
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            faults += [f"{path.name}:{node.lineno} {name}" for name in names if name.partition(".")[0] in peers - skips]
    assert not faults, faults


@pytest.mark.parametrize("extra", ["examples", "docs", "site"])
def test_the_test_extra_covers_what_the_suite_runs(extra: str):
    extras = project()["optional-dependencies"]
    assert set(extras[extra]) <= set(extras["test"]), f"examples, documentation and the site run in the suite, so `test` needs what `{extra}` needs"


@pytest.fixture(scope="session")
def outside() -> dict[str, str]:
    """An environment for processes that do not see this checkout, on a machine with a package index."""
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    with tempfile.TemporaryDirectory() as directory:
        # pip needs this first in any case, so a failure here means that no index can be reached, not that the project is wrong.
        build_backend = run(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", directory, "hatchling", env=environment)
    if build_backend.returncode != 0:
        pytest.skip(f"pip cannot reach a package index: {(build_backend.stderr.strip().splitlines() or ['no message'])[-1]}")
    return environment


def make_venv(directory: pathlib.Path) -> pathlib.Path:
    """Creates a virtual environment, and returns its Python."""
    venv.create(directory, with_pip=True, symlinks=os.name != "nt")
    return directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(python: pathlib.Path, *what: str | pathlib.Path, env: dict[str, str]) -> None:
    result = run(python, "-m", "pip", "install", "--disable-pip-version-check", *what, env=env)
    assert result.returncode == 0, result.stderr


def contents(wheel: pathlib.Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="session")
def distributions(outside, tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """The wheel and the source distribution."""
    directory = tmp_path_factory.mktemp("distributions")
    python = make_venv(directory / "venv")
    install(python, "hatchling", env=outside)
    result = run(python, "-m", "hatchling", "build", "--directory", directory / "dist", cwd=ROOT, env=outside)
    assert result.returncode == 0, result.stderr
    (wheel,), (sdist,) = (directory / "dist").glob("*.whl"), (directory / "dist").glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_the_wheel_holds_only_the_package_and_the_sdist_builds_an_identical_one(distributions, outside, tmp_path):
    wheel, sdist = distributions
    files = contents(wheel)
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fitflax").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    info = f"fitflax-{project()['version']}.dist-info"
    assert {name for name in files if not name.startswith(f"{info}/")} == package
    assert "fitflax/py.typed" in package and f"{info}/licenses/LICENSE" in files
    description = email.message_from_bytes(files[f"{info}/METADATA"])
    assert description["Description-Content-Type"] == "text/markdown"
    assert description.get_payload(decode=True).strip() == (ROOT / "README.md").read_bytes().strip()

    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names}
    assert {"fitflax", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md", "LICENSE", "Makefile"} <= tops
    assert not {name for name in tops if name.startswith(".")} - {".gitignore"} and not {"build", "dist", "runs"} & tops
    if shutil.which("git") is not None:  # A source distribution is not a clone: it lists no files, and may be tested without git.
        tracked = {name for name in run("git", "ls-files", "-z", cwd=ROOT).stdout.split("\0") if (ROOT / name).is_file() and not name.startswith(".ci/")}
        assert not tracked - names, tracked - names

    result = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, sdist, cwd=tmp_path, env=outside)
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / wheel.name) == files


def lowest(*extras: str) -> list[str]:
    """Returns all requirements at the lowest version that they allow; for those of jax, the lowest that jax 0.10.2 allows."""
    table = project()
    requirements = [*table["dependencies"], *(requirement for extra in extras for requirement in table["optional-dependencies"][extra])]
    return [*(requirement.replace(">=", "==") for requirement in requirements), "numpy==2.0.*", "scipy==1.14.*", "ml-dtypes==0.5.0"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("versions", ["lowest", "newest"])
def test_both_distributions_need_only_their_requirements_and_run_the_first_script(distributions, outside, tmp_path, versions: str):
    """Its time limit allows for a slow package index."""
    if versions == "lowest" and sys.version_info >= (3, 13):
        pytest.skip("the lowest versions have no wheels for this Python")
    python = make_venv(tmp_path / "venv")
    code = """
import importlib.metadata as metadata, json, fitflax
print(json.dumps({
    "version": [fitflax.__version__, metadata.version("fitflax")],
    "file": fitflax.__file__,
    "distributions": [distribution.metadata["Name"] for distribution in metadata.distributions()],
}))
"""
    wheel, sdist = distributions
    for options in ([wheel, *(lowest() if versions == "lowest" else [])], ["--no-deps", "--force-reinstall", sdist]):
        install(python, *options, env=outside)
        result = run(python, "-I", "-W", "error", "-c", code, cwd=tmp_path, env=outside)
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        assert found["version"] == [project()["version"]] * 2
        assert pathlib.Path(found["file"]).is_relative_to(tmp_path / "venv")
        assert not {distribution(name) for name in found["distributions"]} & {"tensorflow", "torch", "matplotlib", "pandas", "scikit-learn"}

    install(python, *(lowest("examples") if versions == "lowest" else project()["optional-dependencies"]["examples"]), env=outside)
    script = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    result = run(python, "-I", "-W", "error", "script.py", cwd=tmp_path, env=outside)
    assert result.returncode == 0 and result.stdout.endswith("(450, 10)\n"), result.stdout + result.stderr
    listed = run(python, "-I", "-W", "error", "-m", "fitflax", "checkpoints", "runs/mlp/checkpoints", "--verify", cwd=tmp_path, env=outside)
    assert listed.returncode == 0 and "val_accuracy" in listed.stdout, listed.stdout + listed.stderr
