"""Writes the README's figures from benchmarks/results, so that they cannot drift: `python benchmarks/render_readme.py`."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "vllm_qwen3-8b_h200.json"
BEGIN, END = "<!-- measured:begin -->\n", "<!-- measured:end -->"


def render(result: dict[str, Any]) -> str:
    """The README's section on one result, as Markdown."""
    versus, fifty, equal = result["against_reload_weights"], result["fifty_refits"], result["equal_to_fresh_boot"]
    phases = versus["ours_phases_ms_median"]
    rows = [
        (
            "vLLM's own `reload_weights`, same tensors, same run",
            f"{versus['reload_weights_ms_median']:.0f} ms, {versus['reload_weights_peak_extra_bytes'] / 2**20:.0f} MiB extra",
        ),
        (
            "**`refit`: plan lookup, fill, verify**",
            f"**{versus['ours_plan_fill_verify_ms_median']:.1f} ms, {versus['times_faster']:.0f} x faster**",
        ),
        (
            "fill, on the device's clock",
            f"{versus['ours_fill_device_ms_median']:.2f} ms, {versus['fill_over_roofline']:.2f} x the copy roofline "
            f"({versus['copy_gb_per_s']:.0f} GB/s measured in the same process)",
        ),
        ("prefix-cache flush, apart", f"{phases['flush']:.2f} ms"),
        ("host time to the first kernel", f"{versus['ours_first_launch_ms_median']:.2f} ms"),
        ("first refit, warm kernel cache", f"{result['first_refit_warm_kernel_cache']['wall_s'] * 1e3:.0f} ms"),
        ("first refit, kernels compiled too", f"{result['first_refit_cold_kernel_cache']['wall_s'] * 1e3:.0f} ms"),
        ("extra GPU memory", f"{result['first_refit_cold_kernel_cache']['peak_extra_bytes'] / 2**20:.1f} MiB"),
        (
            "50 refits to 50 policies, generating between them",
            f"{fifty['wrong_slots']} wrong slots, {fifty['moved_tensors']} moved tensors, "
            f"{max(fifty['max_grown_bytes'], 0)} bytes grown",
        ),
        (
            "against a fresh engine in another process",
            f"{equal['live_tensors_compared']} live tensors, greedy tokens and log-probabilities "
            + ("all equal, CUDA graphs replaying" if is_equal(equal) else "NOT equal"),
        ),
        *(
            (f"from {label}", f"{result['streams'][kind]['s']:.2f} s, two buckets")
            for kind, label in (("cpu", "CPU tensors"), ("safetensors", "safetensors files"))
        ),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        f"Qwen3-8B shape with outlier channels, {result['num_tensors']} BF16 tensors on the GPU, one {result['gpu']}; "
        f"{versions}; DeepGEMM kernels, CUDA graphs on. Medians.\n\n| | |\n| --- | --- |\n{table}\n\n"
        "`python -m pytest tests/gpu` on such a machine measures all of it again. This table is made from "
        f"[`{RESULT.relative_to(ROOT)}`]({RESULT.relative_to(ROOT)}), which holds the exact command.\n"
    )


def is_equal(equal: dict[str, Any]) -> bool:
    """Whether bytes, tokens and log-probabilities were those of the fresh engine."""
    return bool(equal["live_bytes"] and equal["tokens"] and equal["log_probabilities"])


def splice(readme: str, section: str) -> str:
    """`readme` with `section` between its markers."""
    head, rest = readme.split(BEGIN)
    return head + BEGIN + section + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(splice(README.read_text(), render(json.loads(RESULT.read_text()))))
