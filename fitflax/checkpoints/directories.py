"""A directory of checkpoints on a file system (`LocalDirectory`) or in a bucket (`ObjectDirectory`), as used by `CheckpointStore`.

A directory whose name does not begin with `.` is a complete checkpoint. Every change is atomic: if a process dies, the old or the new contents exist, and
`recover` removes leftovers. On a file system:

    step_00002000/                             a complete checkpoint
    retention.json                             the steps that each owner wants, and steps whose owners are unknown
    .run.json                                  the run that the directory belongs to, the process that claimed it, and whether the run has saved here
    .lock                                      locked while a run uses the directory (`fitflax.storage.lock`)
    .step_00002000.tmp-PROCESS-RANDOM/         being written; a leftover if its process is dead
    .replaced-step_00002000.RANDOM/            replaced by a new checkpoint of the same name; restored if that is missing
    .old-FROM.RANDOM/step_00002000/ ...        set aside by `claim(overwrite=True)` (FROM is 0) or `drop_after(step)` (FROM is step + 1), with a copy of
                                               `retention.json`. Deleted once there is a checkpoint of step FROM or later; restored, with
                                               `retention.json`, if there are no checkpoints at all
    .undo-RANDOM/step_00002000/ ...            partly set aside, or partly restored; to be restored
    .trash-RANDOM/                             being deleted

A bucket has no renames, appends or locks. `docs/checkpoint-format.md` explains the protocol:

    step_00002000/state-RANDOM.00000 ...       the state, in parts; each attempt to save has its own names
    step_00002000/metadata.json                written last, conditionally; the checkpoint exists from then on
    .lease.json                                the user of the directory (`fitflax.storage.lock`)
    .old-FROM.RANDOM.json                      lists checkpoints that are set aside, by step and version, with a copy of `retention.json`; deleting it
                                               restores them
"""

import bisect
import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from fitflax.checkpoints.checkpoint_files import METADATA_FILE, PARTIAL_EPOCH_FILE, read_metadata
from fitflax.checkpoints.json_documents import PROCESS, fsync_directory, read_document, replace_document, write_file
from fitflax.checkpoints.msgpack_format import PART
from fitflax.checkpoints.retention import RETENTION_FILE
from fitflax.errors import CheckpointError, CorruptCheckpointError, DirectoryInUseError
from fitflax.storage import ChangedError, Location, ObjectPath
from fitflax.storage.lock import check_held
from fitflax.storage.object_store import ObjectInfo

_STEP = re.compile(r"step_(\d{8}|[1-9]\d{8,})")
_OLD = re.compile(r"\.old-(?P<since>\d+)\.[0-9a-f]+")
_UNDO = re.compile(r"\.undo-[0-9a-f]+")
_REPLACED = re.compile(r"\.replaced-(?P<name>.+)\.[0-9a-f]+")
_LITTER = re.compile(r"\.(?:trash-[0-9a-f]+|(?:step_\d{8,}|run\.json|retention\.json)\.tmp-(?P<process>[0-9a-f]+)-[0-9a-f]+)")
# The age up to which a listing is reused. The modification time of the directory shows changes by other programs, except during a change by this process.
_MAX_AGE_SECONDS = 1.0


Write = Callable[..., None]
"""`write_checkpoint` with all arguments but the directory and, for a bucket, `commit`."""


class SetAside(NamedTuple):
    """Checkpoints that were set aside: their directory, or the note that lists them, and the step from which a new checkpoint supersedes them."""

    place: Location
    since: int


class Contents(NamedTuple):
    """The contents of a directory: the steps of complete checkpoints in ascending order, and what is set aside."""

    steps: list[int]
    set_aside: list[SetAside]


def checkpoint_name(step: int) -> str:
    """Returns the name of a checkpoint in its directory."""
    return f"step_{step:08d}"


@contextlib.contextmanager
def disk_errors(doing: str, path: Location) -> Iterator[None]:
    """Converts an `OSError` of the body to a `CheckpointError` that says what could not be done."""
    try:
        yield
    except CheckpointError:
        raise  # Some are OSErrors, too.
    except OSError as error:
        raise CheckpointError(f"Could not {doing} {path}: {str(error).rstrip('.')}. Earlier checkpoints are intact.") from error


