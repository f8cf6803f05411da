"""Locations of files: local paths, and URLs of object stores."""

from fitflax.storage.object_store import ChangedError, ObjectPath, StorageError
from fitflax.storage.paths import SCHEMES, Location, absolute, is_url, locate

__all__ = ["SCHEMES", "ChangedError", "Location", "ObjectPath", "StorageError", "absolute", "is_url", "locate"]
