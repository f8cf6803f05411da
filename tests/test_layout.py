"""The shape of the code: layers, cycles, sizes, names, `__all__` and the examples in docstrings. Sources are read with `ast`; nothing here runs a step."""

import ast
import functools
import graphlib
import importlib
import inspect
import io
import pathlib
import shutil
import subprocess
import tokenize
import types
from collections.abc import Iterator

import pytest

from tests import mutants

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fitflax"

# A module imports only from its own layer or those before it. The first part of the name after `fitflax.` decides; the package itself is "__init__".
LAYERS = (
    {"errors", "keras_names", "leaves", "triggers", "background"},
    {"storage"},
    {"state", "logs", "losses", "metrics", "optimizers"},
    {"data"},
    {"parallel"},
    {"models", "adapters"},
    {"steps"},
    {"checkpoints"},
    {"callbacks"},
    {"loops"},
    {"diagnostics", "exporting"},
    {"trainer"},
    {"integrations"},
    {"commands"},
    {"__init__", "__main__", "estimator_trainer", "sklearn"},
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
MAY_IMPORT_TRAINER = {"fitflax", "fitflax.__main__", "fitflax.estimator_trainer", "fitflax.sklearn"}

SUBMODULES = ("callbacks", "losses", "metrics", "optimizers", "data", "parallel", "checkpoints", "diagnostics", "adapters", "errors")
PUBLIC_MODULES = ("fitflax", *(f"fitflax.{name}" for name in SUBMODULES), "fitflax.integrations.torch_layers")
ROOT_NAMES = {
    *("Trainer", "TrainState", "InferenceState", "Checkpoint", "Summary", "History", "TrainLoop", "EvalLoop"),
    *("every", "at", "first", "serial", "enable_compilation_cache", "__version__"),
    *SUBMODULES,
}
# "module:name" -> why it has no underscore and is not in `__all__`: what the library's own modules share, and users do not need.
INTERNAL_NAMES = {
    "fitflax.errors:did_you_mean": "words the messages of other modules",
    "fitflax.errors:chain_of": "walks through the causes of an error for other modules",
    "fitflax.errors:integer_of": "checks the arguments of other modules",
    "fitflax.errors:is_integer": "checks the arguments of other modules",
    "fitflax.errors:is_of_debugger": "tells other modules what not to wrap",
    "fitflax.errors:no_attribute": "words the messages of other modules",
    "fitflax.errors:warn": "gives the warnings of other modules",
    "fitflax.optimizers:ONLY_RATE": "a name for those who log rates",
    "fitflax.optimizers:replace_by_path": "keeps hyperparameters when a state is replaced",
    "fitflax.optimizers:settable_by_path": "keeps hyperparameters when a state is replaced",
    "fitflax.optimizers:with_hyperparams": "sets hyperparameters, the optimizer's and the module's",
    "fitflax.losses:loss_direction": "tells metrics which functions are losses",
    "fitflax.losses:takes_labels": "tells steps what to check",
    "fitflax.losses:takes_logits": "tells steps what to check",
    "fitflax.metrics:resolve": "makes metrics of what users pass to `compile`",
}

COMPILING = {"jit", "pjit", "pmap", "shard_map", "donate_argnums", "donate_argnames"}
VAGUE_FILE_WORDS = {"util", "utils", "helper", "helpers", "manager", "managers", "misc", "tmp"}
VAGUE_CLASS_ENDINGS = ("Util", "Utils", "Helper", "Helpers", "Manager")

MAX_FUNCTION_LINES = 70  # of code: no blank lines, comments or docstrings
MAX_MODULE_LINES = 600
# "fitflax/loops/training_loop.py" or "fitflax/loops/training_loop.py:TrainLoop.run" -> why it is longer than that.
ALLOWED_LONG: dict[str, str] = {
    "fitflax/trainer.py": "the facade: more than half of it is the docstrings of what users call",
}


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for name, path in SOURCES.items()}


def where(module: str, node: ast.AST) -> str:
    return f"{SOURCES[module].relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def top_level(module: str) -> str:
    """`errors` for `fitflax.errors`, `data` for `fitflax.data.arrays`, `__init__` for `fitflax`."""
    return module.split(".")[1] if "." in module else "__init__"