class LocalDirectory:
    """A directory on a file system, where renames are atomic. Methods raise `OSError` if the disk fails.

    With thousands of checkpoints, listing them takes as long as writing a small one. So the last listing is updated with each change that this process makes,
    and is reused for up to a second, unless the modification time of the directory shows that another program has changed it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listed: Contents | None = None
        self._listed_at = 0.0
        self._version: tuple[int, int] | None = None  # Inode and modification time.

    def make(self) -> None:
        """Creates the directory if it does not exist."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise DirectoryInUseError(f"{self.path} cannot be created, because it or one of its parents is a file. Choose another directory.") from error

    def contents(self) -> Contents:
        """Lists the existing checkpoints."""
        steps, set_aside = [], []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            for entry in entries:
                if match := _STEP.fullmatch(entry.name):
                    steps += [int(match[1])] if entry.is_dir() else []
                elif match := _OLD.fullmatch(entry.name):
                    set_aside.append(SetAside(self.path / entry.name, int(match["since"])))
        return Contents(sorted(steps), sorted(set_aside))

    def recent_contents(self) -> Contents:
        """Returns the existing checkpoints, possibly from the last listing, if it is less than a second old and nothing else has changed the directory."""
        if self._listed is not None and time.monotonic() - self._listed_at <= _MAX_AGE_SECONDS and self._current_version() == self._version:
            return self._listed
        self._listed, self._listed_at = None, time.monotonic()
        version = self._stamp()  # Before the listing, so that it contains every change up to this version.
        contents = self.contents()
        if version is not None and not contents.set_aside:
            self._listed, self._version = contents, version
        return contents

    def _current_version(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = self.path.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def _stamp(self) -> tuple[int, int] | None:
        """Gives the directory a unique modification time, because clocks of file systems are coarse. Returns the new version, or `None` if this fails.

        The time is up to a microsecond earlier than the change, by a random amount, because two processes may change a directory in the same tick.
        """
        with contextlib.suppress(OSError):  # The directory may belong to another user.
            status = self.path.stat()
            os.utime(self.path, ns=(status.st_atime_ns, status.st_mtime_ns - 1 - secrets.randbelow(1000)))
            return self._current_version()
        return None

    @contextlib.contextmanager
    def _changing(self, *, added: int | None = None, removed: int | None = None) -> Iterator[None]:
        """Updates the listing with the change that the block makes."""
        listed, is_known = self._listed, self._current_version() == self._version
        self._listed = None
        yield
        if listed is None or not is_known:
            return
        steps = [step for step in listed.steps if step not in (added, removed)]
        if added is not None:
            bisect.insort(steps, added)
        if (version := self._stamp()) is not None:
            self._listed, self._version = Contents(steps, []), version

    def size_and_time(self, step: int) -> tuple[int, float]:
        """Returns the size of a checkpoint in bytes, and when it was written, in seconds since 1970."""
        path = self.path / checkpoint_name(step)
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()), path.stat().st_mtime

    def write(self, step: int, write: Write) -> None:
        """Writes a checkpoint; an older one of the same step is replaced once it is complete."""
        with self._changing(added=step):
            write_in_place(self.path / checkpoint_name(step), write)

    def delete(self, step: int) -> None:
        """Deletes a checkpoint; it is renamed first, so that a partly deleted checkpoint is never listed."""
        with self._changing(removed=step), contextlib.suppress(FileNotFoundError):  # Another program may have deleted it.
            _delete(self.path / checkpoint_name(step))

    def set_aside(self, steps: list[int], *, since: int) -> None:
        """Hides all of the checkpoints or none."""
        undo = self.path / f".undo-{secrets.token_hex(4)}"
        try:
            undo.mkdir()
            self._copy_retention(undo)
            for name in map(checkpoint_name, steps):
                os.rename(self.path / name, undo / name)
            fsync_directory(undo)
            os.rename(undo, self.path / f".old-{since}.{secrets.token_hex(4)}")
            fsync_directory(self.path)
        except BaseException:
            with contextlib.suppress(OSError):  # Otherwise, recover() does it.
                self._undo(undo)
            raise

    def _copy_retention(self, undo: Path) -> None:
        """Copies `retention.json` into a directory, completely or not at all."""
        temporary = self.path / f".{RETENTION_FILE}.tmp-{PROCESS}-{secrets.token_hex(4)}"
        try:
            write_file(temporary, [(self.path / RETENTION_FILE).read_bytes()])
            os.replace(temporary, undo / RETENTION_FILE)
        except FileNotFoundError:
            pass  # Nothing was saved yet, or the user has removed it.
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def put_back(self, aside: SetAside) -> None:
        """Restores all checkpoints that were set aside together, or none, and `retention.json`, which a run that died in its first save has replaced."""
        if not (Path(aside.place) / RETENTION_FILE).exists():
            (self.path / RETENTION_FILE).unlink(missing_ok=True)  # It is not known which ones are wanted, so all are kept.
        undo = self.path / f".undo-{secrets.token_hex(4)}"
        os.rename(aside.place, undo)  # Without this, if the process died in `_undo`, the restored checkpoints would supersede the others.
        self._undo(undo)

    def _undo(self, undo: Path) -> None:
        for entry in sorted(undo.iterdir()):
            if entry.name == RETENTION_FILE:
                os.replace(entry, self.path / entry.name)
            else:
                put_back(entry, self.path / entry.name)
        undo.rmdir()

    def delete_set_aside(self, aside: SetAside) -> None:
        """Deletes checkpoints that were set aside."""
        _delete(Path(aside.place))

    def recover(self, *, is_alone: bool) -> None:
        """Finishes or undoes what a process left incomplete when it died. With `is_alone`, this process is not writing here either."""
        for entry in sorted(self.path.iterdir()) if self.path.is_dir() else []:
            litter = _LITTER.fullmatch(entry.name)
            if litter and (is_alone or litter["process"] != PROCESS):
                _delete(entry)
            elif replaced := _REPLACED.fullmatch(entry.name):
                put_back(entry, self.path / replaced["name"])
            elif _UNDO.fullmatch(entry.name):
                self._undo(entry)

    def version(self, name: str) -> object:
        """Returns an identifier of the current version of a note. Raises `FileNotFoundError` if there is none."""
        status = (self.path / name).stat()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def write_note(self, name: str, values: Mapping[str, Any], *, is_durable: bool = True) -> None:
        """Replaces one of the directory's notes."""
        with self._changing():
            replace_document(self.path / name, values, is_durable=is_durable)


