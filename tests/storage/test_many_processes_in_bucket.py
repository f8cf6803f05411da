"""Several real processes that save to a bucket: each uploads its pieces of a split state, and different numbers of processes resume from it."""

import pytest

from fitflax.checkpoints import CheckpointStore
from fitflax.errors import CheckpointError, ConfigError
from fitflax.storage import locate
from tests.storage.servers import S3Server, Unavailable
from tests.test_many_processes import Group, close, environment, results, start

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow  # Each test starts processes that import JAX.


@pytest.fixture(scope="module")
def server():
    try:
        with S3Server() as started:
            yield started
    except Unavailable as reason:
        pytest.skip(str(reason))


KINDS = ("fsdp", "data parallel")
RELAY = ((2, 5), (4, 7), (1, 9), (2, 12))  # How many processes continue the run, and up to which step.


def url_of(server: S3Server, kind: str) -> str:
    return f"s3://bucket-{kind.replace(' ', '-')}"


@pytest.fixture(scope="module")
def groups(server: S3Server) -> list[Group]:
    """The output of each start of processes, which continues a run of each kind. One start also executes each run without interruption and without a bucket."""
    for kind in KINDS:
        assert server.create_bucket(url_of(server, kind).removeprefix("s3://")) == url_of(server, kind)
    found = []
    for count, steps in RELAY:
        runs = {kind: {"kind": kind, "steps": steps, "brief": steps < 12, "directory": f"{url_of(server, kind)}/run"} for kind in KINDS}
        if count == 1:
            runs |= {f"whole, {kind}": {"kind": kind} for kind in KINDS}
        found.append(Group.of(start(environment() | server.environment, count, runs=runs)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_processes_save_to_a_bucket_and_other_numbers_of_processes_resume_from_it(kind, server, groups):
    url = url_of(server, kind)
    whole = groups[2].results(f"whole, {kind}")[0]
    ignored = {"history": {}, "best": None, "processes": 0}
    for group, (count, steps) in zip(groups, RELAY, strict=True):
        found = group.results(kind)
        assert [(result["step"], result["processes"]) for result in found] == [(steps, count)] * count
    for result in found:
        close({**result, **ignored}, {**whole, **ignored})
    place = locate(f"{url}/run/checkpoints", owner="test", error=ConfigError, options=server.storage_options)
    names = [info.key.removeprefix(f"{place.key}/") for info in place.objects()]
    newest = [name for name in names if name.startswith("step_00000012/")]
    assert any(".p00001." in name for name in newest) is (kind == "fsdp")
    stems = {name.partition("/")[2].partition(".")[0] for name in newest if "-" in name}
    assert len(stems) == (2 if kind == "fsdp" else 1)  # Nothing is left of other attempts.
    if kind == "fsdp":
        piece = place / next(name for name in newest if ".p00001.0" in name)
        piece.write_bytes(piece.read_bytes()[:-1] + b"\xff")
        with pytest.raises(CheckpointError, match=r"does not match its checksum in shards-\w+\.p00001\.json"):
            CheckpointStore(place).restore(12)
        piece.unlink()
        with pytest.raises(CheckpointError, match=r"\.p00001\.00000 is missing"):
            CheckpointStore(place).restore(12)
        # The next run skips the damaged checkpoint.
        again = results(environment() | server.environment, 2, kind=kind, steps=12, directory=f"{url}/run")
        close({**again[0], **ignored}, {**whole, **ignored})