def fitflax_imports(module: str, tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the modules of fitflax that `tree` imports anywhere; for `from a import b`, that is `a.b` if it is a module."""
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names if alias.name.split(".")[0] == "fitflax")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            if base.split(".")[0] == "fitflax":
                yield from ((f"{base}.{alias.name}" if f"{base}.{alias.name}" in SOURCES else base, node) for alias in node.names)


@functools.cache
def imports() -> list[tuple[str, str, ast.stmt]]:
    return [(module, target, node) for module, tree in trees().items() for target, node in fitflax_imports(module, tree)]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        name = f"{prefix}{node.name}." if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else prefix
        yield from functions(node, name)


def code_lines(source: str) -> set[int]:
    """Returns the numbers of the lines that hold code: not blank, not a comment, not in a docstring."""
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def compiling_names(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields the names that compile, shard over devices or donate; strings and comments are ignored."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.keyword):
            names = [node.arg or ""]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [part for alias in node.names for part in alias.name.split(".")]
        else:
            continue
        yield from ((name, node) for name in names if name in COMPILING)


def too_long(module: str) -> dict[str, str]:
    path = SOURCES[module]
    source = path.read_text(encoding="utf-8")
    file = path.relative_to(ROOT).as_posix()
    faults = {}
    if (length := len(source.splitlines())) > MAX_MODULE_LINES:
        faults[file] = f"{file}: {length} lines, at most {MAX_MODULE_LINES}"
    code = code_lines(source)
    for name, node in functions(trees()[module]):
        if (length := len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))) > MAX_FUNCTION_LINES:
            faults[f"{file}:{name}"] = f"{file}:{node.lineno} {name}: {length} lines of code, at most {MAX_FUNCTION_LINES}"
    return faults


def defined_in(module: types.ModuleType) -> dict[str, object]:
    """Returns the classes and functions that `module`, or for a package one of its modules, defines and that are available from `module` itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
        and (value.__module__ == module.__name__ or (value.__module__ or "").startswith(module.__name__ + "."))
    }


def test_every_module_has_a_layer():
    unknown = sorted({top_level(module) for module in SOURCES} - set(LAYER_OF))
    assert not unknown, f"not in LAYERS (nor in docs/design.md, where they belong, too): {unknown}"


def test_modules_import_from_their_own_layer_or_those_before_it():
    faults = [
        f"{where(module, node)} {top_level(module)} imports {target}"
        for module, target, node in imports()
        if LAYER_OF.get(top_level(target), len(LAYERS)) > LAYER_OF.get(top_level(module), len(LAYERS))
    ]
    assert not faults, "\n".join(faults)


def test_only_the_public_modules_import_trainer():
    faults = [where(module, node) for module, target, node in imports() if target == "fitflax.trainer" and module not in MAY_IMPORT_TRAINER]
    assert not faults, "\n".join(faults)


def test_no_modules_import_each_other_in_a_cycle():
    graph: dict[str, set[str]] = {module: set() for module in SOURCES}
    for module, target, _ in imports():
        graph[module].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_no_function_imports_a_module_of_fitflax():
    allowed = {("adapt_model", "fitflax.models.nnx_model")}  # It imports flax.nnx, which linen users do not need.
    faults = {
        f"{where(module, node)} {name} imports {target}"
        for module, tree in trees().items()
        for name, function in functions(tree)
        for target, node in fitflax_imports(module, function)
        if (name, target) not in allowed
    }
    assert not faults, "\n".join(sorted(faults))


def test_only_parallel_compiles_shards_and_donates():
    faults = [f"{where(module, node)} {name}" for module, tree in trees().items() if top_level(module) != "parallel" for name, node in compiling_names(tree)]
    assert not faults, "\n".join(faults)


def test_names_of_files_and_classes_are_not_vague():
    faults = [module for module in SOURCES if VAGUE_FILE_WORDS.intersection(module.rpartition(".")[2].split("_"))]
    for module, tree in trees().items():
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        faults += [f"{where(module, node)} {node.name}" for node in classes if node.name.endswith(VAGUE_CLASS_ENDINGS)]
    assert not faults, "\n".join(faults)