# Renames and deletions. If the process dies between any two of them, no complete checkpoint is lost.


def write_in_place(path: Path, write: Write) -> None:
    """Writes a checkpoint next to `path`, and renames it once it is on the disk. Then the older one is deleted. If it raises, `path` is unchanged."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, not a checkpoint. Remove it, or choose another directory.")
    temporary = path.parent / f".{path.name}.tmp-{PROCESS}-{secrets.token_hex(4)}"
    try:
        temporary.mkdir()
        write(temporary)
        aside = _swap_in(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.rmdir()  # If it is empty: unlike rmtree, this needs no file descriptor.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if aside is not None:
        # The new checkpoint is complete, so this is not a failure: recover() removes the rest.
        with contextlib.suppress(OSError):
            _delete(aside)


def _swap_in(temporary: Path, path: Path) -> Path | None:
    """Renames `temporary` to `path` durably, or leaves both unchanged; returns the new path of the previous contents."""
    aside = path.parent / f".replaced-{path.name}.{secrets.token_hex(4)}" if path.exists() else None
    try:
        if aside is not None:
            os.rename(path, aside)
        os.rename(temporary, path)
        fsync_directory(path.parent)
    except BaseException:
        # If this fails too, recover() restores `aside`. Ctrl-C may come after either rename.
        with contextlib.suppress(OSError):
            if not temporary.exists():
                os.rename(path, temporary)
            if aside is not None and aside.exists():
                os.rename(aside, path)
        raise
    return aside


def replaced_by(path: Path) -> list[Path]:
    """Returns earlier checkpoints at `path` that were renamed to make room for a new one, and still exist because a process died before it deleted them."""
    entries = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    return [entry for entry in entries if (match := _REPLACED.fullmatch(entry.name)) and match["name"] == path.name]


def put_back(entry: Path, path: Path) -> None:
    """Renames `entry` to `path`, or deletes it if its replacement exists."""
    if path.exists():
        _delete(entry)
    else:
        os.rename(entry, path)
        fsync_directory(path.parent)


def _delete(entry: Path) -> None:
    """Deletes a file or directory. It is hidden first, so that a partly deleted checkpoint is not taken for a complete one."""
    trash = entry.parent / f".trash-{secrets.token_hex(4)}"
    os.rename(entry, trash)
    if trash.is_dir() and not trash.is_symlink():
        shutil.rmtree(trash)
    else:
        trash.unlink()


class ObjectDirectory:
    """A directory of checkpoints below a prefix in a bucket, with the methods of `LocalDirectory`. They raise `StorageError` if the store fails."""

    def __init__(self, path: ObjectPath) -> None:
        self.path = path

    def make(self) -> None:
        """Prefixes need not be created."""

    def _objects_by_step(self) -> tuple[dict[int, list[ObjectInfo]], list[SetAside]]:
        """Returns the objects of checkpoints by step, and the notes of checkpoints that are set aside."""
        by_step: dict[int, list[ObjectInfo]] = {}
        asides = []
        for path, info in self.path.named_objects():
            name, _, rest = path.partition("/")
            if rest and (match := _STEP.fullmatch(name)):
                by_step.setdefault(int(match[1]), []).append(info)
            elif not rest and name.endswith(".json") and (match := _OLD.fullmatch(name.removesuffix(".json"))):
                asides.append(SetAside(self.path / name, int(match["since"])))
        return by_step, asides

    def contents(self) -> Contents:
        """Lists the existing checkpoints."""
        by_step, asides = self._objects_by_step()
        hidden = {(int(step), tag) for aside in asides for step, tag in _read_set_aside(aside)["checkpoints"].items()}
        return Contents(sorted(step for step, tag in _tags(by_step).items() if (step, tag) not in hidden), asides)

    recent_contents = contents

    def size_and_time(self, step: int) -> tuple[int, float]:
        """Returns the size of a checkpoint in bytes, and when it was written, in seconds since 1970."""
        objects = list((self.path / checkpoint_name(step)).objects())
        return sum(info.st_size for info in objects), max((info.st_mtime for info in objects if info.key.endswith(METADATA_FILE)), default=0.0)

    def write(self, step: int, write: Write) -> None:
        """Writes a checkpoint; an older one of the same step is replaced once it is complete."""
        write_to_bucket(self.path / checkpoint_name(step), write, before_commit=lambda: check_held(self.path))

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, `metadata.json` first, so that a partly deleted checkpoint is never listed."""
        place = self.path / checkpoint_name(step)
        (place / METADATA_FILE).unlink()
        place.bucket.delete([info.key for info in place.objects()])

    def set_aside(self, steps: list[int], *, since: int) -> None:
        """Hides all of the checkpoints or none."""
        note: dict[str, Any] = {"checkpoints": {str(step): tag for step, tag in _tags(self._objects_by_step()[0]).items() if step in steps}}
        with contextlib.suppress(FileNotFoundError):
            note["retention"] = (self.path / RETENTION_FILE).read_bytes().decode(errors="replace")
        replace_document(self.path / f".old-{since}.{secrets.token_hex(4)}.json", note)

    def put_back(self, aside: SetAside) -> None:
        """Restores all checkpoints that were set aside together, or none, and `retention.json`, as `LocalDirectory.put_back` does."""
        retention, text = self.path / RETENTION_FILE, _read_set_aside(aside).get("retention")
        if text is None:
            retention.unlink()
        else:
            retention.write_bytes(text.encode())
        (self.path / aside.place.name).unlink()

    def delete_set_aside(self, aside: SetAside) -> None:
        """Deletes checkpoints that were set aside."""
        tags = _tags(self._objects_by_step()[0])
        for step, tag in _read_set_aside(aside)["checkpoints"].items():
            if tags.get(int(step)) == tag:  # Otherwise it was replaced.
                self.delete(int(step))
        (self.path / aside.place.name).unlink()

    def recover(self, *, is_alone: bool) -> None:
        """Deletes parts that a process left when it died."""
        if not is_alone:
            return  # This process's unfinished writes look like leftovers. Others cannot write, because they do not have the lease.
        by_step = self._objects_by_step()[0]
        complete = _tags(by_step)
        for step, objects in by_step.items():
            stems = {info.key: match["stem"] for info in objects if (match := PART.fullmatch(info.key.rpartition("/")[2]))}
            if not stems or (step in complete and len(set(stems.values())) == 1):
                continue
            try:
                metadata = read_metadata(self.path / checkpoint_name(step)) if step in complete else {}
            except CheckpointError:
                continue  # It is damaged, so its parts are not known.
            used = {metadata.get(name, {}).get("stem") for name in ("state_parts", "shards")}
            self.path.bucket.delete([key for key, stem in stems.items() if stem not in used])

    def version(self, name: str) -> object:
        """Returns an identifier of the current version of a note. Raises `FileNotFoundError` if there is none."""
        return (self.path / name).stat().tag

    def write_note(self, name: str, values: Mapping[str, Any], *, is_durable: bool = True) -> None:
        """Replaces one of the directory's notes."""
        replace_document(self.path / name, values)


