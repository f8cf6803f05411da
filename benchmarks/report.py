"""Formats the results as Markdown tables and RESULTS.md. Each workload has a section with its own machine, so that it can be measured again separately."""

import re
from typing import Any

from benchmarks.peers import PEERS
from benchmarks.workloads import ALL, make_workload

PREAMBLE = """# Results

Written by `python -m benchmarks.run --write`; [README.md](README.md) describes what is measured and how to read it.
"""


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def spread(found: dict[str, float] | None, digits: int = 3) -> str:
    """Returns a median with the lowest and the highest round."""
    return "" if found is None else f"{found['median']:.{digits}f} ({found['low']:.{digits}f}..{found['high']:.{digits}f})"


def table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def peers_table(result: dict[str, Any]) -> str:
    heading = ["peer", "us/step", f"ratio to {result['base']}", "loss", "start ms", "first step s", "process s", "peak MB", "what it is"]
    rows = []
    for name, peer in result["peers"].items():
        if peer["missing"]:
            rows.append([name, *[""] * 7, f"{PEERS[name].about}: **{peer['missing']}**"])
            continue
        train, process = peer["train"], peer["process"] or dict.fromkeys(("first_step_s", "process_s", "peak_mb"))
        numbers = [number(train["us"], 1), spread(train["ratio"]), f"{peer['values']['train']['loss']:.6f}", number(train["start_ms"], 1)]
        whole = [number(process["first_step_s"], 2), number(process["process_s"], 2), number(process["peak_mb"], 0)]
        rows.append([name, *numbers, *whole, PEERS[name].about])
    return table(heading, rows)


def reading_table(result: dict[str, Any]) -> str:
    """Returns the table of `evaluate` and `predict`, or nothing if no peer has them."""
    rows = [
        [do, name, number(peer[do]["us"], 1), spread(peer[do]["ratio"]), number(peer[do]["start_ms"], 1)]
        for do in ("evaluate", "predict")
        for name, peer in result["peers"].items()
        if peer.get(do)
    ]
    return table(["operation", "peer", "us/step", f"ratio to {result['base']}", "start ms"], rows) if rows else ""


def claims_table(result: dict[str, Any]) -> str:
    rows = []
    for claim in result["claims"]:
        digits = 1 if claim["unit"] else 3
        limit = f"{claim['limit']:.{digits}f}{' ' * bool(claim['unit'])}{claim['unit']}"
        rows.append([claim["what"], limit, spread(claim["found"], digits), spread(claim["control"], digits), claim["verdict"]])
    return table(["claim", "limit", "found", "control", "verdict"], rows)


def section(result: dict[str, Any], machine: dict[str, Any]) -> str:
    workload = make_workload(result["workload"])
    size = f"{result['rounds']} rounds of {result['steps']} steps" + (", **small sizes: only to check that the benchmark runs**" if result["small"] else "")
    parts = [
        f"## {workload.name}",
        f"{workload.about}. {size}. device {result['device']}, {', '.join(f'{name} {value}' for name, value in machine.items())}.",
        claims_table(result),
        peers_table(result),
        reading_table(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def merged(text: str, sections: dict[str, str]) -> str:
    """Returns RESULTS.md with new sections in place of the old ones of the same workloads."""
    old = {part.partition("\n")[0].strip(): f"## {part.strip()}\n" for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}
    kept = old | sections
    return "\n".join([PREAMBLE, *(kept[workload.name] for workload in ALL if workload.name in kept)])
