"""Compiles every kernel for Hopper by the Triton that is installed, for every dtype of sources, and writes that it did.

    python -m tests.kernels.run_compiling --out benchmarks/results/compiled.json

`nox -s kernels` runs it with each Triton in turn; `test_launches.py` compiles for BF16 alone, and holds that all were compiled
since the kernels changed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

BY_TABLE = {"_quantize_tiles", "_quantize_rows", "_quantize_groups", "quantize_levels", "_copy_tiles"}
KERNELS = BY_TABLE | {"_add_product", "_add_products", "_quantize_tile", "_raise_maxima"}
MOST_SHARED_BYTES = 99 << 10
"""Of a program on the GPUs with the least of it that multiply FP8 (Ada)."""
MOST_STACK_BYTES = 8
"""Of a program that takes tables. By Triton 3.7.1, the one that counts what differs in NVFP4's rows has as much."""
DTYPES = ("bfloat16", "float16", "float32")
HOPPER = "90"
PARTS = ("kernels",)


def compile_all(dtypes: tuple[str, ...], cache: Path) -> list[dict]:
    """Compile without the interpreter, which takes what the compiler refuses, and hold that each kernel is fit for a GPU.

    Raises:
        AssertionError: One does not compile, or needs too much.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name("compiling.py")), HOPPER, ",".join(dtypes)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert {each["kernel"] for each in found} == KERNELS
    assert all(each["has_code"] and each["shared_bytes"] <= MOST_SHARED_BYTES for each in found), found
    spilled = [each for each in found if each["kernel"] in BY_TABLE and each["stack_bytes"] > MOST_STACK_BYTES]
    assert spilled == [], f"does not fit in registers: {spilled}"
    return found


def main() -> None:
    import tempfile

    import triton

    from fp8refit.bench.code import current_commit, hash_parts

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        found = compile_all(DTYPES, Path(cache))
    results = json.loads(out.read_text()) if out.exists() else {"command": "nox -s kernels", "tritons": {}}
    results["tritons"][triton.__version__] = {
        "dtypes": DTYPES,
        "programs": len(found),
        "most_shared_bytes": max(each["shared_bytes"] for each in found),
        "seconds": round(time.perf_counter() - start_s, 1),
        "commit": current_commit(),
        "code": hash_parts(PARTS),
    }
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
