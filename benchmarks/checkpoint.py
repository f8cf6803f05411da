"""Compares a save with a raw write of the same bytes, a restore with a raw read, and both with flax and Orbax.

Each round runs base, fitflax, control, control, fitflax, base. The peers follow. All of them write and read the same float32 arrays:

* save: the base writes the arrays' bytes to a file and calls fsync. fitflax writes a whole checkpoint: structure, checksums, metadata, and fsync of all files.
* restore: the base reads the bytes into fresh memory and computes their zlib.crc32. fitflax verifies everything and puts the arrays into their tree.
* snapshot: the base copies every array. fitflax makes the copy that an asynchronous save writes during training, and waits for it.

The control is a second base: its ratio shows how much this machine varies around 1. Old files are deleted before the clock starts. Files are read from the
disk, not from the page cache, as after a restart of the machine. Memory is always fresh (glibc is told not to keep freed memory), as in a process that resumes.

With `--pause`, it measures training during asynchronous saves instead; see `pause.py`.

Speed is the base's time divided by the contender's: 1 is the speed of the disk. The extra memory of a save is the high-water mark of a separate process.
"""

import argparse
import ctypes
import gc
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import fitflax
from fitflax.checkpoints.checkpoint_files import read_metadata, read_state, write_checkpoint
from fitflax.checkpoints.restore import restore_tree
from fitflax.checkpoints.saver import Saver, Snapshots
from fitflax.parallel import DataParallel
from fitflax.state import TrainState
from fitflax.steps.live_state import LiveState

LIMITS = {"save": 0.85, "restore": 0.7}
MAX_EXTRA_MB = 64
SNAPSHOT_SECONDS = 0.010  # beyond one copy
# For `--pause`: the pause relative to a warm copy; extra memory relative to the state; steps during a save, and while its copy is moved from a GPU to the host,
# relative to other steps. On a GPU, the pause is limited in seconds.
PAUSE_LIMITS = {"pause": 1.5, "memory": 1.1, "steps": 1.1, "moving": 1.02}
PAUSE_ON_GPU = 0.020
PAUSE_PEERS = {"orbax": 10, "flax": 2}  # The maximum number of rounds of each. A save with flax takes about 10 s.
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt

Tree = dict[str, dict[str, jax.Array]]
Contender = Callable[[], Any]


def make_tree(megabytes: float, arrays: int) -> Tree:
    rng = np.random.default_rng(0)
    size = int(megabytes * 2**20 / 4 / arrays)
    return {f"layer_{index}": {"kernel": jnp.asarray(rng.standard_normal(size, np.float32))} for index in range(arrays)}


