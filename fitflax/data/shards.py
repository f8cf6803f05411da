"""`Shard`, which marks data as this process's shard of a dataset, and feeds whose batches are joined from the shards of all processes.

Shards need not have equal lengths. Each process reads some batches, and then all agree on their number, so that all run the same steps with batches of one
shape. A process whose shard has ended feeds padding.
"""

import base64
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.serialization
import jax
import numpy as np
from typing_extensions import override

from fitflax.data.arrays import IndexedSource
from fitflax.data.batch import FedBatch, Position, Triple, describe_leaves, fingerprint, leaf_paths
from fitflax.data.feed import Feed, undisturbed
from fitflax.data.loader_state import KEPT
from fitflax.data.padding import Batcher, pad_batch
from fitflax.data.sources import DataOptions, OneShotSource, Shares, Source
from fitflax.errors import ConfigError, DataError, RestoreError
from fitflax.state import Batch

# Limits of what is read between two exchanges, which take milliseconds.
_MOST_BATCHES = 16
_MOST_BYTES = 2**26
_WHOLE = "whole"

Exchange = Callable[[Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Marks data as the shard of this process. Pass it to `fit`, `evaluate` or `predict` in place of the data.

    Without it, all processes must pass the same data. With it, the batch of a step consists of the rows of all processes. `batch_size` is that of the whole
    batch, of which each process feeds an equal part; data that comes in batches is used as it is. Shards need not have equal lengths: a pass ends when all
    have ended. Metrics cover the examples of all processes; `predict` returns the outputs of this process. In a single process, a shard is the data itself.

    If `Sharded` splits batches into fewer parts than there are processes, some processes must pass the same shard. `Sharded(...).part` is its `(index, count)`.

    Attributes:
        data: What `fit` accepts: arrays, `(x, y)`, loaders.

    >>> import fitflax, numpy as np
    >>> from flax import linen as nn
    >>> trainer = fitflax.Trainer(nn.Dense(1))
    >>> trainer.compile("sgd", "mse")
    >>> trainer.fit(Shard((np.ones((8, 2)), np.ones((8, 1)))), batch_size=4, verbose=0).epoch  # In each process, with the part that it has.
    [0]
    """

    data: Any


def agree_on_shards(
    source: Source | None, part: tuple[int, int], index: int, exchange: Exchange, *, is_shard: bool = True, failure: Exception | None = None
) -> Shares | None:
    """Returns what the processes know about each other's shards; `None` if all have the same data. All processes must call it.

    Args:
        source: The data of this process; `None` if it could not be created.
        part: Which part of a batch this process feeds, `(index, count)`.
        index: The index of this process.
        exchange: Gathers a value from all processes.
        is_shard: Whether the data is a `Shard`.
        failure: Why there is no source; raised here once all processes know of it.
    """
    sizes = [None] * 3 if source is None else [source.num_examples, source.num_batches, source.batch_size]
    kind = "" if source is None else f"{type(source).__name__} (can restart: {source.can_restart}, endless: {source.is_endless})"
    parts, shards, kinds, all_sizes, errors = zip(*exchange([part[0], is_shard, kind, sizes, _error_text(failure)]), strict=True)
    if failure is not None:
        raise failure
    _check_no_failure("The data of some processes cannot be used", errors)
    if len(set(shards)) > 1:
        having = [process for process, it_is in enumerate(shards) if it_is]
        raise DataError(f"The data is a Shard only in processes {having}. Pass a Shard in all processes, or in none.")
    if other := next((process for process, each in enumerate(kinds) if each != kinds[0]), None):
        differing = "; ".join(f"process {process} has {kinds[process]}" for process in (0, other))
        raise DataError(f"The processes have different kinds of data: {differing}. Pass the same kind in all processes.")
    examples, batches, batch_sizes = zip(*all_sizes, strict=True)
    if is_shard:
        batch_size = None if None in batch_sizes else max(batch_sizes) * part[1]
        most_batches, most_examples = (None if None in values else max(values) for values in (batches, examples))
        shares = Shares(index, tuple(parts), None, most_batches, most_examples, batch_size)
        return shares if None in examples else dataclasses.replace(shares, examples=shares.total(examples))
    if other := next((process for process, each in enumerate(all_sizes) if each != all_sizes[0]), None):
        differing = "; ".join(f"process {n} has num_examples={examples[n]}, num_batches={batches[n]}, batch_size={batch_sizes[n]}" for n in (0, other))
        raise DataError(f"The processes have different data: {differing}. If each process reads its own shard, pass fitflax.data.Shard(data).")
    return None


def _error_text(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def _check_no_failure(what: str, errors: Sequence[str | None]) -> None:
    failed = "; ".join(f"process {process}: {error}" for process, error in enumerate(errors) if error is not None)
    if failed:
        raise DataError(f"{what}: {failed}")


def part_of_batch_size(batch_size: int | None, parts: int) -> int:
    """Returns the number of rows of each of `parts` equal parts of a batch. Raises `ConfigError` if the batch size, 32 by default, is not a multiple of it."""
    size = DataOptions(batch_size=batch_size).size
    if size % parts:
        raise ConfigError(f"batch_size is the total over all processes and must be a multiple of {parts}, the number of equal shards. Received: {size}.")
    return size // parts


@dataclasses.dataclass(frozen=True)
class _Report:
    """A process's report about the batches that it has read."""

    rows: list[int]  # The number of real rows of each batch.
    ended: bool  # Whether its shard has no more.
    size: int  # The rows of the largest batch, including padding.
    num_bytes: int  # The size of a batch.
    forms: list[str]  # The structure, shapes and dtypes of each batch, as JSON; a single one if they are equal.
    content: int  # A checksum of the first batch, for processes that must feed the same rows.
    last: str  # The form of the batch that is repeated when the shard has ended, if batches are passed whole.
    error: str | None  # The error that reading raised.

    def form(self, number: int) -> str:
        return self.forms[0 if len(self.forms) == 1 else number]


class ShardFeed(Feed):
    """A feed over this process's shard that yields as many batches as those of the other processes.

    The source must have its `shares`. `used` are the examples of the pass that each process has used, and `exchange` gathers a value from all processes.
    """

    def __init__(
        self,
        source: Source,
        batcher: Batcher,
        position: Position = Position(),  # noqa: B008 (frozen)
        *,
        used: Sequence[int] = (),
        exchange: Exchange,
        is_saved: bool = False,
        pads: bool = True,
    ) -> None:
        assert source.shares is not None
        super().__init__(source, batcher, position)
        self._shares = source.shares
        self._exchange = exchange
        self._pads = pads
        self._local = Feed(source, batcher, position, is_saved=is_saved, kept=KEPT + _MOST_BATCHES)
        self._used = tuple(used) or (0,) * len(self._shares.parts)
        self._next_count = 1
        # The last batch whose inputs are passed whole.
        self._last_whole: FedBatch | None = None
        self._has_ended = self._all_ended = False
        # Maps what is used after a batch to what was used before it.
        self._before: dict[tuple[int, ...], tuple[int, ...]] = {}

    @override
    def _open(self) -> Iterator[Triple]:
        return iter(())

    @override
    def _read(self, iterator: Iterator[Triple], ahead: int | None) -> list[Triple]:
        if not self._all_ended:
            batches, reports = self._read_and_exchange()
            # Processes whose shard has not ended have read the full number of batches.
            count, size = max(len(report.rows) for report in reports), max(report.size for report in reports)
            fed_batches = [self._local_part(batches[number] if number < len(batches) else None, reports, number, size) for number in range(count)]
            if count and self._pads:
                self.batcher.size = size
            self._buffer = fed_batches[::-1]
            self._next_count = max(1, min(2 * self._next_count, _MOST_BATCHES, _MOST_BYTES // max(*(report.num_bytes for report in reports), 1)))
            self._all_ended = all(report.ended for report in reports)
        if not self._buffer:
            self._has_ended = self._all_ended = False
            self._used = (0,) * len(self._used)
        return []

    def _read_and_exchange(self) -> tuple[list[FedBatch], list[_Report]]:
        """Returns the next batches of this process, and the reports of all processes. Raises if any process failed or the batches cannot be joined."""
        batches: list[FedBatch] = []
        failure: Exception | None = None
        try:
            batches = self._read_local()
        except Exception as error:  # noqa: BLE001 (raised below, after the exchange)
            failure = error
        local_report = self._report(batches, failure)
        reports = [_Report(**report) for report in self._exchange(dataclasses.asdict(local_report))]
        if failure is not None:
            raise failure
        reports = self._with_last_forms(reports)
        self._check(reports)
        return batches, reports

    def _read_local(self) -> list[FedBatch]:
        batches: list[FedBatch] = []
        self._before = {after: self._before[after] for after in [fed.used for fed, _, _ in self._returned]}
        self._local.forget_given(but=sum(fed.own != 0 for fed, _, _ in self._returned))
        while not self._has_ended and len(batches) < self._next_count:
            fed = self._local.more()
            if fed is None:
                self._has_ended = True
            else:
                batches.append(fed)
        if not self._has_ended and self._local.pass_has_ended:
            self._local.more()  # Reads the end of the pass.
            self._has_ended = True
        return batches

    def _report(self, batches: list[FedBatch], failure: Exception | None) -> _Report:
        forms = [_form(fed) for fed in batches]
        content = num_bytes = 0
        if batches:
            first = batches[0].batch
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
            if len(set(self._shares.parts)) < len(self._shares.parts):
                content = fingerprint((first.x, first.y, first.weights))
            self._last_whole = batches[-1] if batches[-1].real is not None else None
        return _Report(
            rows=[fed.num_real for fed in batches],
            ended=self._has_ended,
            size=max((len(fed.batch.mask) for fed in batches), default=0),
            num_bytes=num_bytes,
            forms=forms[:1] if len(set(forms)) == 1 else forms,
            content=content,
            last=_form(self._last_whole),
            error=_error_text(failure),
        )

    def _with_last_forms(self, reports: list[_Report]) -> list[_Report]:
        """Returns the reports with the forms of the batches that ended shards repeat; after a resume, this batch may have to be read first."""
        if not any(_is_whole(form) for report in reports for form in report.forms) or all(report.rows or report.last for report in reports):
            return reports
        if self._has_ended and self._last_whole is None and self.source.can_restart:
            # If there is none, all processes raise the same error below.
            with undisturbed(), self.source.undisturbed(), contextlib.closing(Feed(self.source, self.batcher)) as again, contextlib.suppress(Exception):
                fed = again.next()
                self._last_whole = fed if fed is not None and fed.real is not None else None
        lasts = self._exchange(_form(self._last_whole))
        return [dataclasses.replace(report, last=last) for report, last in zip(reports, lasts, strict=True)]

    def _check(self, reports: Sequence[_Report]) -> None:
        """Checks that the batches of all processes can be joined. All processes find the same error."""
        _check_no_failure("Shards of the data could not be read", [report.error for report in reports])
        nonempty = {process: report for process, report in enumerate(reports) if report.rows}
        if nonempty and not any(self._used) and len(nonempty) < len(reports):
            empty = sorted(set(range(len(reports))) - set(nonempty))
            raise DataError(
                f"The shards of processes {empty} yield no batches, but those of processes {sorted(nonempty)} do. Give every process some examples."
            )
        for number in range(max((len(report.rows) for report in reports), default=0)):
            forms = {report.form(number): process for process, report in nonempty.items() if number < len(report.rows)}
            if any(map(_is_whole, forms)):  # Ended shards repeat their last batch.
                forms |= {report.last: process for process, report in enumerate(reports) if number >= len(report.rows)}
            if len(forms) > 1:
                received = "; ".join(f"process {process} has {_format_form(form)}" for form, process in forms.items())
                raise DataError(f"The batches of all shards must have the same structure, example shapes, and dtypes. Received: {received}.")
        seen: dict[int, tuple[Any, ...]] = {}
        for process, (part, report) in enumerate(zip(self._shares.parts, reports, strict=True)):
            if seen.setdefault(part, (report.rows, report.content)) != (report.rows, report.content):
                raise DataError(
                    f"On this mesh, process {process} has the same part of each batch (part {part}) as another process, so both must read the same shard. "
                    "Choose the shard by the strategy's part, (index, count), not by process."
                )
        if not self._pads and any(report.rows != reports[0].rows for report in reports):
            raise DataError(
                f"With compile(pad=False), all shards must yield batches of equal size. Received rows, by process: {[report.rows for report in reports]}. "
                "Leave pad=False out, or make the shards equal."
            )

    def _local_part(self, fed: FedBatch | None, reports: Sequence[_Report], number: int, size: int) -> FedBatch:
        """Returns this process's part of the batch with a number, padded to `size`; only padding if `fed` is `None`, because the shard has ended."""
        rows = [report.rows[number] if number < len(report.rows) else 0 for report in reports]
        form = next(report.form(number) for report in reports if number < len(report.rows))
        real = None if fed is None else fed.real
        if _is_whole(form) and fed is None:
            assert self._last_whole is not None
            real = np.zeros_like(self._last_whole.real)
            batch = self._last_whole.batch._replace(mask=real)
        elif fed is None:
            x, y, weights = _zeros(json.loads(form), size)
            batch = Batch(x, y, np.zeros(size, bool), weights)
        elif real is None and self._pads and len(fed.batch.mask) != size:
            batch = pad_batch(Triple(fed.batch.x, fed.batch.y, fed.batch.weights), fed.num_real, size)
        else:
            batch = fed.batch
        before, shares = self._used, self._shares
        used = self._used = tuple(before + count for before, count in zip(before, rows, strict=True))
        self._before[used] = before
        return FedBatch(
            batch,
            shares.total(rows),
            Position(self._position.passes, used[shares.index]),
            size=len(batch.mask) * shares.num_parts,
            own=rows[shares.index],
            used=used,
            real=real,
            is_counted=fed is None or fed.is_counted,
        )

    @property
    @override
    def has_more(self) -> bool:
        return bool(self._buffer)

    @property
    @override
    def pass_has_ended(self) -> bool | None:
        return False if self._buffer else self._all_ended or None

    @property
    @override
    def full_size(self) -> int | None:
        return None if self.batcher.size is None else self.batcher.size * self._shares.num_parts

    @override
    def hold_passes(self) -> None:
        self._local.hold_passes()

    @override
    def announce_pass(self) -> None:
        self._local.announce_pass()

    @override
    def open_begun_pass(self) -> None:
        if not self._buffer:
            self._local.open_begun_pass()

    @property
    @override
    def can_reread(self) -> bool:
        # All processes must agree. Only some have a bookmark if the checkpoint was saved after an exception.
        return all(self._exchange(self._local.can_reread))

    @override
    def catch_up(self) -> None:
        self._local.catch_up()

    @override
    def state_dict(self, position: Position) -> dict[str, Any]:
        return self._local.state_dict(position)

    @override
    def joined_state(self, position: Position, *, is_alone: bool) -> dict[str, Any] | None:
        if isinstance(self.source, IndexedSource):
            return None  # These sources have no other state than the position.
        local_state, index = self.state_dict(position), self._shares.index
        if is_alone:
            return {"shards": [local_state if process == index else {} for process in range(len(self._shares.parts))]}
        states = self._exchange(base64.b64encode(flax.serialization.msgpack_serialize(local_state)).decode())
        return {"shards": [flax.serialization.msgpack_restore(base64.b64decode(state)) for state in states]}

    @override
    def load_state_dict(self, state: Any, num_started: Sequence[int] | None = None) -> None:
        states = state.get("shards", [])
        self._local.load_state_dict(states[self._shares.index] if states else {}, num_started)

    @override
    def reopen(self) -> None:
        self._local.reopen()

    @override
    def close(self) -> None:
        if isinstance(self.source, OneShotSource):
            # Other feeds of the iterator continue with what was read but not used.
            self._local.push_back(sum(fed.own != 0 for fed in self._buffer))
            if self._buffer:
                self._used, self._has_ended, self._all_ended = self._before[self._buffer[-1].used], False, False
                self._buffer.clear()
        self._local.close()


def _form(fed: FedBatch | None) -> str:
    """Returns, as JSON, what batches must have in common to be joined: structure, shapes of an example and dtypes; all shapes if they are passed whole."""
    if fed is None:
        return ""
    x, y, _, weights = fed.batch
    return json.dumps([_describe(tree) for tree in (x, y, weights)] if fed.real is None else {_WHOLE: describe_leaves(x, y, weights)})


def _is_whole(form: str) -> bool:
    return form.startswith(f'{{"{_WHOLE}"')


def _describe(node: Any) -> Any:
    if hasattr(node, "shape"):
        return {"shape": list(node.shape[1:]), "dtype": node.dtype.name}
    if node is None:
        return None
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: _describe(node[key]) for key in sorted(node)}}  # JAX sorts keys, and so does padding.
    if type(node) in (list, tuple):
        return {type(node).__name__: [_describe(child) for child in node]}
    raise DataError(f"The batches of a Shard must be arrays, or dicts, lists, and tuples of arrays. Received: a {type(node).__name__}.")


def _zeros(description: Any, size: int) -> Any:
    """Returns zeros `[size, ...]` with the structure that `_describe` described."""
    if description is None or isinstance(description, list):
        return None if description is None else [_zeros(child, size) for child in description]
    if "shape" in description:
        return np.zeros((size, *description["shape"]), jax.numpy.dtype(description["dtype"]))
    kind, children = next(iter(description.items()))
    if kind == "dict":
        return {key: _zeros(child, size) for key, child in children.items()}
    return (tuple if kind == "tuple" else list)(_zeros(child, size) for child in children)


def _format_form(form: str) -> str:
    """Returns a form in readable text."""
    if not form or _is_whole(form):
        return ", ".join(f"{path}: {words}" for path, words in json.loads(form)[_WHOLE].items()) if form else "no batch to repeat"
    x, y, weights = (_zeros(each, 0) for each in json.loads(form))
    leaves = [leaf for name, tree in (("x", x), ("y", y), ("sample_weight", weights)) for leaf in leaf_paths(tree, name)]
    return ", ".join(f"{path}: {leaf.dtype}{list(leaf.shape[1:])}" for path, leaf in leaves)


def spread(position: Position, used: Sequence[int], source: Source) -> tuple[Position, tuple[int, ...]]:
    """Returns the approximate position of a saved run, and the examples used by each process, for another number of processes.

    This is for sources that are not repeatable. `position` is that of the process that saved it, and `used` has the used examples of each process of that
    run.
    """
    count = 0 if source.shares is None else len(source.shares.parts)
    if len(used) == count:
        return position, tuple(used)
    each = (sum(used) or position.examples) // max(count, 1)
    each -= each % (source.batch_size or 1)
    return position._replace(examples=each), (each,) * count


def position_in_shard(position: Position, used: Sequence[int], shares: Shares | None) -> Position:
    """Returns this process's position from the saved one and the examples that each process had `used`. The number of shards cannot change in a pass."""
    count = 0 if shares is None else len(shares.parts)
    if len(used) not in (0, count):
        now = f"{count} shards" if count else "the same data in all processes"
        raise RestoreError(
            f"The run was saved in the middle of a pass over {len(used)} shards, one for each process. Received: {now}. "
            f"Start {len(used)} processes with a shard each, or resume from a checkpoint at the end of a pass."
        )
    if count and not used and position.examples:
        raise RestoreError(
            "The run was saved in the middle of a pass, with the same data in all processes. Received: a shard for each process. "
            "Pass the same data in all processes, or resume from a checkpoint at the end of a pass."
        )
    return position._replace(examples=used[shares.index]) if used and shares is not None else position
