"""Run the fuzzers of this folder for a given time, each file in turns, with a new seed and more examples every turn.

    python -m tests.fuzz.run_fuzz [--minutes 10] [--seed 1] [FILE ...]

The file that has had the least time is next. The first turn that fails ends the run, with the command that repeats it.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NO_TESTS = 5
"""Exit code of pytest where every test of a file is of another environment."""
MAX_TURN_S = 120
"""A turn of about this length is not made longer."""
HANGS_S = 1200
"""A test that takes longer hangs."""


@dataclass
class Fuzzer:
    file: str
    num_examples: int = 50
    seconds: float = 0.0
    num_turns: int = 0

    def take_turn(self, seed: int) -> int:
        """Run it once and give pytest's exit code."""
        environment = {"FP8REFIT_FUZZ": "long", "FP8REFIT_FUZZ_EXAMPLES": str(self.num_examples)}
        options = [f"--hypothesis-seed={seed}", "--timeout", str(HANGS_S), "-m", "not gpu and not vllm and not sglang"]
        command = ["-m", "pytest", self.file, *options]
        start = time.monotonic()
        code = subprocess.run([sys.executable, *command, "-q"], cwd=ROOT, env=os.environ | environment).returncode
        seconds = time.monotonic() - start
        print(
            f"{self.file}: seed {seed}, {self.num_examples} examples a test: {seconds:.0f} s, exit code {code}",
            flush=True,
        )
        if code not in (0, NO_TESTS):
            setting = " ".join(f"{name}={value}" for name, value in environment.items())
            print(f"\nfailed; to repeat it:\n  {setting} python -m pytest {self.file} --hypothesis-seed={seed}")
        self.seconds += seconds
        self.num_turns += 1
        if seconds < MAX_TURN_S / 2:
            self.num_examples *= 2
        return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="*", default=sorted(str(file.relative_to(ROOT)) for file in HERE.glob("test_*.py"))
    )
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("FP8REFIT_FUZZ_MINUTES", "10")))
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1_000_000), help="Of the first turn; then one more."
    )
    chosen = parser.parse_args()
    end = time.monotonic() + 60 * chosen.minutes
    fuzzers = [Fuzzer(file) for file in chosen.files]
    seed = chosen.seed
    print(f"{len(fuzzers)} files, {chosen.minutes:g} minutes, first seed {seed}", flush=True)
    while fuzzers and time.monotonic() < end:
        fuzzer = min(fuzzers, key=lambda fuzzer: fuzzer.seconds)
        code = fuzzer.take_turn(seed)
        if code == NO_TESTS:
            fuzzers.remove(fuzzer)
        elif code != 0:
            return code
        seed += 1
    for fuzzer in fuzzers:
        print(f"{fuzzer.file}: {fuzzer.num_turns} turns, {fuzzer.seconds:.0f} s, nothing found")
    return 0 if fuzzers and all(fuzzer.num_turns for fuzzer in fuzzers) else 1


if __name__ == "__main__":
    sys.exit(main())