def clear(path: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    return path


def drop_from_page_cache(directory: pathlib.Path) -> None:
    """Frees the page cache of all files in a directory, where the system allows it."""
    for path in filter(pathlib.Path.is_file, directory.rglob("*")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_file(path: pathlib.Path, blocks: list[Any]) -> None:
    with open(path, "wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def savers(tree: Tree, directory: pathlib.Path) -> dict[str, Contender]:
    """Returns the contenders that save. Each writes to its own name in the directory."""
    host = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]

    def fitflax_save() -> None:
        (directory / "fitflax").mkdir()
        write_checkpoint(directory / "fitflax", train=tree, run=None, metadata={})

    def orbax_save() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory / "orbax", tree)
            checkpointer.wait_until_finished()

    return {
        "base": lambda: write_file(directory / "base", host),
        "fitflax": fitflax_save,
        "control": lambda: write_file(directory / "control", host),
        "flax": lambda: write_file(directory / "flax", [flax.serialization.to_bytes(tree)]),
        "orbax": orbax_save,
    }


def restorers(tree: Tree, directory: pathlib.Path) -> dict[str, Contender]:
    """Returns the contenders that restore what `savers` saved."""
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    def read_file(path: pathlib.Path) -> np.ndarray:
        memory = np.empty(num_bytes, np.uint8)
        view, done = memory.data, 0
        with open(path, "rb", buffering=0) as file:
            while done < num_bytes:
                done += file.readinto(view[done:])
        zlib.crc32(memory)
        return memory

    def fitflax_restore() -> Any:
        metadata = read_metadata(directory / "fitflax")
        train = read_state(directory / "fitflax", metadata, roots=["train"])["train"]
        return restore_tree(target, train, where="the checkpoint", root="train", key_impls=metadata["key_impls"])

    def orbax_restore() -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            return jax.block_until_ready(checkpointer.restore(directory / "orbax", target))

    return {
        "base": lambda: read_file(directory / "base"),
        "fitflax": fitflax_restore,
        "control": lambda: read_file(directory / "control"),
        "flax": lambda: flax.serialization.from_bytes(target, (directory / "flax").read_bytes()),
        "orbax": orbax_restore,
    }


def copiers(tree: Tree) -> dict[str, Contender]:
    """Returns the contenders that copy the tree. No peer has a separate call for this."""
    host = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    strategy = DataParallel(jax.devices()[:1])
    on_device = strategy.put(tree)
    state = TrainState(step=strategy.put(np.int32(0)), params=on_device, model_state={}, opt_state=(), key=strategy.put(jax.random.key(0)))
    live = LiveState(strategy, state, 0)
    snapshots = Snapshots(live, Saver())  # As in a run, they reuse memory.

    def snapshot() -> Any:
        train, _ = snapshots.take(live.borrow(), {})()
        return jax.block_until_ready(train.tree)

    return {
        "base": lambda: [leaf.copy() for leaf in host],
        "fitflax": snapshot,
        "control": lambda: [leaf.copy() for leaf in host],
    }


def check_same(tree: Tree, found: Any, who: str) -> None:
    """Checks that a contender restored the same values."""
    leaves = jax.tree.leaves(found)
    bits = [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(tree)]
    found_bits = np.split(leaves[0], np.cumsum([len(part) for part in bits])[:-1]) if len(leaves) < len(bits) else leaves
    for mine, other in zip(bits, found_bits, strict=True):
        np.testing.assert_array_equal(mine, np.asarray(other).view(np.uint8), err_msg=f"{who} restored different values")


def timed(contender: Contender) -> float:
    gc.collect()
    began = time.perf_counter()
    result = contender()
    seconds = time.perf_counter() - began
    del result
    return seconds


def measure(contenders: dict[str, Contender], rounds: int, prepare: Callable[[str], Any] = lambda who: None) -> dict[str, Any]:
    """Returns seconds and speeds. `prepare(who)` is called before a contender runs again."""
    for contender in contenders.values():
        contender()  # Imports modules, starts threads and fills caches.
    core = ["base", "fitflax", "control"]
    seconds: dict[str, list[float]] = {who: [] for who in contenders}
    # Alternates the order, so that a machine that slows down affects all equally. The peers leave memory in another state, so they run last.
    for who in [*core, *reversed(core)] * rounds + [name for name in contenders if name not in core] * rounds:
        prepare(who)
        seconds[who].append(timed(contenders[who]))

    def speed(who: str) -> dict[str, float]:
        mine, base = (np.reshape(seconds[name], (rounds, 2)).sum(axis=1) for name in (who, "base"))
        return {"median": float(np.median(base / mine)), "min": float(np.min(base / mine)), "max": float(np.max(base / mine))}

    medians = {f"{who}_s": statistics.median(times) for who, times in seconds.items()}
    return {"rounds": rounds, **medians, "speed": speed("fitflax"), "control": speed("control")}


def status() -> dict[str, int]:
    """Returns this process's memory in kB, as Linux reports it."""
    lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if name in {"VmHWM", "VmRSS"}}


def print_peak(who: str, megabytes: float, arrays: int, directory: pathlib.Path) -> None:
    """Prints how many MB the high-water mark of this process rises above its memory before a save."""
    tree = jax.block_until_ready(make_tree(megabytes, arrays))
    (directory / "small").mkdir()
    savers(make_tree(0.1, 2), directory / "small")[who]()
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Resets the high-water mark.
    before = status()["VmRSS"]
    savers(tree, directory)[who]()
    print((status()["VmHWM"] - before) / 1024)


def peak(who: str, megabytes: float, arrays: int, parent: pathlib.Path) -> float | None:
    """Returns the extra memory of a save in MB, or `None` if the system is not Linux."""
    if not pathlib.Path("/proc/self/clear_refs").exists():
        return None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        return float(printed(__file__, "--peak", who, "--megabytes", str(megabytes), "--arrays", str(arrays), "--directory", directory).split()[-1])


