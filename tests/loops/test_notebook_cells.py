"""Cells that are run repeatedly in a real kernel: nothing is compiled twice, and no device memory leaks."""

import re

import nbclient
import nbformat
import pytest

SETUP = """
import gc, time
import fitflax, jax, numpy as np
from flax import linen as nn
from jax._src import monitoring

x = np.ones((16, 8), np.float32)
misses = []
monitoring.register_event_listener(lambda event, **_: misses.append(event) if event == "/jax/compilation_cache/cache_misses" else None)
gc.disable()  # Nothing may depend on it: it does not know how much a device holds.
"""
CELL = """
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.Dense({width})(x))

trainer = fitflax.Trainer(Net())
trainer.compile("sgd", "mse")
trainer.fit(x, x[:, :1], epochs=2, validation_data=(x, x[:, :1]))
"""
LOOK = "print('MISSES', len(misses), 'BYTES', sum(array.nbytes for array in jax.live_arrays()))"


def run(cells, env, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    texts = "".join(output["text"] for cell in notebook.cells for output in cell.outputs if output.output_type == "stream")
    return [(int(misses), int(size)) for misses, size in re.findall(r"MISSES (\d+) BYTES (\d+)", texts)]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # Fifty cells that compile without a cache take 45 seconds on an idle machine, and a multiple of that while other tests run.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_cell_that_is_run_fifty_times_compiles_once_and_keeps_one_state(process_env, monkeypatch):
    env = {name: value for name, value in process_env.items() if not name.startswith("JAX_COMPILATION_CACHE")} | {"JAX_NUM_CPU_DEVICES": "1"}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    # Large enough for a state that triggers a garbage collection: 80 MB.
    found = run([SETUP, *[CELL.format(width=2_000_000), LOOK] * 4, *[CELL.format(width=4), LOOK] * 46], env, monkeypatch)
    large, small = found[:4], found[4:]
    assert large[0][0] > 0 and len({misses for misses, _ in large}) == 1 and large[-1][1] == large[0][1] > 2**26
    assert small[0][0] > large[0][0] and len({misses for misses, _ in small}) == 1 and small[-1][1] < 2**26
