"""The programs that one run of the tests leaves for the next."""

import pathlib

import pytest
from jax._src import compilation_cache

from tests import compiled_programs


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    monkeypatch.setattr(compiled_programs, "directory", lambda: tmp_path / "kept")
    return tmp_path / "kept"


def written(directory: pathlib.Path, **programs: bytes) -> str:
    directory.mkdir()
    for name, content in programs.items():
        (directory / f"{name}-cache").write_bytes(content)
    return str(directory)


def test_complete_programs_are_kept_and_given_to_the_next_run(kept, tmp_path):
    whole = compilation_cache.compress_executable(b"program" * 1000)
    compiled_programs.keep(written(tmp_path / "first", whole=whole, truncated=whole[:-5], empty=b""))
    assert [path.name for path in kept.iterdir()] == ["whole-cache"]
    compiled_programs.take(written(tmp_path / "second"))
    assert (tmp_path / "second" / "whole-cache").read_bytes() == whole


def test_kept_programs_are_bounded(kept, tmp_path, monkeypatch):
    whole = compilation_cache.compress_executable(b"program")
    compiled_programs.keep(written(tmp_path / "first", old=whole))
    monkeypatch.setattr(compiled_programs, "MOST_BYTES", 1)
    compiled_programs.keep(written(tmp_path / "second", new=whole))
    assert [path.name for path in kept.iterdir()] == ["new-cache"]
