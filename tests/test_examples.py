"""The examples, shrunk."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits_learns_and_goes_on_where_it_was(tmp_path):
    digits = load("digits")
    once = digits.main(tmp_path / "once", epochs=4, features=8, verbose=0)
    digits.main(tmp_path / "twice", epochs=2, features=8, verbose=0)
    assert digits.main(tmp_path / "twice", epochs=4, features=8, verbose=0) == once > 0.85


def test_every_example_is_short_and_has_a_main():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < 150 and "\ndef main(" in text, path.name


@pytest.mark.slow
def test_the_demo_ends_with_its_directories_and_an_accuracy_of_at_least_0_97(tmp_path, process_env):
    script = [sys.executable, str(EXAMPLES / "digits.py")]
    env = process_env | {"JAX_NUM_CPU_DEVICES": "1"}
    lines = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    assert lines[-3] == "checkpoints: runs/digits/checkpoints"
    assert lines[-2].startswith("best checkpoint: runs/digits/best/step_")
    assert float(re.fullmatch(r"test accuracy: (0\.9\d\d)", lines[-1])[1]) >= 0.97