def test_modules_have_docstrings():
    faults = [module for module, tree in trees().items() if not ast.get_docstring(tree)]
    assert not faults, f"without a docstring: {faults}"


@pytest.mark.slow
def test_functions_and_modules_are_short():
    faults = [text for module in SOURCES for key, text in too_long(module).items() if key not in ALLOWED_LONG]
    assert not faults, "\n".join(faults)


@pytest.mark.slow
def test_everything_that_is_allowed_to_be_long_is_long():
    found = {key for module in SOURCES for key in too_long(module)}
    assert not set(ALLOWED_LONG) - found, f"take out of ALLOWED_LONG: {sorted(set(ALLOWED_LONG) - found)}"


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_all_equals_what_is_importable(name: str):
    module = importlib.import_module(name)
    listed = list(module.__all__)
    assert len(listed) == len(set(listed)), "a name twice in __all__"
    missing = [entry for entry in listed if not hasattr(module, entry)]
    unlisted = [entry for entry in defined_in(module) if entry not in listed and f"{name}:{entry}" not in INTERNAL_NAMES]
    underscored = [entry for entry in listed if entry.startswith("_") and entry != "__version__"]
    assert (missing, unlisted, underscored) == ([], [], []), f"{name}: in __all__ but missing, importable but not in __all__, private but in __all__"


def test_fitflax_has_only_the_names_of_its_design():
    extra = set(importlib.import_module("fitflax").__all__) - ROOT_NAMES
    assert not extra, f"not in ROOT_NAMES: {sorted(extra)}"


def test_only_the_errors_module_calls_warnings_warn():
    faults = [
        where(module, node)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if module != "fitflax.errors" and isinstance(node, ast.Attribute) and ast.unparse(node) == "warnings.warn"
    ]
    assert not faults, f"use fitflax.errors.warn, which finds the user's line: {faults}"


def test_internal_names_exist_and_have_reasons():
    faults = [key for key, reason in INTERNAL_NAMES.items() if not reason or not hasattr(importlib.import_module(key.split(":")[0]), key.split(":")[1])]
    assert not faults, f"take out of INTERNAL_NAMES: {faults}"


def test_a_name_has_one_public_path():
    paths: dict[int, list[str]] = {}
    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        for entry in module.__all__:
            value = getattr(module, entry)
            if inspect.isclass(value) or inspect.isroutine(value):
                paths.setdefault(id(value), []).append(f"{name}.{entry}")
    twice = [entries for entries in paths.values() if len(entries) > 1]
    assert not twice, f"public under two names: {twice}"


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_public_names_have_docstrings_with_an_example(name: str):
    """The examples are run by pytest's --doctest-modules, which collects fitflax/."""
    module = importlib.import_module(name)
    faults = []
    for entry in module.__all__:
        value = getattr(module, entry)
        # `__doc__` and not `inspect.getdoc`: a docstring that a base class wrote does not count.
        doc = getattr(value, "__doc__", None) or ""
        if inspect.ismodule(value):
            if not doc.strip():
                faults.append(f"{entry}: no docstring")
        elif inspect.isclass(value) or callable(value):
            if not doc.strip():
                faults.append(f"{entry}: no docstring")
            elif ">>> " not in doc:
                faults.append(f"{entry}: no example")
            elif "+SKIP" in doc:
                faults.append(f"{entry}: an example that does not run")
    assert not faults, f"{name}:\n" + "\n".join(faults)


def test_the_files_that_mutants_are_made_from_and_their_tests_exist():
    calls = [call for several in mutants.TESTS.values() for call in several]
    paths = {*mutants.TESTS, *(word for call in calls for word in call.split() if word.endswith(".py"))}
    assert sorted(path for path in paths if not (ROOT / path).is_file()) == []


def test_no_large_file_is_tracked():
    """For example, what a killed benchmark left: a repository never gets rid of it."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    large = [str(path) for path in paths if path.is_file() and path.stat().st_size > 2**20]
    assert not large, large
