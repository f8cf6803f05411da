"""Ctrl-C and SIGTERM in a notebook, in a real kernel: the cell ends, the run is saved, the kernel stays alive, and the next cell resumes the run."""

import contextlib
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

TIMEOUT = 300
# Waits in the hook of step 7 until the run has noticed the signal, so that the signal always arrives there.
FIRST_CELL = """
import os, pathlib, signal
import fitflax
from fitflax.callbacks import LambdaCallback, ModelCheckpoint
from tests.run_script import TRAIN, at, differences, directory_of, make_trainer, steps_in

def wait(step):
    print("at step", step, flush=True)
    while signal.getsignal(signal.SIGINT).__self__.requested is None:
        pass

def start(directory, wait_at=None):
    trainer = make_trainer()
    stops = [] if wait_at is None else [at(trainer, "on_train_batch_end", wait_at, wait)]
    says = LambdaCallback(on_train_begin=lambda logs: print("begins at", trainer.step), on_train_end=lambda logs: print("on_train_end ran"))
    trainer.fit(TRAIN, batch_size=4, steps=12, verbose=0, resume="auto", callbacks=[ModelCheckpoint(directory, keep=None), *stops, says])
    return trainer
"""


class Notebook:
    """Runs cells in a separate kernel.

    Args:
        manager: The manager of the running kernel.
    """

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self._client: Any = manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=TIMEOUT)

    def cell(self, code: str, *, at: str | None = None, do: Callable[[], None] = lambda: None) -> tuple[str, str]:
        """Runs a cell, calls `do` when it has printed `at`, and returns what it printed and the error that it ended with."""
        request = self._client.execute(code)
        printed, error = "", ""
        while True:
            message = self._client.get_iopub_msg(timeout=TIMEOUT)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "stream" and content["name"] == "stdout":
                printed += content["text"]
                if at is not None and at in printed:
                    do()
                    at = None
            elif kind == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, error

    def close(self) -> None:
        self._client.stop_channels()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, compilation_cache: dict[str, str]) -> Iterator[Notebook]:
    home = tmp_path_factory.mktemp("home")  # Otherwise kernels leave files in the user's home directory and read the settings there.
    variables = {name: str(home) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    variables |= {**compilation_cache, "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[2])}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, value in variables.items():
            patch.setenv(name, value)
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel()
        stack.callback(manager.shutdown_kernel, now=True)
        notebook = Notebook(manager)
        stack.callback(notebook.close)
        assert notebook.cell(FIRST_CELL) == ("", "")
        yield notebook


def interrupt(notebook: Notebook) -> Callable[[], None]:
    return notebook.manager.interrupt_kernel


def terminate(notebook: Notebook) -> Callable[[], None]:
    return lambda: notebook.manager.signal_kernel(signal.SIGTERM)


@pytest.mark.parametrize(("how", "error"), [(interrupt, "KeyboardInterrupt: "), (terminate, "SystemExit: 143")])
@pytest.mark.slow
def test_an_interrupted_cell_saves_and_the_next_one_resumes_bit_for_bit(how, error, notebook, tmp_path):
    never, here = f"{tmp_path}/never", f"{tmp_path}/here"
    assert notebook.cell(f"never = start({never!r})") == ("begins at 0\non_train_end ran\n", "")
    printed = notebook.cell(f"start({here!r}, wait_at=7)", at="at step 7", do=how(notebook))
    assert printed == ("begins at 0\nat step 7\non_train_end ran\n", error)
    assert notebook.manager.is_alive()
    assert notebook.cell(f"print(steps_in(pathlib.Path({here!r})))") == ("[5, 7]\n", "")
    assert notebook.cell(f"print(start({here!r}).step)") == ("begins at 7\non_train_end ran\n12\n", "")
    compare = f"print(differences(*(directory_of(pathlib.Path(path))['step_00000012'] for path in ({here!r}, {never!r}))))"
    assert notebook.cell(compare) == ("[]\n", "")