def printed(*arguments: str) -> str:
    """Returns the output of another Python process that uses the same fitflax."""
    roots = (pathlib.Path(file).resolve().parent.parent for file in (fitflax.__file__, __file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])])}
    return subprocess.run([sys.executable, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def pause_part(part: str, rounds: int, parent: pathlib.Path, quick: bool) -> dict[str, Any]:
    """Returns the numbers of a part of `pause.py`, from a separate process."""
    numbers: dict[str, Any] = json.loads(printed("-m", "benchmarks.pause", part, "--rounds", str(rounds), "--directory", str(parent), *["--quick"] * quick))
    return numbers


def pause_rows(rounds: int, parent: pathlib.Path, quick: bool, peers: bool) -> list[dict[str, Any]]:
    """Returns the rows of the table of pauses: the measured quantity, its median, minimum and maximum, the reference, and the ratio."""
    alone, fit = (pause_part(part, rounds, parent, quick) for part in ("alone", "fitflax"))
    others = {who: pause_part(who, min(rounds, most), parent, quick) for who, most in PAUSE_PEERS.items() if peers}
    loop = pause_part("pauses", rounds, parent, quick)
    warm, rows = loop["pauses"]["warm copy"], []

    def add(what: str, values: list[float], base: float | None = None, limit: float | None = None) -> None:
        ratio = None if not values or not base else statistics.median(values) / base
        verdict = "" if limit is None or ratio is None else "ok" if ratio <= limit else "over"
        rows.append({"what": what, "values": values, "ratio": ratio, "limit": limit, "verdict": verdict})

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    is_on_gpu = loop["platform"] != "cpu"
    base, worst_base, limit = (PAUSE_ON_GPU, PAUSE_ON_GPU, 1.0) if is_on_gpu else (median(warm), max(warm), PAUSE_LIMITS["pause"])
    for who, values in {**loop["pauses"], **{who: numbers["pauses"] for who, numbers in others.items()}}.items():
        add(f"pause of {who}, s", values, base, limit if who == "fitflax" else None)
    add("CPU time of a pause of fitflax, s", loop["cpu"]["fitflax"], median(loop["cpu"]["warm copy"]))
    add(f"worst pause of fitflax, s, relative to {'20 ms' if is_on_gpu else 'the worst warm copy'}", [max(loop["pauses"]["fitflax"])], worst_base, limit)
    add("first pause of fitflax, s", [fit["first_pause"]], base)
    add("pause in fit, s, with waits for the previous save", fit["pauses"], base)
    add("save without training, s", loop["saves"])
    for who, numbers in {"fitflax": fit, **others}.items():
        limits = PAUSE_LIMITS if who == "fitflax" else {}
        add(f"step during a save of {who}, s", numbers["during"], median(numbers["others"]), limits.get("steps"))
        if numbers["transfers"]:
            add(f"step during a transfer to the host of {who}, s", numbers["moving"], median(numbers["others"]), limits.get("moving"))
            add(f"transfer to the host of {who}, s", numbers["transfers"])
        add(f"other steps of {who}, s", numbers["others"])
        add(f"save of {who} during training, s", numbers["saves"])
        add(f"throughput of {who} during training, MB/s", [numbers["megabytes"] / seconds for seconds in numbers["saves"]])
        for name, memory in (("peak_mb", "memory"), ("device_peak_mb", "memory of the device")):
            if numbers[name] is not None:
                bound = limits.get("memory") if name == "peak_mb" else None
                add(f"extra {memory} of {who}, MB, relative to the state", [numbers[name] - alone[name]], numbers["megabytes"], bound)
                add(f"peak {memory} of {who}, MB", [numbers[name]])
    return rows


def pause_table(rows: list[dict[str, Any]]) -> str:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"

    def spread(values: list[float]) -> str:
        text = shown(statistics.median(values)) if values else "none"
        return f"{text} ({shown(min(values))}..{shown(max(values))})" if len(values) > 1 else text

    lines = [["what", "median (lowest..highest)", "number", "ratio", "limit", "verdict"], ["---"] * 6]
    lines += [[row["what"], spread(row["values"]), str(len(row["values"])), shown(row["ratio"]), shown(row["limit"]), row["verdict"]] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(megabytes: float, arrays: int, rounds: int, parent: pathlib.Path, peers: bool) -> list[dict[str, Any]]:
    """Returns the table rows for a tree of one size."""
    tree = jax.block_until_ready(make_tree(megabytes, arrays))
    size = {"megabytes": megabytes, "arrays": arrays}

    def chosen(contenders: dict[str, Contender]) -> dict[str, Contender]:
        return {who: run for who, run in contenders.items() if peers or who not in {"flax", "orbax"}}

    with tempfile.TemporaryDirectory(dir=parent) as name:
        directory = pathlib.Path(name)
        save = {"operation": "save", **size, **measure(chosen(savers(tree, directory)), rounds, lambda who: clear(directory / who))}
        readers = chosen(restorers(tree, directory))
        for who, contender in readers.items():
            check_same(tree, contender(), who)
        restore = {"operation": "restore", **size, **measure(readers, rounds, lambda who: drop_from_page_cache(directory))}
    snapshot = {"operation": "snapshot", **size, **measure(copiers(tree), rounds)}
    del tree, readers
    save["extra_mb"] = {who: peak(who, megabytes, arrays, parent) for who in ("fitflax", *(("flax", "orbax") if peers else ()))}
    for row in (save, restore):
        limit = LIMITS[row["operation"]]
        row |= {"limit": limit, "verdict": "ok" if row["speed"]["median"] >= min(limit, row["control"]["median"]) else "under"}
    snapshot |= {"limit": SNAPSHOT_SECONDS, "verdict": "ok" if snapshot["fitflax_s"] <= snapshot["base_s"] + SNAPSHOT_SECONDS else "over"}
    extra = save["extra_mb"]["fitflax"]
    save["verdict"] = "over" if extra is not None and extra >= MAX_EXTRA_MB else save["verdict"]
    return [save, restore, snapshot]


def machine(directory: pathlib.Path) -> dict[str, Any]:
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("jax", "jaxlib", "flax", "orbax-checkpoint", "numpy")}
    here = {"cpus": os.cpu_count(), "platform": platform.platform(), "zlib": zlib.ZLIB_RUNTIME_VERSION, "directory": str(directory)}
    return here | versions | {"fitflax": fitflax.__version__}


def table(rows: list[dict[str, Any]]) -> str:
    def spread(ratio: dict[str, float]) -> str:
        return f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"

    def rate(row: dict[str, Any], who: str) -> str:
        return f"{row['megabytes'] / row[f'{who}_s']:.0f}" if f"{who}_s" in row else ""

    def extra(row: dict[str, Any]) -> str:
        return " / ".join("?" if value is None else f"{value:.0f}" for value in row.get("extra_mb", {}).values())

    names = ("base", "fitflax", "flax", "orbax")
    lines = [["operation", "MB x arrays", *(f"{who} MB/s" for who in names), "speed", "control", "limit", "verdict", "extra MB"], ["---"] * 11]
    for row in rows:
        limit = "one copy + 10 ms" if row["operation"] == "snapshot" else f"{row['limit']:.2f}"
        cells = [row["operation"], f"{row['megabytes']:g} x {row['arrays']}", *(rate(row, who) for who in names)]
        lines.append([*cells, spread(row["speed"]), spread(row["control"]), limit, row["verdict"], extra(row)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def keep_no_memory() -> None:
    """Makes glibc return freed memory to the system, so that the memory of all contenders is fresh. Does nothing on other systems."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**17)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[512], help="sizes of the trees in MB; 4096 needs about 16 GB of memory")
    parser.add_argument("--arrays", type=int, nargs="+", default=[64, 2000], help="numbers of arrays in a tree")
    parser.add_argument("--pause", action="store_true", help="measure pauses of training, steps during a save, and memory, with the arrays of GPT-2 small")
    parser.add_argument("--rounds", type=int, help="default: 5, or 10 with --pause")
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path.cwd(), help="where to write temporary files, on the disk to measure")
    parser.add_argument("--no-peers", action="store_true", help="leave out flax and Orbax, which take most of the time")
    parser.add_argument("--quick", action="store_true", help="a tree of 0.5 MB, to check that the benchmark runs")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this JSON file")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peak:
        print_peak(options.peak, options.megabytes[0], options.arrays[0], options.directory)
        return
    if options.pause:
        rows = pause_rows(options.rounds or 10, options.directory, options.quick, not options.no_peers)
        finish(pause_table(rows), rows, options)
        return
    keep_no_memory()
    sizes = [(0.5, 5)] if options.quick else [(megabytes, arrays) for megabytes in options.megabytes for arrays in options.arrays]
    rows = [row for size in sizes for row in rows_of(*size, options.rounds or 5, options.directory, not options.no_peers)]
    finish(table(rows), rows, options)


def finish(text: str, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    here = machine(options.directory.resolve())
    print(text, ", ".join(f"{name} {value}" for name, value in here.items()), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "results": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
