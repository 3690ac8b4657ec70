"""A process that imports what scenarios import, once, and forks itself for each: an import takes longer than a tiny boot.

It never boots an engine. Requests and answers are lines of JSON on its standard input and output; `processes.Starter` asks.
Spawned processes of engines read this file too, as multiprocessing's main module: it imports nothing of vLLM at its top.
"""

import gc
import json
import os
import sys
from pathlib import Path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    import run_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401 - what an engine in this process imports when it boots

    gc.freeze()  # what is here for good; vLLM collects garbage several times a boot
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                become(**request)
                run_engine.main(Path(request["scenario"]), Path(request["result"]))
                return
        print(answer, file=answers, flush=True)


def become(*, environment: dict[str, str], output: str, errors: str, **_: str) -> None:
    """A process in a session of its own, as if it had been started with this environment and these logs."""
    os.setsid()
    os.environ.update(environment)
    for stream, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY), (2, errors, os.O_WRONLY)):
        file = os.open(path, flags | os.O_CREAT, 0o600)
        os.dup2(file, stream)
        os.close(file)


if __name__ == "__main__":
    main()
