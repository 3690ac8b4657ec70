"""One rank of a gloo process group: does what the lines on its standard input say, and answers each with a line of JSON.

["exchange", group, text, times, timeout_s]   the sha256 of what every rank said, or the error; and the seconds it took
["die"]                                       end without a word
"""

import hashlib
import os
import sys
import time
from datetime import timedelta

import torch.distributed

from fp8refit.errors import EngineLostError
from fp8refit.transport.process_group import ProcessGroupExchange
from tests.transport.other_process import answer_orders

GROUPS = {"both": [0, 1], "late": [0, 1], "dead": [0, 2]}
"""Which ranks of three each group joins."""


def digest(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def main(store: str, rank: int) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, 3), rank=rank, world_size=3, timeout=timedelta(seconds=120)
    )
    groups = {name: torch.distributed.new_group(ranks) for name, ranks in GROUPS.items()}
    exchanges = {name: ProcessGroupExchange(groups[name]) for name, ranks in GROUPS.items() if rank in ranks}

    def do_exchange(group, text, times, timeout_s):
        start_s = time.perf_counter()
        answer = {"rank": exchanges[group].rank, "size": exchanges[group].size}
        try:
            said = exchanges[group].exchange(text.encode() * times, timeout_s=timeout_s)
        except EngineLostError as error:
            answer["error"] = str(error)
        else:
            answer["said"] = [digest(message) for message in said]
        return answer | {"seconds": time.perf_counter() - start_s}

    answer_orders({"exchange": do_exchange, "die": lambda: os._exit(1), "ready": lambda: "ready"})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
