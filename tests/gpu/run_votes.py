"""How long a vote of many members takes, on one host with many cores; no GPU is used.

    python tests/gpu/run_votes.py --out FILE [--sizes 2 16 64 256] [--votes 200]

Every member is a process of its own that holds nothing but its end of the store, at the loopback address.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fp8refit.bench.result import gpu_name, stamp, versions_of
from fp8refit.transport.collective.communicator import Communicator, Meeting

TIMEOUT_S = 120.0


def main() -> None:
    """Measure, fit a line, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 16, 64, 256])
    parser.add_argument("--votes", type=int, default=200)
    args = parser.parse_args()
    rows = [measure(size, args.votes) for size in args.sizes]
    slope, intercept = statistics.linear_regression([row["size"] for row in rows], [row["median_ms"] for row in rows])
    found = {
        "gpu": gpu_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        **stamp(),
        "versions": versions_of(),
        "num_cores": len(os.sched_getaffinity(0)),
        "command": f"python {' '.join(sys.argv)}",
        "rows": rows,
        "alpha_ms": intercept,
        "beta_ms": slope,
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found) + "\n")


def measure(size: int, num_votes: int) -> dict[str, Any]:
    """Votes of `size` members, one after another, as the trainer sees them."""
    pipes = [os.pipe() for _ in range(1, size)]
    children = [start(rank, num_votes, *pipe) for rank, pipe in enumerate(pipes, 1)]
    trainer = Communicator.open(host="127.0.0.1", port=0, size=size, backend="gloo", timeout_s=TIMEOUT_S)
    for reader, writer in pipes:
        os.close(reader)
        os.write(writer, trainer.meeting.model_dump_json().encode())
        os.close(writer)
    times_ms = vote(trainer, num_votes)
    failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(failed), failed
    return {"size": size, "num_votes": num_votes, "median_ms": statistics.median(times_ms), "max_ms": max(times_ms)}


def start(rank: int, num_votes: int, reader: int, writer: int) -> int:
    """One member, which has this process's modules without loading them."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.close(writer)
        meeting = Meeting.model_validate_json(os.read(reader, 1 << 16))
        vote(Communicator.find(meeting, rank, timeout_s=TIMEOUT_S), num_votes)
        code = 0
    finally:
        os._exit(code)


def vote(member: Communicator, num_votes: int) -> list[float]:
    """Vote as often as all others do; milliseconds of each vote but the first, for which members come late."""
    times_ms = []
    for _ in range(1 + num_votes):
        start_s = time.perf_counter()
        member.agree(None, timeout_s=TIMEOUT_S)
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    return times_ms[1:]


if __name__ == "__main__":
    main()
