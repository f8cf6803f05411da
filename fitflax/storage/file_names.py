"""Makes names of files from names that users choose, such as those of validation sets and metrics.

Ordinary names stay as they are, and different names become different file names.
"""

import hashlib
import re

__all__ = ["name_of_component", "path_component", "relative_path"]

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
