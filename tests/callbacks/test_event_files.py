"""Event files: what is left of them after a kill, what a resume drops, and which run they belong to."""

import os
import struct
import threading

import numpy as np
import pytest
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from fitflax.callbacks.event_files import EventFiles, events_of, trim
from fitflax.errors import CallbackError


def write(directory, steps, run_id="a", *, group="train", first_step=0, mark=""):
    """Writes the scalar `loss` of these steps and returns the file."""
    before = set(directory.rglob("*.tfevents.*"))
    files = EventFiles(directory, run_id, first_step, mark=mark)
    files.submit(lambda put: [put(group, step, 1e9 + step, summary.scalar("loss", step / 2)) for step in steps])
    files.close()
    (made,) = set(directory.rglob("*.tfevents.*")) - before
    return made


def steps_of(path):
    return [record.event.step for record in events_of(path) if record.event.HasField("summary")]


def test_events_are_read_as_they_were_written(tmp_path):
    path = write(tmp_path, [1, 2, 4])
    records = list(events_of(path))
    assert path.parent == tmp_path / "train" and path.name.endswith(".00000.a")
    # The version of the file, the start of the session, then what was submitted.
    assert records[0].event.file_version == "brain.Event:2" and records[1].event.HasField("session_log")
    values = [
        (record.event.step, record.event.wall_time, record.event.summary.value[0].tag, record.event.summary.value[0].simple_value) for record in records[2:]
    ]
    assert values == [(step, 1e9 + step, "loss", step / 2) for step in (1, 2, 4)]
    assert [record.begin for record in records] == [0, *(record.end for record in records[:-1])] and records[-1].end == path.stat().st_size


def test_a_session_start_tells_readers_to_drop_later_steps_of_the_previous_process(tmp_path):
    starts = [list(events_of(write(tmp_path, [9], first_step=step)))[1].event for step in (0, 7)]
    assert [(start.session_log.status, start.step) for start in starts] == [(1, 0), (1, 8)]
    closing = write(tmp_path, [9], first_step=7, mark=".closing")
    assert not any(record.event.HasField("session_log") for record in events_of(closing)) and closing.name.endswith(".a.closing")


def test_files_of_the_same_second_are_numbered_so_that_readers_read_them_in_order(tmp_path):
    paths = [write(tmp_path, [step], run_id=run_id) for step, run_id in enumerate("zya")]
    assert [path.name.split(".")[-2:] for path in paths] == [["00000", "z"], ["00001", "y"], ["00002", "a"]]


# --- Trimming ---


@pytest.mark.parametrize(("step", "kept"), [(-1, None), (0, None), (3, [1, 3, 3]), (4, [1, 3, 3]), (8, [1, 3, 3, 5, 8]), (99, [1, 3, 3, 5, 8])])
def test_trimming_cuts_at_the_first_event_after_the_step(step, kept, tmp_path):
    path = write(tmp_path, [1, 3, 3, 5, 8])
    data = path.read_bytes()
    trim(tmp_path, "a", step)
    assert (steps_of(path) if path.exists() else None) == kept
    if kept is not None:
        assert data.startswith(path.read_bytes())


def test_trimming_leaves_complete_records_wherever_a_kill_truncated_the_file(tmp_path):
    path = write(tmp_path, [1, 2, 3, 4])
    data, records = path.read_bytes(), list(events_of(path))
    for cut in range(records[-2].begin, len(data)):
        path.write_bytes(data[:cut])
        trim(tmp_path, "a", 99)
        end = max(record.end for record in records if record.end <= cut)
        assert path.read_bytes() == data[:end], cut
        assert steps_of(path) == [1, 2, 3, 4][: 3 if cut >= records[-2].end else 2]


def test_trimming_drops_trailing_zeros_wherever_they_begin(tmp_path):
    """Some file systems leave a file like this after a power failure: its length is there, but its data is not."""
    path = write(tmp_path, [1, 2, 3, 4])
    data, records = path.read_bytes(), list(events_of(path))
    for cut in range(records[-2].begin, records[-1].begin):
        path.write_bytes(data[:cut] + bytes(64))
        trim(tmp_path, "a", 99)
        kept = steps_of(path)
        # The event of a record is complete if any part of the checksum after it is left.
        whole = cut > records[-2].end - 4
        assert kept == ([1, 2, 3] if whole else [1, 2]), cut
        assert path.stat().st_size == (records[-2].end if whole else records[-2].begin)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"no event file at all, but long enough", struct.pack("<Q", 5)])
def test_a_file_without_any_event_is_removed(data, tmp_path):
    path = tmp_path / "events.out.tfevents.1.host.00000.a"
    path.write_bytes(data)
    assert list(events_of(path)) == []
    trim(tmp_path, "a", 99)
    assert not path.exists()


