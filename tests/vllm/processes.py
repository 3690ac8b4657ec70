"""The processes of a scenario: started together, waited for, found again when their driver is gone."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from tests.serving import free_port

HERE = Path(__file__).parent
_LONGEST_S = 600.0
"""No scenario takes as long."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
FAREWELL_S = 5
"""How long an engine's processes may outlive its driver."""


class Run:
    """One process of Python, in a session of its own."""

    def __init__(self, arguments: Collection, environment: Mapping[str, str], logs: Path) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._output, self._errors = logs.with_name(f"{logs.name}.out"), logs.with_name(f"{logs.name}.err")
        with open(self._output, "w") as output, open(self._errors, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *self.arguments],
                stdout=output,
                stderr=errors,
                env=os.environ | ENVIRONMENT | environment,
                start_new_session=True,
            )

    @property
    def session(self) -> int:
        """Of this process and all that it starts."""
        return self._process.pid

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait(self, deadline_s: float) -> int:
        """Its exit status; a process that does not end is ended, with everything that it started."""
        try:
            return self._process.wait(max(0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()

    def __str__(self) -> str:
        log = "\n".join(file.read_text()[-6000:] for file in (self._output, self._errors))
        return f"{' '.join(self.arguments)} ended with {self._process.returncode}\n{log}"


class Starter:
    """A process that has imported an engine, `start_scenarios.py`, and forks one of its kind for every scenario.

    Args:
        modules: What scenarios import when an engine boots.
        environment: Of all processes.
        folder: For its log.
    """

    def __init__(self, modules: Collection[str], environment: Mapping[str, str], folder: Path) -> None:
        self._errors = folder / "starter.err"
        with open(self._errors, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", HERE.parent / "start_scenarios.py", *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | ENVIRONMENT | environment,
                text=True,
            )

    def ask(self, **request: object) -> int:
        """Its answer to a request: a process's PID, or the exit status of one."""
        try:
            print(json.dumps(request, default=str), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            raise ProcessFailure(f"no scenario can be started\n{self._errors.read_text()[-6000:]}") from error

    def close(self) -> None:
        """Let it end. Scenarios that run go on."""
        self._process.communicate()


class ScenarioRun:
    """One process that runs a scenario of `run_engine.py`, in a session of its own."""

    def __init__(
        self, starter: Starter, scenario: Path, result: Path, environment: Mapping[str, str], logs: Path
    ) -> None:
        self._starter, self._scenario = starter, scenario
        self._output, self._errors = logs.with_name(f"{logs.name}.out"), logs.with_name(f"{logs.name}.err")
        asked = {"scenario": scenario, "result": result, "output": self._output, "errors": self._errors}
        self.session = starter.ask(**asked, environment=environment)
        """Of this process and all that it starts."""
        self._code: int | None = None

    def wait(self, deadline_s: float) -> int:
        """Its exit status; a process that does not end is ended, with everything that it started."""
        process = os.pidfd_open(self.session)
        ended, _, _ = select.select([process], [], [], max(0, deadline_s - time.monotonic()))
        os.close(process)
        if not ended:
            os.killpg(self.session, signal.SIGKILL)
        self._code = self._starter.ask(ended=self.session)
        return self._code

    def __str__(self) -> str:
        log = "\n".join(file.read_text()[-6000:] for file in (self._output, self._errors))
        return f"{self._scenario.read_text()} ended with {self._code}\n{log}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the drivers of one scenario found."""

    drivers: list[dict]
    left: list[str]
    """Command lines of processes that outlived them."""

    def ranks(self, find: Callable[[dict], list]) -> list:
        """What `find` gives for each rank: several of one driver, or one of each."""
        return [found for driver in self.drivers for found in find(driver)]


class ProcessFailure(Exception):
    """A process that ended otherwise than it should have; says what it wrote."""


def run_python(arguments: Collection, environment: Mapping[str, str], folder: Path, *, timeout_s: float) -> str:
    """Run one process to its end, and give its standard output."""
    run = Run(arguments, environment, folder / uuid.uuid4().hex[:8])
    if run.wait(time.monotonic() + timeout_s):
        raise ProcessFailure(str(run))
    return run.output


def run_scenario(
    starter: Starter,
    name: str,
    arguments: Mapping[str, object],
    folder: Path,
    *,
    timeout_s: float,
    environment: Mapping[str, str] = MappingProxyType({}),
    num_drivers: int = 1,
    may_die: Collection[int] = (),
) -> Outcome:
    """Run a scenario of `run_engine.py` in one process, or in one a rank.

    Args:
        environment: What these processes' differs in from the starter's.
        may_die: Ranks that may end by SIGKILL, once they noted what they found.

    Raises:
        ProcessFailure: A driver ended otherwise than it should have.
    """
    remove_left_memory()
    label = f"{name.replace(' ', '-')}-{uuid.uuid4().hex[:8]}"
    scenario = folder / f"{label}.json"
    scenario.write_text(json.dumps({"name": name, "arguments": arguments}, default=str))
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_drivers)}
    runs, results = [], []
    for rank in range(num_drivers):
        results.append(folder / f"{label}-{rank}-result.json")
        ranked = launcher | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_drivers > 1 else {}
        logs = folder / f"{label}-{rank}"
        runs.append(ScenarioRun(starter, scenario, results[rank], {**environment, **ranked}, logs))
    deadline_s = time.monotonic() + timeout_s
    codes = [run.wait(deadline_s) for run in runs]
    left = wait_until_gone([run.session for run in runs])
    for rank, (code, result) in enumerate(zip(codes, results, strict=True)):
        was_killed = rank in may_die and code == -signal.SIGKILL and result.exists()
        if code and not was_killed:
            raise ProcessFailure("\n\n".join(map(str, runs)))
    return Outcome(drivers=[json.loads(result.read_text()) for result in results], left=left)


def remove_left_memory() -> None:
    """vLLM names shared memory of ranks on a CPU after a port, and leaves it behind if they are killed. An engine that gets the
    port later could not boot.
    """
    for file in Path("/dev/shm").glob("*-cpushm_*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > _LONGEST_S:
                file.unlink()


def wait_until_gone(sessions: Collection[int]) -> list[str]:
    """The command lines of processes of these sessions that still run some seconds after their drivers. They are ended."""
    deadline_s = time.monotonic() + FAREWELL_S
    while (left := processes_of(sessions)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return sorted(left.values())


def processes_of(sessions: Collection[int]) -> dict[int, str]:
    """PID and command line of every process that these sessions began, dead ones apart."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone by now
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in sessions and state not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
    return found


def shared_files() -> list[str]:
    """Files in `/dev/shm` that the processes of this process's session have mapped."""
    found = set()
    for pid in processes_of([os.getsid(0)]):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found |= {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return sorted(found)


def vllm_version() -> tuple[int, ...]:
    """Of the vLLM here, which is not imported."""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return tuple(int(number) for number in version(package).split(".")[:3] if number.isdigit())
    raise AssertionError("vLLM is not installed")
