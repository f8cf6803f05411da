"""Names that users choose, as names of files: inside their directory, different for different names, and unchanged if possible."""

import itertools
import pathlib

import pytest

from fitflax.storage.file_names import name_of_component, path_component, relative_path

ORDINARY = ["val", "dev_2", "night shift", "50%", "a.b", "...", ".hidden", "größe", "a\\b", "x" * 255, "~", "100%2f"]
UNSAFE = ["/", "/data/night", "../other", "..", ".", "a/b", "a//b", "a\0b", "a\nb", "a%2Fb", "%2E", "\ud800", "x" * 256, "x" * 300, "é" * 200, "a/" * 200]


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_name_stays_as_it_is(name):
    assert path_component(name) == relative_path(name) == name_of_component(name) == name


@pytest.mark.parametrize("name", UNSAFE)
def test_any_name_becomes_a_file_inside_its_directory(name, tmp_path):
    path = tmp_path / path_component(name)
    path.mkdir()
    assert path.resolve().parent == tmp_path.resolve() and [path] == list(tmp_path.iterdir())
    nested = tmp_path / "nested"
    (nested / relative_path(name)).mkdir(parents=True)
    assert (nested / relative_path(name)).resolve().is_relative_to(nested.resolve() / "") and (nested / relative_path(name)).resolve() != nested.resolve()


@pytest.mark.parametrize("make", [path_component, relative_path])
def test_different_names_stay_different(make):
    names = {"".join(parts) for count in range(1, 6) for parts in itertools.product(["/", ".", "%", "2", "F", "E", "5"], repeat=count)}
    names |= {*ORDINARY, *UNSAFE}
    assert len({pathlib.PurePath(make(name)) for name in names}) == len(names)


@pytest.mark.parametrize("name", [name for name in UNSAFE if len(name.encode(errors="surrogatepass")) < 200])
def test_the_name_is_read_from_the_component(name):
    assert name_of_component(path_component(name)) == name