def test_a_file_ends_at_a_damaged_record(tmp_path):
    path = write(tmp_path, [1, 2])
    garbage = b"\xff" * 20
    head = struct.pack("<Q", len(garbage))
    with path.open("ab") as file:
        file.write(head + struct.pack("<I", masked_crc32c(head)) + garbage + struct.pack("<I", masked_crc32c(garbage)))
    assert steps_of(path) == [1, 2]
    trim(tmp_path, "a", 99)
    assert path.stat().st_size == list(events_of(path))[-1].end


def test_files_that_do_not_belong_to_the_run_are_left_alone(tmp_path):
    other = write(tmp_path, [1, 2, 3], run_id="b")
    empty, foreign = tmp_path / "train/events.out.tfevents.1.host.00009.b", tmp_path / "train/events.out.tfevents.1.host"
    notes = tmp_path / "notes.txt"
    for path in (empty, foreign, notes):
        path.touch()
    mine = write(tmp_path, [1, 2, 3])
    data = other.read_bytes()
    trim(tmp_path, "a", 1)
    assert steps_of(mine) == [1] and other.read_bytes() == data
    assert empty.exists() and foreign.exists() and notes.exists()


def test_trimming_covers_all_groups_and_closing_files(tmp_path):
    paths = [write(tmp_path, [1, 2, 3], group=group) for group in ("", "train", "val")]
    closing = write(tmp_path, [3], group="val", mark=".closing-3")
    trim(tmp_path, "a", 2)
    assert [steps_of(path) for path in paths] == [[1, 2]] * 3 and not closing.exists()


# --- The thread ---


def test_the_thread_starts_with_the_first_job_and_ends_at_close(tmp_path):
    before = threading.active_count()
    files = EventFiles(tmp_path, "a", 0)
    files.sync()
    assert threading.active_count() == before
    files.submit(lambda put: None)
    assert threading.active_count() == before + 1
    files.close()
    files.close()
    assert threading.active_count() == before and list(tmp_path.iterdir()) == []


def test_only_a_few_jobs_are_queued_because_they_may_hold_copies_of_all_parameters(tmp_path):
    files, gate, started = EventFiles(tmp_path, "a", 0), threading.Event(), threading.Event()
    files.submit(lambda put: (started.set(), gate.wait(60)))
    assert started.wait(60)
    submitted = []

    def submit() -> None:
        for number in range(20):
            files.submit(lambda put: None)
            submitted.append(number)

    thread = threading.Thread(target=submit)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and len(submitted) == 8
    gate.set()
    thread.join(60)
    files.close()
    assert len(submitted) == 20


def test_sync_writes_everything_to_disk_while_the_files_stay_open(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor)))
    files = EventFiles(tmp_path, "a", 0)
    for step in (1, 2):
        for group in ("train", "val"):
            files.submit(lambda put, step=step, group=group: put(group, step, 1.0, summary.scalar("loss", 0.5)))
        files.sync()
        assert len(synced) == 2 * step
        for group in ("train", "val"):
            (path,) = (tmp_path / group).iterdir()
            assert steps_of(path) == list(range(1, step + 1))
    files.close()


@pytest.mark.parametrize("when", ["submit", "sync", "close"])
def test_an_error_in_the_thread_is_raised_once_by_the_next_call(when, tmp_path):
    started = threading.Event()

    def fail(put):
        started.set()
        raise OSError(28, "No space left on device")

    files = EventFiles(tmp_path, "a", 0)
    files.submit(fail)
    files._thread.wait_until(lambda: files._thread.is_idle)
    assert started.is_set()
    with pytest.raises(CallbackError, match=r"TensorBoard cannot write event files in .*: OSError: \[Errno 28\] No space left on device") as caught:
        files.submit(lambda put: None) if when == "submit" else getattr(files, when)()
    assert isinstance(caught.value.__cause__, OSError)
    files.close()


def test_closing_closes_the_other_files_when_one_fails(tmp_path):
    files, closed = EventFiles(tmp_path, "a", 0), []

    class Failing:
        def close(self):
            closed.append(self)
            raise OSError("gone")

    files._writers = {"train": Failing(), "val": Failing()}
    files.submit(lambda put: None)
    with pytest.raises(CallbackError, match="gone"):
        files.close()
    assert len(closed) == 2


def test_records_may_contain_any_bytes(tmp_path):
    """The bytes of a histogram can look like the headers of records."""
    files = EventFiles(tmp_path, "a", 0)
    values = np.random.default_rng(0).normal(size=1000)
    files.submit(lambda put: [put("train", step, 1.0, summary.histogram("h", values, 64)) for step in range(5)])
    files.close()
    (path,) = (tmp_path / "train").iterdir()
    assert steps_of(path) == [0, 1, 2, 3, 4]
    assert isinstance(next(events_of(path)).event, Event)
