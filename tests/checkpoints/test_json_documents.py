"""JSON files on disk: when they are durable, and what a disk failure leaves."""

import enum
import errno
import importlib.metadata
import math
import os
import stat

import pytest

from fitflax.checkpoints.json_documents import library_versions, read_document, replace_document
from fitflax.errors import CheckpointError, CorruptCheckpointError


def test_a_document_is_complete_when_it_is_synced_to_disk(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    replace_document(tmp_path / "one.json", {"value": 1}, is_durable=False)
    assert sizes == [(tmp_path / "one.json").stat().st_size]


@pytest.mark.parametrize(("options", "kinds"), [({}, ["file", "directory"]), ({"is_durable": False}, ["file"])])
def test_a_replaced_document_survives_a_power_failure_unless_is_durable_is_false(options, kinds, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"))
    replace_document(tmp_path / "one.json", {"value": 1}, **options)
    assert synced == kinds and read_document(tmp_path / "one.json")["value"] == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_document_that_cannot_be_replaced_stays_and_no_other_file_is_left(call, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_document(tmp_path / "one.json", {"value": 1})
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left on device"):
        replace_document(tmp_path / "one.json", {"value": 2})
    assert os.listdir(tmp_path) == ["one.json"] and read_document(tmp_path / "one.json")["value"] == 1


def test_a_document_that_cannot_be_read_from_disk_is_not_reported_as_damaged(tmp_path):
    with pytest.raises(CheckpointError, match=r"could not be read: Is a directory\.$") as caught:
        read_document(tmp_path)
    assert not isinstance(caught.value, CorruptCheckpointError)


class Rate(float):
    """A custom number type."""


class Level(enum.IntEnum):
    HIGH = 3


def test_custom_number_types_are_written_as_plain_numbers(tmp_path):
    replace_document(tmp_path / "one.json", {"rate": Rate(0.5), "worst": Rate("nan"), "level": Level.HIGH})
    values = read_document(tmp_path / "one.json")
    assert (values["rate"], math.isnan(values["worst"]), values["level"]) == (0.5, True, 3)
    assert '"level": 3' in (tmp_path / "one.json").read_text()


def test_a_library_that_is_on_the_path_but_not_installed_has_an_unknown_version(monkeypatch):
    def find(name):
        if name == "fitflax":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(importlib.metadata, "version", find)
    versions = library_versions.__wrapped__()
    assert versions["fitflax"] == "unknown" and versions["jax"] == "1.2.3"
