"""A directory of checkpoints in a bucket, which has no renames, appends or locks. `docs/checkpoint-format.md` explains the protocol.

step_00002000/state-RANDOM.00000 ...       the state, in parts; each attempt to save has its own names
step_00002000/metadata.json                written last, conditionally; the checkpoint exists from then on
retention.json, .run.json                  as in a local directory
.lease.json                                the user of the directory (`fitflax.storage.lease`)
.old-FROM.RANDOM.json                      lists checkpoints that are set aside, by step and version; deleting it restores them
"""

import contextlib
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from typing_extensions import override

from fitflax.checkpoints.collective_save import CollectiveSave
from fitflax.checkpoints.formats.checkpoint_files import METADATA_FILE, read_metadata, write_checkpoint
from fitflax.checkpoints.formats.json_documents import read_document, replace_document
from fitflax.checkpoints.formats.msgpack_format import PART
from fitflax.checkpoints.formats.partial_epoch import PARTIAL_EPOCH_FILE
from fitflax.checkpoints.store.directory import CheckpointDirectory, Contents, SetAside
from fitflax.checkpoints.store.local_directory import STEP
from fitflax.checkpoints.store.lock import check_held
from fitflax.errors import CheckpointError, CorruptCheckpointError, DirectoryInUseError
from fitflax.state import PyTree
from fitflax.storage import ChangedError, ObjectPath
from fitflax.storage.objects import ObjectInfo

__all__ = ["ObjectDirectory", "write_to_bucket"]

_OLD = re.compile(r"\.old-(?P<since>\d+)\.[0-9a-f]+\.json")


