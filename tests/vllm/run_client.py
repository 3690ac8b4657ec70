"""One client of `clients.py`, with an engine of its own. See `test_clients.py`.

    python run_client.py FOLDER CLIENT NUM_RANKS

FOLDER has a checkpoint for each seed. Writes what `try_client` found.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import cpu_transfer
import psutil

from tests.engines.clients import FAMILY, SEEDS, try_client
from tests.engines.subject import make_policy


def main(folder: Path, name: str, num_ranks: int) -> None:
    from tests.vllm.clients import CLIENTS

    os.environ["FP8REFIT_TEST_GPUS"] = str(os.getpid())
    kind, _ = CLIENTS[name]
    cpu_transfer.install()
    policies = [make_policy(FAMILY, seed) for seed in SEEDS]  # booting changes the models of transformers
    client = kind(folder / "policy-0", num_ranks)
    try:
        found = try_client(client, policies)
    finally:
        client.close()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    code = 1
    try:
        main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
        code = 0
    except BaseException:  # noqa: BLE001 - it ends here
        traceback.print_exc()
    sys.stderr.flush()
    for process in psutil.Process().children(recursive=True):
        process.kill()  # a trainer's own server
    os._exit(code)  # threads of a trainer that is gone may wait
