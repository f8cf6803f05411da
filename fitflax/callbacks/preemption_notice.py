"""`PreemptionNotice`: saves a run before the machine is preempted, after a notice other than SIGTERM."""

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from typing_extensions import override

from fitflax.callbacks.base import Callback, Phase, check_number
from fitflax.errors import CallbackError, warn
from fitflax.parallel.launch import preempt

# A metadata server that is available answers within milliseconds.
_TIMEOUT_SECONDS = 2.0
_JOIN_SECONDS = 5.0
_AWS = "http://169.254.169.254"
_GCE = "metadata.google.internal"

Notice = Callable[[], bool]


class PreemptionNotice(Callback):
    """Saves the run and ends the process with exit code 143, as after SIGTERM, when there is notice that the machine will be preempted.

    `fit` does this without a callback after SIGTERM, which Slurm, Kubernetes and Cloud TPUs send. Use this callback for other kinds of notice. With several
    processes, it is enough that one of them is notified: all of them save after the same step.

    Args:
        notice: The source of the notice: `"aws"` for the interruption of a spot instance; `"gce"` for the preemption of a spot or preemptible VM, or a VM that
            is terminated for maintenance; the path of a file that appears (remove it before a restart); a signal, such as `signal.SIGUSR1`; or a function
            that returns whether there is notice.
        seconds: The interval between two checks in a background thread. Not used for signals.

    Raises:
        CallbackError: An argument has a wrong type or value. In `fit`: `notice` is a signal, and `fit` does not run in the main thread; or there are several
            processes, and JAX's option `jax_enable_preemption_service` is off.

    Warns:
        FitflaxWarning: A check failed: the metadata server could not be reached, or the function raised an error. Training and the checks continue.

    >>> PreemptionNotice("aws").seconds
    5.0
    """

    phase = Phase.DECIDE
    needs_gradients_norm = False

    def __init__(self, notice: str | os.PathLike[str] | signal.Signals | Notice, *, seconds: float = 5.0) -> None:
        check_number("PreemptionNotice", "seconds", seconds, "a positive number")
        if not (isinstance(notice, str | os.PathLike | signal.Signals) or callable(notice)) or notice == "":
            raise CallbackError(f"PreemptionNotice(notice) must be 'aws', 'gce', the path of a file, a signal or a function. Received: {notice!r}.")
        if isinstance(notice, str) and notice not in ("aws", "gce") and not set(notice) & {os.sep, "."}:
            if notice.removeprefix("SIG") in {known.name.removeprefix("SIG") for known in signal.Signals}:
                raise CallbackError(
                    f"PreemptionNotice(notice) does not accept names of signals. Received: {notice!r}. Pass the signal, such as signal.SIGUSR1; SIGTERM needs "
                    "no callback."
                )
            raise CallbackError(f"PreemptionNotice(notice) must be 'aws', 'gce' or a path. Received: {notice!r}. If it is a file, pass './{notice}'.")
        if notice in (signal.SIGTERM, signal.SIGINT):
            raise CallbackError(f"PreemptionNotice is not needed for {notice!r}, because fit saves after this signal anyway. Remove the callback.")
        self.notice = notice
        self.seconds = float(seconds)
        self._previous_handler: Any = None
        self._thread: threading.Thread | None = None
        self._stop_event: threading.Event | None = None
        # The thread's last error. There is one warning in a run.
        self._last_error: str | None = None
        self._has_warned = False

    @override
    def on_train_begin(self, logs: Mapping[str, Any]) -> None:
        self._last_error, self._has_warned = None, False
        if jax.distributed.is_initialized() and not jax.config.values["jax_enable_preemption_service"]:
            raise CallbackError(
                "With several processes, PreemptionNotice needs JAX's jax_enable_preemption_service. Enable it before jax.distributed.initialize()."
            )
        if isinstance(self.notice, signal.Signals):
            if threading.current_thread() is not threading.main_thread():
                raise CallbackError(f"PreemptionNotice({self.notice!r}) needs fit to run in the main thread, because Python delivers signals only there.")
            self._previous_handler = signal.signal(self.notice, lambda number, frame: preempt())
            return
        notice: Any = self.notice
        has_notice = notice if callable(notice) else _METADATA_SERVERS[notice] if notice in _METADATA_SERVERS else Path(notice).exists
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(has_notice, self._stop_event), name="fitflax-preemption", daemon=True)
        self._thread.start()

    def _watch(self, has_notice: Notice, stop_event: threading.Event) -> None:
        while True:
            try:
                if has_notice():
                    preempt()
                    return
            except Exception as error:  # noqa: BLE001 (a custom function, or the network, can raise anything)
                self._last_error = f"{type(error).__name__}: {error}"
            if stop_event.wait(self.seconds):
                return

    @override
    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        self._warn_once()

    def _warn_once(self) -> None:
        if self._last_error is not None and not self._has_warned:
            self._has_warned = True
            warn(f"PreemptionNotice({self.notice!r}) could not check for a notice: {self._last_error}. It tries again, but may miss a preemption until then.")

    @override
    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        self._warn_once()
        if self._thread is not None and self._stop_event is not None:
            self._stop_event.set()
            self._thread.join(_JOIN_SECONDS)  # With a limit, because it may be waiting for a server or in a user's function.
            self._thread = self._stop_event = None
        if isinstance(self.notice, signal.Signals) and self._previous_handler is not None:
            signal.signal(self.notice, self._previous_handler)
            self._previous_handler = None


def _has_aws_notice() -> bool:
    """Queries the instance metadata service, version 2. See "Spot Instance interruption notices" in the EC2 user guide."""
    server = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _AWS).rstrip("/")
    token = _fetch(f"{server}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    notice = _fetch(f"{server}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""})
    return notice is not None and json.loads(notice).get("action") in ("stop", "terminate", "hibernate")


def _has_gce_notice() -> bool:
    """Queries the metadata server. See "Detect if a VM was preempted" and "Get live migration notifications" in the Compute Engine guide."""
    server = f"http://{os.environ.get('GCE_METADATA_HOST', _GCE)}/computeMetadata/v1/instance"
    return any(_fetch(f"{server}/{key}", {"Metadata-Flavor": "Google"}) == value for key, value in _GCE_NOTICES.items())


_GCE_NOTICES = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}


def _fetch(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str | None:
    """Returns the response of a metadata server; `None` for status 404."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return str(answer.read().decode()).strip()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


_METADATA_SERVERS = {"aws": _has_aws_notice, "gce": _has_gce_notice}
