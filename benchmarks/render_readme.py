"""Writes the README's figures from benchmarks/results, so that they cannot drift: `python benchmarks/render_readme.py`."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
RESULT = RESULTS / "vllm_qwen3-8b_h200.json"
LAYOUTS = RESULTS / "vllm_layouts_h200.json"
BEGIN, END = "<!-- measured:begin -->\n", "<!-- measured:end -->"


def render() -> str:
    """The README's section on measurements, as Markdown."""
    return render_one(json.loads(RESULT.read_text())) + "\n" + render_layouts(json.loads(LAYOUTS.read_text()))


def render_one(result: dict[str, Any]) -> str:
    """An engine in the trainer's own process."""
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


def render_layouts(result: dict[str, Any]) -> str:
    """Engines whose ranks are in other processes, or have a driver each."""
    lines = []
    for tp, found in result["tensor_parallel"].items():
        fifty, fill = found["fifty_refits"], found["fill_by_rank"][0]
        name = "one rank in another process" if tp == "1" else f"tensor parallel {tp} in other processes"
        filled = f"{fill['fill_device_ms_median']:.2f} ms, {fill['fill_over_roofline']:.2f} x copy"
        lines.append((name, found["equal_to_fresh_boot"], fifty["wall_ms_median"], fifty["host_ms_median"], filled))
    for tp, ranks in result["external_launcher"].items():
        equal = {key: all(rank["equal_to_fresh_boot"] for rank in ranks) for key in EQUALITIES}
        wall_ms, host_ms = (max(rank[key] for rank in ranks) for key in ("wall_ms_median", "host_ms_median"))
        filled = " and ".join(f"{rank['fill_over_roofline']:.2f}" for rank in ranks) + " x copy"
        lines.append(
            (f"tensor parallel {tp}, `external_launcher`, weights on every GPU", equal, wall_ms, host_ms, filled)
        )
    table = "\n".join(
        f"| {name} | {'equal' if is_equal(equal) else 'NOT equal'} | {wall_ms:.1f} ms | {host_ms:.1f} ms | {filled} |"
        for name, equal, wall_ms, host_ms, filled in lines
    )
    served = result["served_qwen3-0.6b"]
    return (
        "The same model with its ranks in other processes, BF16 weights on one GPU unless said otherwise, 50 refits between "
        "generations; medians of the whole call. Ranks on other GPUs read over NVLink, which is what the whole then waits "
        "for.\n\n"
        "| vLLM | against a fresh boot | refit | of that, host | fill on the weights' own GPU |\n"
        f"| --- | --- | --- | --- | --- |\n{table}\n\n"
        f"`AsyncLLM`, Qwen3-0.6B shape, requests kept through {served['num_refits']} refits: {served['num_kept']} "
        f"interruptions, {served['num_requests_finished']} requests finished, {served['num_requests_unlike_asked']} cut short. "
        f"From [`{LAYOUTS.relative_to(ROOT)}`]({LAYOUTS.relative_to(ROOT)}); "
        "`python -m pytest tests/gpu/test_vllm_layouts.py` on four GPUs measures it again.\n"
    )


EQUALITIES = ("live_bytes", "tokens", "log_probabilities")


def is_equal(equal: dict[str, Any]) -> bool:
    """Whether bytes, tokens and log-probabilities were those of the fresh engine."""
    return all(equal[key] for key in EQUALITIES)


def splice(readme: str, section: str) -> str:
    """`readme` with `section` between its markers."""
    head, rest = readme.split(BEGIN)
    return head + BEGIN + section + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(splice(README.read_text(), render()))