def _tags(by_step: Mapping[int, list[ObjectInfo]]) -> dict[int, str]:
    """Returns the versions of complete checkpoints by step."""
    return {step: info.tag for step, objects in by_step.items() for info in objects if info.key.endswith(f"/{METADATA_FILE}")}


def _read_set_aside(aside: SetAside) -> dict[str, Any]:
    """Returns the note that sets checkpoints aside: their versions by step, and the text of `retention.json`; no versions if it is damaged or gone."""
    with contextlib.suppress(CorruptCheckpointError):
        return read_document(aside.place)
    return {"checkpoints": {}}


class _RecordedPlace(ObjectPath):
    """The location of a checkpoint that is being saved. It records the stems of the names of the save's parts, which no other save uses."""

    def __init__(self, place: ObjectPath) -> None:
        super().__init__(place.bucket, place.key)
        self._stems: set[str] = set()

    @override
    def __truediv__(self, name: str) -> ObjectPath:
        self._stems.add(name.partition(".")[0])
        return super().__truediv__(name)

    def part_keys(self) -> list[str]:
        """Returns the keys of the parts that exist, also of those that other processes of the run have written."""
        return [info.key for name, info in self.named_objects() if name.partition(".")[0] in self._stems]


def write_to_bucket(place: ObjectPath, write: Write, *, before_commit: Callable[[], None] = lambda: None) -> None:
    """Writes a checkpoint in a bucket. It exists once its `metadata.json` does; then its predecessor is deleted.

    `before_commit` is called right before `metadata.json` is written, and can prevent that with an exception. Raises `DirectoryInUseError` if another process
    has written it since this function was called.
    """
    commit = place / METADATA_FILE
    replaced = place.bucket.info(commit.key)
    before = [info.key for info in place.objects()]
    recorded = _RecordedPlace(place)
    may_be_there = False
    written: list[str] = []

    def put(data: bytes) -> None:
        nonlocal may_be_there
        before_commit()
        if (place / PARTIAL_EPOCH_FILE).key in before:  # Belongs to the replaced checkpoint.
            (place / PARTIAL_EPOCH_FILE).unlink()
        written.extend(recorded.part_keys())
        try:
            may_be_there = True
            place.bucket.write(commit.key, data, create=replaced is None, tag=None if replaced is None else replaced.tag)
        except ChangedError as error:
            may_be_there = False
            raise DirectoryInUseError(f"Another run saved {place} at the same time. Two runs cannot save to the same directory. Choose another one.") from error

    try:
        write(recorded, commit=put)
    except BaseException:
        # A write without a response may still have succeeded. Then nothing may be deleted here, and recover() cleans up. Otherwise only this save's parts:
        # another run may have completed the checkpoint.
        if not may_be_there:
            with contextlib.suppress(OSError):
                place.bucket.delete(recorded.part_keys())
        raise
    if set(written).difference(recorded.part_keys()):  # Another run removed them, because it considered this one dead. Delete nothing else.
        raise DirectoryInUseError(
            f"Another run removed parts of {place} while this one saved it. Two runs cannot save to the same directory. Choose another one."
        )
    with contextlib.suppress(OSError):
        place.bucket.delete([key for key in before if key != commit.key])
