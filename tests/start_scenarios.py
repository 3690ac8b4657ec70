"""A process that imports what scenarios import, once, and forks itself for each: an import takes longer than a tiny boot.

python -P start_scenarios.py MODULE...      `run_engine.py` of the engine's folder is imported, and these modules

It never boots an engine. Requests and answers are lines of JSON on its standard input and output; `processes.Starter` asks.
Spawned processes of engines read this file too, as multiprocessing's main module: it imports no engine at its top.
"""

import gc
import importlib
import json
import os
import sys
from pathlib import Path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    run_engine, torch, *_ = map(importlib.import_module, ["run_engine", "torch", *sys.argv[1:]])
    # Else threads of a fork, as loaders have them, would race to make torch's pool of threads anew.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    gc.freeze()  # what is here for good; engines collect garbage several times a boot,
    gc.unfreeze = lambda: None  # and vLLM has all of it looked at again when it shuts one down
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