def write_to_bucket(
    place: ObjectPath,
    *,
    train: PyTree,
    run: PyTree,
    metadata: Mapping[str, Any],
    tag: str | None,
    collective: CollectiveSave | None = None,
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Writes a checkpoint in a bucket. It exists once its `metadata.json` does; then its predecessor is deleted.

    The predecessor's `metadata.json` must have the version `tag`, or not exist if that is `None`; otherwise, `DirectoryInUseError` is raised.
    `before_commit` is called right before it is written, and can prevent that with an exception.
    """
    before = [info.key for info in place.objects()]
    commit = place / METADATA_FILE
    may_be_there = False
    written: list[str] = []

    def put(data: bytes) -> None:
        nonlocal may_be_there
        before_commit()
        if (place / PARTIAL_EPOCH_FILE).key in before:  # Belongs to the replaced checkpoint.
            place.bucket.delete([(place / PARTIAL_EPOCH_FILE).key])
        written.extend(info.key for info in place.objects() if info.key not in before)
        try:
            may_be_there = True
            place.bucket.write(commit.key, data, create=tag is None, tag=tag)
        except ChangedError as error:
            may_be_there = False
            raise DirectoryInUseError(f"Another run saved {place} at the same time. Two runs cannot save to the same directory. Choose another one.") from error

    try:
        write_checkpoint(
            place, train=train, run=run, metadata=metadata, backend="msgpack" if collective is None else "shards", collective=collective, commit=put
        )
    except BaseException:
        # A write without a response may still have succeeded. Then nothing may be deleted here, and recover() cleans up.
        if not may_be_there:
            with contextlib.suppress(OSError):
                place.bucket.delete([info.key for info in place.objects() if info.key not in before and info.key != commit.key])
        raise
    lost = set(written).difference(info.key for info in place.objects())
    if lost:  # Removed by a run that took this one for dead. Delete nothing else.
        raise DirectoryInUseError(
            f"Another run removed parts of {place} while this one saved it. Two runs cannot save to the same directory. Choose another one."
        )
    with contextlib.suppress(OSError):
        place.bucket.delete([key for key in before if key != commit.key])


class _Found(NamedTuple):
    """The contents of a directory: objects by step, and notes of checkpoints that are set aside."""

    by_step: dict[int, list[ObjectInfo]]
    asides: dict[str, int]

    def commit(self, step: int) -> ObjectInfo | None:
        return next((info for info in self.by_step.get(step, ()) if info.key.endswith(f"/{METADATA_FILE}")), None)


class ObjectDirectory(CheckpointDirectory[ObjectPath]):
    """A directory of checkpoints below a prefix in a bucket."""

    @override
    def is_there(self) -> bool:
        return True

    @override
    def make(self) -> None:
        pass

    def _list_objects(self) -> _Found:
        found = _Found({}, {})
        for path, info in self.path.named_objects():
            name, _, rest = path.partition("/")
            if rest and (match := STEP.fullmatch(name)):
                found.by_step.setdefault(int(match[1]), []).append(info)
            elif not rest and (match := _OLD.fullmatch(name)):
                found.asides[name] = int(match["since"])
        return found

    @override
    def check_held(self) -> None:
        check_held(self.path)

    @override
    def contents(self) -> Contents:
        found = self._list_objects()
        hidden = {(int(step), tag) for name in found.asides for step, tag in self._read_set_aside(name).items()}
        commits = {step: commit for step in found.by_step if (commit := found.commit(step)) is not None}
        steps = [step for step, commit in commits.items() if (step, commit.tag) not in hidden]
        return Contents(sorted(steps), [SetAside(self.path / name, since) for name, since in sorted(found.asides.items())])

    def _read_set_aside(self, name: str) -> dict[str, str]:
        """Returns the versions by step that a note sets aside; `{}` if it is damaged or gone."""
        with contextlib.suppress(CorruptCheckpointError):
            return dict(read_document(self.path / name)["checkpoints"])
        return {}

    @override
    def size_and_time(self, step: int) -> tuple[int, float]:
        objects = list(self.checkpoint(step).objects())
        return sum(info.size for info in objects), max((info.modified for info in objects if info.key.endswith(METADATA_FILE)), default=0.0)

    @override
    def write(self, step: int, *, train: PyTree, run: PyTree, metadata: Mapping[str, Any], backend: str, collective: CollectiveSave | None) -> None:
        place = self.checkpoint(step)
        commit = place.bucket.info((place / METADATA_FILE).key)
        write_to_bucket(
            place, train=train, run=run, metadata=metadata, tag=None if commit is None else commit.tag, collective=collective, before_commit=self.check_held
        )

    @override
    def delete(self, step: int) -> None:
        place = self.checkpoint(step)
        place.bucket.delete([(place / METADATA_FILE).key])
        place.bucket.delete([info.key for info in place.objects()])

    @override
    def set_aside(self, steps: list[int], *, since: int) -> None:
        found = self._list_objects()
        tags = {str(step): commit.tag for step in steps if (commit := found.commit(step)) is not None}
        replace_document(self.path / f".old-{since}.{secrets.token_hex(4)}.json", {"checkpoints": tags})

    @override
    def put_back(self, aside: SetAside) -> None:
        assert isinstance(aside.place, ObjectPath)
        aside.place.unlink()

    @override
    def delete_set_aside(self, aside: SetAside) -> None:
        found = self._list_objects()
        for step, tag in self._read_set_aside(aside.place.name).items():
            commit = found.commit(int(step))
            if commit is not None and commit.tag == tag:  # Otherwise it was replaced.
                self.delete(int(step))
        self.put_back(aside)

    @override
    def recover(self, *, is_alone: bool) -> None:
        if not is_alone:
            return  # This process's unfinished writes look like leftovers. Others cannot write, because they do not have the lease.
        found = self._list_objects()
        for step, objects in found.by_step.items():
            stems = {info.key: match["stem"] for info in objects if (match := PART.fullmatch(info.key.rpartition("/")[2]))}
            is_complete = found.commit(step) is not None
            if not stems or (is_complete and len(set(stems.values())) == 1):
                continue
            place = self.checkpoint(step)
            try:
                metadata = read_metadata(place) if is_complete else {}
            except CheckpointError:
                continue  # It is damaged, so its parts are not known.
            used = {metadata.get(name, {}).get("stem") for name in ("state_parts", "shards")}
            place.bucket.delete([key for key, stem in stems.items() if stem not in used])

    @override
    def version(self, name: str) -> object:
        path = self.path / name
        info = path.bucket.info(path.key)
        if info is None:
            raise FileNotFoundError(str(path))
        return info.tag

    @override
    def write_note(self, name: str, values: Mapping[str, Any], *, is_durable: bool = True) -> None:
        replace_document(self.path / name, values)
