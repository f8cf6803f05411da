"""Locations of files, as local paths or URLs, and names of files made from names that users choose, such as those of validation sets and metrics.

A URL is never mistaken for the name of a local directory. In file names, ordinary names stay as they are, and different names become different file names.
"""

import hashlib
import os
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitflax.errors import FitflaxError
from fitflax.storage.object_store import ObjectPath, open_bucket

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
        if "?" in text or "#" in text:  # They would end the path.
            raise error(f"{owner}: in a file:// URL, write # as %23 and ? as %3F. Received: {text!r}.")
        return Path(urllib.parse.unquote(parts.path))
    # Keys are not unquoted, as in other tools: no character is special.
    bucket, _, key = text[match.end() :].partition("/")
    key = key.strip("/")
    if not bucket or "//" in key or {".", ".."} & set(key.split("/")):
        raise error(f"{owner} takes a URL of the form {scheme}://bucket/prefix. Received: {text!r}.")
    return ObjectPath(open_bucket(scheme, bucket, options), key)


def absolute(location: Location) -> Location:
    """Returns a location in a form that is the same for all spellings of a path. Symbolic links are not resolved.

    >>> absolute(Path("runs/../runs/a")) == absolute(Path.cwd() / "runs/a")
    True
    """
    return location if isinstance(location, ObjectPath) else Path(os.path.abspath(location))


# Slashes, control characters and unpaired surrogates; and escapes, so that a name cannot equal the result for another one.
_UNSAFE = re.compile(r"[/\x00-\x1f\x7f\ud800-\udfff]|%(?=[0-9A-F]{2})")
_ESCAPES = re.compile(r"(?:%[0-9A-F]{2})+")
# File systems allow 255 bytes for a component.
_MAX_BYTES = 255
_DIGEST_LENGTH = 16


def path_component(name: str) -> str:
    """Returns a nonempty name as a single component of a path. What a component cannot contain is escaped as in URLs.

    A name that is too long is truncated, and a digest of the name is appended.

    >>> [path_component(name) for name in ("val", "night 50%", "../other", "/data", "..", "a%2F")]
    ['val', 'night 50%', '..%2Fother', '%2Fdata', '%2E%2E', 'a%252F']
    """
    escaped = name.replace(".", "%2E") if name in (".", "..") else _UNSAFE.sub(_escape, name)
    if len(escaped.encode()) <= _MAX_BYTES:
        return escaped
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    return f"{escaped.encode()[: _MAX_BYTES - 2 * _DIGEST_LENGTH].decode(errors='ignore')}~{digest}"


def name_of_component(component: str) -> str:
    """Returns the name from the result of `path_component`, unless it was truncated.

    >>> [name_of_component(path_component(name)) for name in ("val", "../other", "a%2F")]
    ['val', '../other', 'a%2F']
    """
    return _ESCAPES.sub(lambda match: bytes.fromhex(match[0].replace("%", "")).decode(errors="surrogatepass"), component)


def relative_path(name: str) -> str:
    """Returns a name with slashes as a relative path. One that would leave its directory, or has empty components, becomes a single component.

    >>> [relative_path(name) for name in ("summaries/layer/mean", "../other_loss", "/data/loss", "a//b")]
    ['summaries/layer/mean', '..%2Fother_loss', '%2Fdata%2Floss', 'a%2F%2Fb']
    """
    parts = name.split("/")
    return path_component(name) if {"", ".", ".."} & set(parts) else "/".join(map(path_component, parts))


def _escape(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode(errors="surrogatepass"))
