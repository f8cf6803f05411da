"""`MLflowLogger`: logs a run to MLflow."""

import hashlib
import importlib
import io
import re
from collections.abc import Mapping, Sequence
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

__all__ = ["MLflowLogger"]

_RUN_TAG, _COMMIT_TAG = "fitflax.run", "mlflow.source.git.commit"
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
# Limits of a server: metrics and params in one request, and the length of a param.
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = 500, 100, 6000
_NOT_IN_NAMES = re.compile(r"[^\w\-./ ]|^\.\.", re.ASCII)
_DIGEST_LENGTH = 8
# The timeout of a first request, because MLflow itself retries for minutes if there is no server.
_PROBE_SECONDS = 5.0


class MLflowLogger(TrackerLogger):
    """Logs a run to MLflow. See `TrackerLogger`. Needs `pip install 'fitflax[mlflow]'`.

    Values are metrics, and hyperparameters are params. Params cannot be changed: if a resumed run has another value, it is logged as the tag `<name> after
    resume`. If there is an active run of `mlflow.start_run` in this thread, the logger uses it and does not end it. Otherwise the run has the tag
    `fitflax.run`, by which a resume finds it even if it began after the checkpoint was saved. Characters that MLflow does not allow in names are replaced by
    `_`, and a digest is appended. Arguments that are not listed are those of `TrackerLogger`.

    Args:
        experiment: The experiment's name. It is created if it does not exist; by default, the active experiment.
        name: The run's name; by default, MLflow generates one.
        tracking_uri: The server or database; by default, whatever MLflow is configured to use.
        tags: Tags of the run.
        log_system_metrics: Whether MLflow logs the use of CPU, memory and GPU; by default, whatever MLflow is configured to do.

    Raises:
        ImportError: The package mlflow is not installed.
        CallbackError: An argument has a wrong type or value.

    Log a run to a server and upload its best checkpoint::

        from fitflax.callbacks import BestCheckpoint
        from fitflax.integrations.mlflow import MLflowLogger

        best = BestCheckpoint("runs/a/best", monitor="val_loss")
        logger = MLflowLogger("digits", tracking_uri="http://127.0.0.1:5000", checkpoint=best)
        trainer.fit(x, y, epochs=10, validation_split=0.2, callbacks=[best, logger])
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        log_system_metrics: bool | None = None,
        every: Trigger | None = None,
        sown: str | None = "summaries",
        checkpoint: StoreCallback | None = None,
        interval: float = 2.0,
        end_seconds: float = 60.0,
    ) -> None:
        tracker = _MLflow(experiment, name, tracking_uri, dict(tags or {}), log_system_metrics)
        super().__init__(tracker, every=every, sown=sown, checkpoint=checkpoint, interval=interval, end_seconds=end_seconds)


class _MLflow(Tracker):
    """MLflow, through its client. The arguments are those of `MLflowLogger`."""

    def __init__(self, experiment: str | None, name: str | None, uri: str | None, tags: dict[str, str], log_system_metrics: bool | None) -> None:
        import_package("mlflow", owner="MLflowLogger")
        self._experiment, self._run_name, self._given_uri, self._tags, self._log_system_metrics = experiment, name, uri, tags, log_system_metrics
        self._uri = ""
        self._client: Any = None
        self._given: str | None = None
        self._run_id = ""
        self._last: dict[str, int] = {}
        self._monitor: Any = None
        # Metrics and images of points that were logged in part when a request failed.
        self._logged: set[tuple[str, int]] = set()
        self._images: dict[str, int] | None = None

    @property
    def _mlflow(self) -> Any:
        return importlib.import_module("mlflow")  # Not kept, so that a logger can be pickled.

    @property
    def title(self) -> str:  # type: ignore[override]
        """The tracker's name in warnings."""
        scheme, separator, rest = self._uri.partition("://")
        return f"MLflow at {scheme}{separator}{rest.rpartition('@')[2]}"  # Without a password.

    @override
    def prepare(self) -> None:
        active = self._mlflow.active_run()
        self._given = None if active is None else active.info.run_id
        self.is_given = active is not None
        self._uri = self._given_uri or self._mlflow.get_tracking_uri()

    def _probe(self) -> None:
        """Raises an error if the server does not answer. The answer's status is ignored."""
        if self._uri.startswith(("http://", "https://")):
            import requests

            try:
                requests.head(self._uri, timeout=_PROBE_SECONDS, allow_redirects=False).close()
            except requests.RequestException as error:
                raise CallbackError(f"{type(error).__name__}.") from error

    @override
    def start(self, name: str, run_id: str | None, config: Mapping[str, float | str | bool]) -> str:
        self._probe()
        self._client = self._mlflow.MlflowClient(self._uri)  # For a database, this migrates its tables.
        run = self._find_run(self._given or run_id, name)
        is_new = run is None
        if run is None:
            run = self._create_run(name, config.get("git_commit"))
        self._run_id, self._logged, self._images = run.info.run_id, set(), None
        # As in MLflow's own monitor, because the history of a metric may be long. There is no public attribute.
        self._last = {metric.key: metric.step for metric in run.data._metric_objs}
        if self._given is not None:
            tag = f"{_RUN_TAG}.{name}"
            self.is_continued = tag in run.data.tags
            self._client.set_tag(self._run_id, tag, "true")
        elif not is_new:
            self._client.update_run(self._run_id, status="RUNNING")
        self._log_params({self._key(key): str(value)[:_MAX_PARAM_LENGTH] for key, value in config.items()}, run.data.params)
        log_system_metrics = self._log_system_metrics
        if log_system_metrics is None:
            log_system_metrics = bool(importlib.import_module("mlflow.environment_variables").MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get())
        if self._given is None and self._monitor is None and log_system_metrics:
            monitors = importlib.import_module("mlflow.system_metrics.system_metrics_monitor")
            self._monitor = monitors.SystemMetricsMonitor(self._run_id, resume_logging=not is_new, tracking_uri=self._uri)
            self._monitor.start()
        return str(self._run_id)

    def _find_run(self, run_id: str | None, name: str) -> Any:
        """Returns the run with this id or, if there is none, the one that fitflax began under this name."""
        if run_id is not None:
            try:
                run = self._client.get_run(run_id)
            except self._mlflow.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                if run.info.lifecycle_stage == "active":  # MLflow also returns deleted runs, which are read-only.
                    return run
        runs = self._client.search_runs([self._experiment_id()], f"tags.`{_RUN_TAG}` = '{name}'", max_results=1)
        return runs[0] if runs else None

    def _experiment_id(self) -> str:
        if self._experiment is None and self._given_uri is None:
            return str(importlib.import_module("mlflow.tracking.fluent")._get_experiment_id())
        name = self._experiment or "Default"
        existing = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if existing is None else existing.experiment_id)

    def _create_run(self, name: str, commit: object) -> Any:
        context = importlib.import_module("mlflow.tracking.context.registry")
        tags = context.resolve_tags({**self._tags, _RUN_TAG: name})
        if commit is not None:
            tags.setdefault(_COMMIT_TAG, commit)
        return self._client.create_run(self._experiment_id(), tags=tags, run_name=self._run_name)

    def _log_params(self, params: Mapping[str, str], before: Mapping[str, str]) -> None:
        entities = self._mlflow.entities
        new = [entities.Param(key, value) for key, value in params.items() if key not in before]
        changed = [entities.RunTag(f"{key} after resume", value) for key, value in params.items() if before.get(key, value) != value]
        for begin in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=new[begin : begin + _MAX_PARAMS])
        if changed:
            self._client.log_batch(self._run_id, tags=changed)

    @override
    def log(self, points: Sequence[Point]) -> None:
        self._probe()
        for point in points:
            for name, png in point.images.items():
                if (name, point.step) not in self._logged:
                    self._log_image(name, point, png)
                    self._logged.add((name, point.step))
        make = self._mlflow.entities.Metric
        metrics = [make(self._key(key), value, round(point.seconds * 1000), point.step) for point in points for key, value in point.values.items()]
        metrics = [metric for metric in metrics if (metric.key, metric.step) not in self._logged]
        for begin in range(0, len(metrics), _MAX_METRICS):
            part = metrics[begin : begin + _MAX_METRICS]
            self._client.log_batch(self._run_id, metrics=part)
            self._logged |= {(metric.key, metric.step) for metric in part}
        steps = {point.step for point in points}
        self._logged = {(name, step) for name, step in self._logged if step not in steps}

    def _log_image(self, name: str, point: Point, png: bytes) -> None:
        from PIL import Image

        image = Image.open(io.BytesIO(png))
        self._client.log_image(self._run_id, image, key=self._key(name), step=point.step, timestamp=round(point.seconds * 1000), synchronous=True)

    @staticmethod
    def _key(name: str) -> str:
        """Returns a name that MLflow accepts. A name that has to be changed gets a digest, so that different names stay different."""
        key = _NOT_IN_NAMES.sub("_", relative_path(name))
        return key if key == name else f"{key}_{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:_DIGEST_LENGTH]}"

    @override
    def last_step(self, key: str) -> int | None:
        key = self._key(key)
        if not self._last:
            return None  # A new run.
        return self._last[key] if key in self._last else self._last_images().get(key)

    def _last_images(self) -> Mapping[str, int]:
        """Returns the last step of each image, from MLflow's file names."""
        if self._images is None:
            self._images = {}
            for file in self._client.list_artifacts(self._run_id, "images"):
                parts = Path(file.path).name.split("+")
                if len(parts) > 2 and parts[1] == "step":
                    key = parts[0].replace("~", "/")
                    self._images[key] = max(int(parts[2]), self._images.get(key, 0))
        return self._images

    @override
    def abandon(self) -> None:
        if self._monitor is not None:  # Its `finish` may wait minutes for requests. There is no public attribute.
            self._monitor._shutdown_event.set()

    @override
    def finish(self, status: str, summary: Mapping[str, float | str], artifact: tuple[str, Path | str] | None) -> None:
        self.abandon()
        self._probe()
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.finish()
        for key, value in summary.items():
            if isinstance(value, str):  # The last value of each metric is already logged.
                self._client.set_tag(self._run_id, key, value)
        if artifact is not None:
            name, place = artifact
            if isinstance(place, Path):
                self._client.log_artifacts(self._run_id, str(place), f"{name}/{place.name}")
            else:
                self._client.set_tag(self._run_id, name, place)
        if self._given is None:
            self._client.set_terminated(self._run_id, _STATUS[status])
        self._client = None
