"""Locations of files: local paths, and URLs of object stores."""

from fitflax.storage.object_path import ObjectPath
from fitflax.storage.objects import ChangedError, StorageError
from fitflax.storage.urls import SCHEMES, Location, is_url, locate

__all__ = ["SCHEMES", "ChangedError", "Location", "ObjectPath", "StorageError", "is_url", "locate"]
