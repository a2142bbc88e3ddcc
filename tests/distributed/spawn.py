"""Start the ranks of a distributed test as processes of their own, with a time limit, and leave none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass
class Ended:
    """How a rank ended."""

    code: int
    output: str
    seconds: float


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank of one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(world: int, *arguments: str, limit: float = 240, script: str = "ranks.py") -> list[Ended]:
    """Run `script` on so many ranks of this machine and wait for them.

    Args:
        world: Ranks.
        arguments: Of the script; the first is a folder for logs.
        limit: Seconds for all of it; what still runs then is killed, and the test fails.
        script: A file in this folder.
    """
    port, command = free_port(), [sys.executable, str(HERE / script), *arguments]
    return launch([(command, environment(rank, world, port)) for rank in range(world)], arguments[0], limit)


def torchrun(nodes: int, *arguments: str, ranks: int = 1, limit: float = 240, script: str = "ranks.py") -> list[Ended]:
    """Run a script under one torchrun a node, of so many ranks each. Other arguments as in `run`."""
    port = free_port()
    start = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
    start += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [str(HERE / script), *arguments]
    commands = [[*start, f"--node-rank={node}", *command] for node in range(nodes)]
    return launch([(command, {"OMP_NUM_THREADS": "1"}) for command in commands], arguments[0], limit)


def launch(commands: list[tuple[list[str], dict[str, str]]], folder: str, limit: float) -> list[Ended]:
    """Run commands side by side, each in a process group of its own, and kill what is left of them at the end."""
    began = time.monotonic()
    logs = [Path(folder) / f"{time.time_ns()}-{i}.log" for i in range(len(commands))]
    processes = []
    for (command, extra), log in zip(commands, logs, strict=True):
        with open(log, "w") as out:
            processes.append(
                subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **extra}, start_new_session=True
                )
            )
    seconds = [limit] * len(commands)
    try:
        while time.monotonic() - began < limit and any(p.poll() is None for p in processes):
            time.sleep(0.05)
            for i, p in enumerate(processes):
                if p.poll() is not None:
                    seconds[i] = min(seconds[i], time.monotonic() - began)
        late = [i for i, p in enumerate(processes) if p.poll() is None]
    finally:
        for p in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    ended = [Ended(p.returncode, log.read_text(), s) for p, log, s in zip(processes, logs, seconds, strict=True)]
    assert not late, f"process {late[0]} still ran after {limit} s:\n{ended[late[0]].output[-3000:]}"
    return ended


def succeed(world: int, *arguments: str, **options: Any) -> None:
    """Run, and show the output of a rank that failed."""
    for rank, end in enumerate(run(world, *arguments, **options)):
        assert end.code == 0, f"rank {rank} of {world} ended with {end.code}:\n{end.output[-6000:]}"
