"""Creates the pictures of README.md: runs examples/digits.py in a terminal, and shows its logs in TensorBoard and its history as a plot.

    python docs/images/make.py [terminal] [pages] [trackers]

It needs what `make venv` installs, `trackers` also what `make peers` installs, and `tmux` and Chromium, for example from
`apt-get install tmux chromium`. Tests do not need it.
"""

import asyncio
import base64
import contextlib
import html
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

from tornado.websocket import websocket_connect

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
JOB = "examples/digits.py"
COLUMNS, ROWS = 104, 20
# The size of a character, in pixels. A narrower or wider font is stretched to it.
WIDTH, HEIGHT, MARGIN = 8.4, 20, 18
COLORS = dict(zip(range(30, 38), ("#6e7681", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#76e3ea", "#e6edf3"), strict=True))
BACKGROUND, EDGE, TEXT = "#161b22", "#30363d", "#e6edf3"
BLOCKS = {chr(0x2590 - eighths): eighths / 8 for eighths in range(1, 9)}  # U+2588 is a full block, U+258F its left eighth.
STYLE = re.compile(r"\x1b\[([\d;]*)m")


def in_terminal(directory: pathlib.Path) -> str:
    """Returns what a terminal shows, including escapes, while the job validates in one of its epochs; nothing if the validation was too short."""
    (directory / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    environment["PATH"] = os.pathsep.join([str(pathlib.Path(sys.executable).parent), environment["PATH"]])

    def tmux(*arguments: str) -> str:
        command = ["tmux", "-S", str(directory / "tmux"), *arguments]
        return subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True, text=True).stdout.rstrip("\n")

    tmux("-f", "/dev/null", "new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), "bash --norc --noprofile")
    try:
        time.sleep(1)
        tmux("send-keys", r"PS1='\[\e[32m\]$\[\e[0m\] '; clear", "Enter")
        time.sleep(1)
        tmux("send-keys", f"python {JOB}", "Enter")
        best, end = "", time.monotonic() + 120  # Preferably with the values of the validated epoch, which are drawn only about ten times per second.
        while time.monotonic() < end:
            shown = tmux("capture-pane", "-p", "-e")
            if (found := re.search(r"Epoch [4-8]/(.*)\n.*validation: +\d+/", shown)) and ("loss" in found[1] or "validation" not in best):
                best = shown
            if "test accuracy" in shown:
                return best
        raise SystemExit(f"the job did not end:\n{shown}")
    finally:
        tmux("kill-server")


def cells(line: str) -> list[tuple[str, str]]:
    """Returns the characters of a line with their colors."""
    color, result, at = TEXT, [], 0
    for style in STYLE.finditer(line):
        result += [(character, color) for character in line[at : style.start()]]
        for code in map(int, filter(None, (style[1] or "0").split(";"))):
            color = COLORS.get(code, TEXT if code in (0, 39) else color)
        at = style.end()
    return result + [(character, color) for character in line[at:]]


def drawing(screen: str) -> str:
    """Returns a screen as SVG: text in a font that every browser has, and the blocks of bars as rectangles, so that there are no gaps between them."""
    lines = [cells(line) for line in screen.splitlines()]
    width, height = round(max(map(len, lines)) * WIDTH + 2 * MARGIN), len(lines) * HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">',
        "<title>A terminal in which fit draws its bars: one for each epoch, with its values, and one for the validation that is going on</title>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{BACKGROUND}" stroke="{EDGE}"/>',
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="14">',
    ]
    for row, line in enumerate(lines):
        column, top = 0, MARGIN + row * HEIGHT
        for (is_block, color), run in itertools.groupby(line, key=lambda cell: (cell[0] in BLOCKS, cell[1])):
            text = "".join(character for character, _ in run)
            left, span = MARGIN + column * WIDTH, len(text) * WIDTH
            if is_block:
                filled = sum(map(BLOCKS.get, text)) * WIDTH
                parts.append(f'<rect x="{left:.1f}" y="{top + 3}" width="{filled:.1f}" height="{HEIGHT - 6}" fill="{color}"/>')
            elif text.strip():
                place = f'x="{left:.1f}" y="{top + 15}" textLength="{span:.1f}"'
                parts.append(f'<text {place} fill="{color}" xml:space="preserve">{html.escape(text)}</text>')
            column += len(text)
    return "\n".join([*parts, "</g>", "</svg>", ""])


def terminal() -> None:
    """Writes `terminal.svg`."""
    screen = ""
    while "loss" not in "".join(screen.splitlines()[-2:-1]):
        with tempfile.TemporaryDirectory() as directory:
            screen = in_terminal(pathlib.Path(directory))
    (HERE / "terminal.svg").write_text(drawing(screen), encoding="utf-8")


def train(directory: pathlib.Path) -> None:
    """Runs the job with two sizes of its network, and writes the plot of the second run's history to `history.png` in `directory`."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import fitflax, digits
from fitflax.callbacks import TensorBoard
train, valid, _ = digits.load()
for features in (4, 32):
    trainer = fitflax.Trainer(digits.CNN(features))
    trainer.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], learning_rate=2e-3)
    board = TensorBoard(f"runs/{{features}} features", every=fitflax.every(steps=5), histograms=fitflax.every(epochs=1))
    history = trainer.fit(*train, batch_size=64, epochs=15, validation_data=valid, callbacks=[board])
figure = history.plot()
figure.savefig("history.png", dpi=110)
"""
    subprocess.run([sys.executable, "-c", code], cwd=directory, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


@contextlib.contextmanager
def served(directory: pathlib.Path):
    """Yields the address of TensorBoard while it serves `directory`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--port", str(port), "--load_fast=false"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}/"
        for _ in range(120):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}data/plugins_listing").close()
                break
            time.sleep(0.5)
        time.sleep(5)  # It reads the files after it starts to answer.
        yield address
    finally:
        server.terminate()
        server.wait()


# Closes the settings pane, which takes a quarter of the page.
CLOSE_SETTINGS = "document.querySelector('metrics-dashboard-right-pane button')?.click() ?? document.querySelector('button.settings-button')?.click()"


async def take(browser: str, address: str, path: pathlib.Path, size: tuple[int, int]) -> None:
    """Opens a page in a browser, waits until its charts are drawn, and writes a screenshot."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--remote-debugging-port=0"]
        command = [browser, *options, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            told = pathlib.Path(profile) / "DevToolsActivePort"
            while not told.exists() or not told.read_text():
                await asyncio.sleep(0.2)
            with urllib.request.urlopen(f"http://127.0.0.1:{told.read_text().split()[0]}/json/list") as answer:
                page = next(target for target in json.load(answer) if target["type"] == "page")
            connection = await websocket_connect(page["webSocketDebuggerUrl"], max_message_size=2**26)
            number = itertools.count(1)

            async def call(method: str, **parameters: object) -> dict:
                sent = next(number)
                await connection.write_message(json.dumps({"id": sent, "method": method, "params": parameters}))
                while (answer := json.loads(await connection.read_message())).get("id") != sent:
                    pass
                return answer["result"]

            await call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
            await call("Page.navigate", url=address)
            await asyncio.sleep(8)
            await call("Runtime.evaluate", expression=CLOSE_SETTINGS)
            await asyncio.sleep(12)
            picture = await call("Page.captureScreenshot", format="png")
            path.write_bytes(base64.b64decode(picture["data"]))
        finally:
            process.terminate()
            process.wait()


def screenshot(address: str, path: pathlib.Path, size: tuple[int, int]) -> None:
    """Writes a screenshot of a page in Chromium when it no longer changes."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("There is no Chromium here: apt-get install chromium.")
    asyncio.run(take(browser, address, path, size))


def pages() -> None:
    """Writes `history.png`, and the curves of two runs as `tensorboard-light.png` and `tensorboard-dark.png`."""
    with tempfile.TemporaryDirectory() as directory:
        work = pathlib.Path(directory)
        train(work)
        shutil.copy(work / "history.png", HERE)
        with served(work / "runs") as address:
            for name, dark in (("light", "false"), ("dark", "true")):
                query = f"?darkMode={dark}&tagFilter=^(loss%7Caccuracy)&runFilter=train%7Cval&smoothing=0#timeseries"
                screenshot(address + query, HERE / f"tensorboard-{name}.png", (1280, 600))


def trackers() -> None:
    """Writes `mlflow.png`: the metrics of a run in the MLflow UI."""
    sys.path.insert(0, str(ROOT))
    from PIL import Image

    from tests.integrations.servers import Server

    with tempfile.TemporaryDirectory() as directory:
        work = pathlib.Path(directory)
        server = Server(work)
        server.start()
        try:
            code = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import fitflax, digits
from fitflax.integrations.mlflow import MLflowLogger
train, valid, _ = digits.load()
trainer = fitflax.Trainer(digits.CNN(32))
trainer.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], learning_rate=2e-3)
logger = MLflowLogger("digits", tracking_uri={server.uri!r}, every=fitflax.every(steps=5))
trainer.fit(*train, batch_size=64, epochs=15, validation_data=valid, callbacks=[logger], verbose=0)
import mlflow
print(mlflow.MlflowClient({server.uri!r}).get_run(logger.run_id).info.experiment_id, logger.run_id)
"""
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            printed = subprocess.run([sys.executable, "-c", code], cwd=directory, env=env, check=True, capture_output=True, text=True).stdout
            experiment, run = printed.split()[-2:]
            screenshot(f"{server.uri}/#/experiments/{experiment}/runs/{run}/model-metrics", work / "page.png", (1280, 1900))
            Image.open(work / "page.png").crop((200, 1075, 946, 1810)).save(HERE / "mlflow.png")  # The charts of its metrics.
        finally:
            server.stop()


if __name__ == "__main__":
    for make in (terminal, pages, trackers):
        if make.__name__ in sys.argv[1:] or not sys.argv[1:]:
            make()
