"""Patterns of parameter paths: `backbone`, `encoder/*/kernel`, `**/bias`."""

import fnmatch
from collections.abc import Sequence

from fitflax.errors import FitflaxError, did_you_mean
from fitflax.leaves import listed

__all__ = ["as_patterns", "matching"]


def as_patterns(patterns: str | Sequence[str], *, owner: str, error: type[FitflaxError]) -> tuple[str, ...]:
    """Returns one or more patterns as a tuple; `owner` is the name of the function that takes them, for errors.

    >>> as_patterns("**/bias", owner="freeze()", error=FitflaxError)
    ('**/bias',)
    """
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns) if isinstance(patterns, Sequence) else ()
    if not wanted or not all(isinstance(pattern, str) and pattern for pattern in wanted):
        raise error(f"{owner}: `patterns` must be a pattern of paths, such as 'backbone' or '**/bias', or a sequence of them. Received: {patterns!r}.")
    return wanted


def matching(paths: Sequence[str], patterns: Sequence[str], *, owner: str, error: type[FitflaxError]) -> list[bool]:
    """Returns for each path whether a pattern matches the path or one of its parents.

    `*`, `?` and `[abc]` match within one name; a name `**` matches any number of names. A pattern that matches no path is an error.

    >>> matching(["encoder/kernel", "encoder/bias", "head/kernel"], ["encoder", "**/bias"], owner="freeze()", error=FitflaxError)
    [True, True, False]
    """
    for pattern in patterns:
        if not any(_matches(path.split("/"), pattern.split("/")) for path in paths):
            hint = " Leave out 'params/'." if pattern.startswith("params/") else did_you_mean(pattern, [*paths, *_parents(paths)])
            raise error(f"{owner}: {pattern!r} matches no parameter.{hint} Parameters: {listed(paths)}.")
    return [any(_matches(path.split("/"), pattern.split("/")) for pattern in patterns) for path in paths]


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether the pattern matches the path or one of its parents, both split into names."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(path[start:], pattern[1:]) for start in range(len(path)))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _parents(paths: Sequence[str]) -> list[str]:
    return sorted({"/".join(path.split("/")[:end]) for path in paths for end in range(1, path.count("/") + 1)})
