"""`WandbLogger`: logs a run to Weights & Biases."""

import importlib
import io
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from fitflax.callbacks.model_checkpoint import StoreCallback
from fitflax.errors import CallbackError
from fitflax.integrations import import_package
from fitflax.integrations.tracker import TrackerLogger
from fitflax.integrations.tracker_base import Point, Tracker
from fitflax.storage.paths import relative_path
from fitflax.triggers import Trigger

__all__ = ["WandbLogger"]

# The setting of W&B for how often it writes its file, which not all versions have, and its value here. Below, the seconds after which values are safe: offline
# with this setting, and otherwise.
_FLUSH_SETTING, _FLUSH_SECONDS = "x_transaction_log_flush_interval", 2.0
_SETTLED_SECONDS, _SLOWLY_SETTLED_SECONDS = 10.0, 60.0
# The sleep between two rows, each of which takes about 0.3 ms of Python. Without it, the training thread would wait 5 ms for the GIL at each step while many
# rows are logged.
_PAUSE = 0.0005
_HEAD, _BLOCK = 7, 32768


class WandbLogger(TrackerLogger):
    """Logs a run to Weights & Biases. See `TrackerLogger`. Needs `pip install 'fitflax[wandb]'`.

    The x axis is the step. If there is an active run of `wandb.init`, the logger uses it and does not end it; pass `step=trainer.step` in your calls of
    `wandb.log`. In offline mode, each process writes a separate directory with the same run id, and `wandb sync` merges them into one run.
    If W&B's process hangs, `fit` returns after `end_seconds`, but W&B may wait again when Python exits; offline mode avoids this.
    Arguments that are not listed are those of `TrackerLogger`.

    Args:
        project: The project; by default, whatever W&B is configured to use.
        name: The run's name.
        entity: The user or team.
        mode: `"online"`, `"offline"` or `"disabled"`; by default, whatever W&B is configured to use.
        directory: The directory of W&B's files; by default, whatever W&B is configured to use.
        options: Other arguments of `wandb.init`, such as `tags` or `group`.

    Raises:
        ImportError: The package wandb is not installed.
        CallbackError: An argument has a wrong type or value.

    Log a run and upload its best checkpoint::

        from fitflax.callbacks import BestCheckpoint
        from fitflax.integrations.wandb import WandbLogger

        best = BestCheckpoint("runs/a/best", monitor="val_loss")
        logger = WandbLogger("digits", checkpoint=best, options={"tags": ["baseline"]})
        trainer.fit(x, y, epochs=10, validation_split=0.2, callbacks=[best, logger])
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        entity: str | None = None,
        mode: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        every: Trigger | None = None,
        sown: str | None = "summaries",
        checkpoint: StoreCallback | None = None,
        interval: float = 2.0,
        end_seconds: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in (None, "online", "offline", "disabled", "shared", "dryrun", "run"):
            raise CallbackError(f"WandbLogger(mode=...) must be 'online', 'offline', 'disabled' or None. Received: {mode!r}.")
        init_options = {"project": project, "name": name, "entity": entity, "mode": mode, "dir": None if directory is None else os.fspath(directory)}
        tracker = _Wandb({**{key: value for key, value in init_options.items() if value is not None}, **(options or {})})
        super().__init__(tracker, every=every, sown=sown, checkpoint=checkpoint, interval=interval, end_seconds=end_seconds)


class _Wandb(Tracker):
    """W&B, through `wandb.Run`. `options` are arguments of `wandb.init`."""

    title = "W&B"

    def __init__(self, options: dict[str, Any]) -> None:
        import_package("wandb", owner="WandbLogger")
        self._options = options
        self._given: Any = None
        self._run: Any = None
        # Ids of runs that this tracker began, shared by all copies. A run that could not be ended is still active when the next one begins.
        self._started_ids: set[str] = set()
        self._last: int | None = None
        self.settle_seconds = _SLOWLY_SETTLED_SECONDS

    @property
    def _wandb(self) -> Any:
        return importlib.import_module("wandb")  # Not kept, so that a logger can be pickled.

    @override
    def prepare(self) -> None:
        active = self._wandb.run
        self._given = None if active is None or active.id in self._started_ids else active
        self.is_given = self._given is not None

    @override
    def start(self, name: str, run_id: str | None, config: Mapping[str, float | str | bool]) -> str:
        if self._given is not None:
            self._run = self._given
            self._run.config.update(dict(config), allow_val_change=True)
        else:
            self._run = self._init_run(run_id or name, config)
        run = self._run
        if run.offline:
            directory = Path(run.dir).parent
            files = [path for path in directory.parent.glob(f"*-{run.id}/run-{run.id}.wandb") if path.parent != directory]
            self._last = max((step for path in files for step in _steps_in_file(path)), default=None)
        else:
            self._last = run.starting_step - 1 if run.starting_step else None
        return str(run.id)

    def _init_run(self, run_id: str, config: Mapping[str, Any]) -> Any:
        wandb, options = self._wandb, dict(self._options)
        settings = options.pop("settings", None) or {}
        settings = dict(settings) if isinstance(settings, Mapping) else settings.model_dump(exclude_unset=True)
        if _FLUSH_SETTING in wandb.Settings.model_fields:
            settings.setdefault(_FLUSH_SETTING, _FLUSH_SECONDS)
        is_offline = (options.get("mode") or os.environ.get("WANDB_MODE")) == "offline"
        if is_offline and _FLUSH_SETTING in settings:
            self.settle_seconds = _SETTLED_SECONDS
        resume = {} if is_offline else {"resume": "allow"}
        arguments = {"id": run_id, "config": dict(config), **resume, **options, "settings": wandb.Settings(**settings)}
        if wandb.run is not None and wandb.run.id in self._started_ids:
            # Otherwise W&B would continue the active run, whatever the id. Older versions accept only the boolean.
            knows_names = "finish_previous" in str(wandb.Settings.model_fields["reinit"].annotation)
            arguments.setdefault("reinit", "finish_previous" if knows_names else True)
        self._started_ids.add(arguments["id"])
        return wandb.init(**arguments)

    @override
    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            if self._last is not None and point.step <= self._last:
                self._run.summary.update(dict(point.values))  # A partial epoch ended at this step, whose row exists and cannot be changed.
                continue
            images = {relative_path(name): self._image(png) for name, png in point.images.items()}
            self._run.log({**point.values, **images}, step=point.step, commit=True)
            self._last = point.step
            time.sleep(_PAUSE)

    def _image(self, png: bytes) -> Any:
        from PIL import Image

        return self._wandb.Image(Image.open(io.BytesIO(png)))

    @override
    def last_step(self, key: str) -> int | None:
        return self._last

    @override
    def finish(self, status: str, summary: Mapping[str, float | str], artifact: tuple[str, Path | str] | None) -> None:
        run = self._run
        run.summary.update(dict(summary))
        if artifact is not None:
            name, place = artifact
            logged = self._wandb.Artifact(f"{run.id}-{name}", type="model")
            if isinstance(place, Path):
                logged.add_dir(str(place))
            else:
                logged.add_reference(place, checksum=False)
            run.log_artifact(logged)
        if not self.is_given:
            run.finish(exit_code=0 if status == "finished" else 1)
            self._started_ids.discard(run.id)
        self._run = self._given = None


def records_of(path: Path) -> Iterator[Any]:
    """Yields the records of a W&B file, up to the point where it was truncated.

    The format is LevelDB's log: after a header of seven bytes, blocks of 32768 bytes contain fragments of records, each preceded by a checksum (uint32), length
    (uint16) and kind (uint8). A record is a protobuf.
    """
    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, record, place = path.read_bytes(), b"", _HEAD
    while True:
        if _BLOCK - place % _BLOCK < _HEAD:  # The rest of the block is too small for a fragment.
            place += _BLOCK - place % _BLOCK
        head = data[place : place + _HEAD]
        if len(head) < _HEAD:
            return
        _, length, kind = struct.unpack("<IHB", head)
        body = data[place + _HEAD : place + _HEAD + length]
        if kind not in (1, 2, 3, 4) or len(body) < length:
            return
        place += _HEAD + length
        record = body if kind in (1, 2) else record + body
        if kind in (1, 4):  # A whole record, or its last fragment.
            yield protocol.Record.FromString(record)


def _steps_in_file(path: Path) -> Iterator[int]:
    return (record.history.step.num for record in records_of(path) if record.WhichOneof("record_type") == "history")
