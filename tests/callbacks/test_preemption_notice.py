"""`PreemptionNotice`: for every kind of notice, the run is saved after the current step and exits as after SIGTERM."""

import contextlib
import http.server
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from flax import linen as nn

import fitflax
from fitflax.callbacks import LambdaCallback, ModelCheckpoint, PreemptionNotice
from fitflax.errors import CallbackError, FitflaxWarning

X, Y = np.ones((64, 3), np.float32), np.ones((64, 1), np.float32)


def fit(directory, notice, *, at=5, give=lambda: None, epochs=10**6, **options):
    """Trains until the notice, which is given at step `at`, is received; returns the trainer."""
    trainer = fitflax.Trainer(nn.Dense(1))
    trainer.compile("sgd", "mse")

    def on_step(batch, logs):
        logs["loss"]
        if trainer.step == at:
            give()

    callbacks = [LambdaCallback(on_train_batch_end=on_step), ModelCheckpoint(directory / "checkpoints"), PreemptionNotice(notice, seconds=0.05, **options)]
    trainer.fit(X, Y, batch_size=4, epochs=epochs, callbacks=callbacks, verbose=0)
    return trainer


def assert_saved_and_exited(directory, notice, **options):
    with pytest.raises(SystemExit) as exited:
        fit(directory, notice, **options)
    assert exited.value.code == 143
    steps = fitflax.checkpoints.CheckpointStore(directory / "checkpoints").steps()
    assert steps and max(steps) >= 5
    assert not [thread for thread in threading.enumerate() if thread.name == "fitflax-preemption"]


@contextlib.contextmanager
def metadata_server(answers: dict[str, str | int], requests: list[tuple[str, str, dict[str, str]]]) -> Iterator[str]:
    """Yields the address of a server that answers by path: a text, or the number of an error."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.command, self.path, {name.lower(): value for name, value in self.headers.items()}))
            answer = answers.get(self.path, 404)
            if isinstance(answer, int):
                self.send_error(answer)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        do_PUT = do_GET

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_file_that_appears_is_a_notice(tmp_path):
    mark = tmp_path / "stop"
    assert_saved_and_exited(tmp_path, str(mark), give=mark.touch)


def test_a_function_can_give_the_notice(tmp_path):
    notices = []
    assert_saved_and_exited(tmp_path, lambda: bool(notices), give=lambda: notices.append(1))


def test_a_signal_is_a_notice_and_its_handler_is_restored(tmp_path):
    earlier = signal.getsignal(signal.SIGUSR1)
    assert_saved_and_exited(tmp_path, signal.SIGUSR1, give=lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert signal.getsignal(signal.SIGUSR1) == earlier


def test_the_notice_of_aws_is_recognized(tmp_path, monkeypatch):
    answers, requests = {"/latest/api/token": "t0ken"}, []
    path = "/latest/meta-data/spot/instance-action"
    with metadata_server(answers, requests) as address:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{address}/")
        assert_saved_and_exited(tmp_path, "aws", give=lambda: answers.update({path: '{"action": "terminate", "time": "2026-11-25T08:22:00Z"}'}))
    put, get = requests[:2]
    assert put[0] == "PUT" and get[:2] == ("GET", path) and get[2]["x-aws-ec2-metadata-token"] == "t0ken"


@pytest.mark.parametrize(("key", "value"), [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")])
def test_the_notices_of_google_cloud_are_recognized(key, value, tmp_path, monkeypatch):
    root = "/computeMetadata/v1/instance"
    answers, requests = {f"{root}/preempted": "FALSE", f"{root}/maintenance-event": "NONE"}, []
    with metadata_server(answers, requests) as address:
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        assert_saved_and_exited(tmp_path, "gce", give=lambda: answers.update({f"{root}/{key}": value}))
    assert all(headers["metadata-flavor"] == "Google" for _, _, headers in requests)


def test_an_unreachable_server_causes_one_warning_and_training_continues(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.warns(FitflaxWarning, match=r"PreemptionNotice\('aws'\) could not check for a notice: URLError") as caught:
        trainer = fit(tmp_path, "aws", epochs=3, give=lambda: time.sleep(0.2))
    assert trainer.step == 48 and len(caught) == 1


@pytest.mark.slow
def test_a_notice_ends_with_its_run_and_does_not_stop_the_next_one(tmp_path):
    mark = tmp_path / "stop"
    assert fit(tmp_path / "first", mark, epochs=1).step == 16
    mark.touch()
    with pytest.raises(SystemExit):
        fit(tmp_path / "second", mark, at=0)
    mark.unlink()
    trainer = fit(tmp_path / "third", mark, epochs=2)
    assert trainer.step == 32


def test_invalid_arguments_are_immediate_errors_and_the_callback_can_be_pickled():
    for notice in ("", 3, None):
        with pytest.raises(CallbackError, match=r"must be 'aws', 'gce', the path of a file, a signal or a function"):
            PreemptionNotice(notice)
    with pytest.raises(CallbackError, match=r"must be 'aws', 'gce' or a path. Received: 'azure'. If it is a file, pass './azure'."):
        PreemptionNotice("azure")
    with pytest.raises(
        CallbackError, match=r"does not accept names of signals. Received: 'SIGTERM'. Pass the signal, such as signal.SIGUSR1; SIGTERM needs no callback"
    ):
        PreemptionNotice("SIGTERM")
    with pytest.raises(CallbackError, match="not needed for"):
        PreemptionNotice(signal.SIGTERM)
    with pytest.raises(CallbackError, match=r"must be a positive number. Received: 0"):
        PreemptionNotice("aws", seconds=0)
    assert pickle.loads(pickle.dumps(PreemptionNotice("aws"))).notice == "aws"


def test_a_signal_needs_the_main_thread(tmp_path):
    faults = []

    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FitflaxWarning)  # The warning that SIGTERM does not save there.
            try:
                fit(tmp_path, signal.SIGUSR1, epochs=1)
            except CallbackError as error:
                faults.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(faults) == 1 and "needs fit to run in the main thread" in faults[0]
