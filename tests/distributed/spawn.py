"""Start the ranks of a distributed test as processes of their own, with a time limit, and leave none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

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


def environment(rank: int, world: int, port: int, nodes: int = 1) -> dict[str, str]:
    """What torchrun sets for a rank."""
    per_node = world // nodes
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_node),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(world: int, *arguments: str, limit: float = 240, script: str = "ranks.py", nodes: int = 1) -> list[Ended]:
    """Run `script` on so many ranks and wait for them.

    Args:
        world: Ranks.
        arguments: Of the script.
        limit: Seconds for all of it; what still runs then is killed, and the test fails.
        script: A file in this folder.
        nodes: Nodes to pretend.
    """
    port, began = free_port(), time.monotonic()
    processes = []
    outputs = []
    for rank in range(world):
        log = open(Path(arguments[0]) / f"rank-{os.getpid()}-{port}-{rank}.log", "w+")  # noqa: SIM115
        outputs.append(log)
        processes.append(
            subprocess.Popen(
                [sys.executable, str(HERE / script), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment(rank, world, port, nodes)},
                start_new_session=True,
            )
        )
    seconds = [0.0] * world
    try:
        while any(p.poll() is None for p in processes):
            for rank, p in enumerate(processes):
                if p.poll() is not None and not seconds[rank]:
                    seconds[rank] = time.monotonic() - began
            if time.monotonic() - began > limit:
                break
            time.sleep(0.05)
        late = [rank for rank, p in enumerate(processes) if p.poll() is None]
    finally:
        for p in processes:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    ended = []
    for rank, (p, log) in enumerate(zip(processes, outputs, strict=True)):
        log.seek(0)
        ended.append(Ended(p.returncode, log.read(), seconds[rank] or time.monotonic() - began))
        log.close()
    assert not late, f"ranks {late} still ran after {limit} s:\n{ended[late[0]].output[-3000:]}"
    return ended


def succeed(world: int, *arguments: str, **options: object) -> None:
    """Run, and show the output of a rank that failed."""
    for rank, end in enumerate(run(world, *arguments, **options)):
        assert end.code == 0, f"rank {rank} of {world} ended with {end.code}:\n{end.output[-6000:]}"
