"""Parses locations of files: a local path or a URL. A URL is never mistaken for the name of a local directory."""

import os
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitflax.errors import FitflaxError
from fitflax.storage.object_path import ObjectPath
from fitflax.storage.objects import open_bucket

__all__ = ["SCHEMES", "Location", "is_url", "locate"]

SCHEMES = ("s3", "gs", "az", "file", "memory")
"""The supported schemes of URLs."""

Location = Path | ObjectPath
"""A location of files."""

# At least two letters; one is a drive. pathlib turns "s3://bucket" into "s3:/bucket".
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/{1,2})")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, even if `pathlib` has removed a slash."""
    return _URL.match(os.fspath(path)) is not None


def locate(path: str | os.PathLike[str], *, owner: str, error: type[FitflaxError], options: Mapping[str, Any] | None = None) -> Location:
    """Returns the location of a path or a URL, without accessing it.

    Raises `error` if a URL is not supported or not valid; `owner` is the function that takes it, for the message, such as `ModelCheckpoint(directory=...)`.

    >>> locate("file:///tmp/run%201", owner="save(path)", error=FitflaxError)
    PosixPath('/tmp/run 1')
    >>> str(locate("memory://name/run/", owner="save(path)", error=FitflaxError))
    'memory://name/run'
    """
    if isinstance(path, ObjectPath):
        return path
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None:
        return Path(path)
    scheme = match["scheme"].lower()
    if scheme not in SCHEMES:
        raise error(
            f"{owner} takes a local path or a URL that begins with {', '.join(f'{name}://' for name in SCHEMES)}. Object stores need "
            f"pip install 'fitflax[cloud]'. Received: {text!r}."
        )
    if match["slashes"] == "/" and scheme != "file":
        raise error(f"{owner}: pathlib removed a slash from this URL. Pass it as a string: {scheme}://{text[match.end() :]}. Received: {text!r}.")
    parts = urllib.parse.urlsplit(text)
    if scheme == "file":
        if match["slashes"] == "//" and parts.netloc not in ("", "localhost"):
            raise error(f"{owner}: a file:// URL needs three slashes. Use file:///{parts.netloc}{parts.path}. Received: {text!r}.")
        return Path(urllib.parse.unquote(parts.path))
    # Keys are not unquoted, as in other tools: no character is special.
    bucket, _, key = text[match.end() :].partition("/")
    key = key.strip("/")
    if not bucket or "//" in key or {".", ".."} & set(key.split("/")):
        raise error(f"{owner} takes a URL of the form {scheme}://bucket/prefix. Received: {text!r}.")
    return ObjectPath(open_bucket(scheme, bucket, options), key)
