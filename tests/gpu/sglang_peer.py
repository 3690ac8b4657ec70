"""SGLang's own update of weights, beside refits of the same engine."""

import time
from collections.abc import Iterator

import policies
import torch
from checkpoints import as_specified
from harness import log, measure_copy_gb_per_s, seconds_of, timed, timed_refit
from live_engines import Sglang
from torch import Tensor

from fp8refit import Refitter
from fp8refit.bench.policies import in_buckets
from fp8refit.live.layout import EngineLayout

MIB = 1 << 20
BUCKETS = {"512 MiB": 512 * MIB, "2 GiB": 2048 * MIB, "one": None}
"""Bytes after which a bucket of SGLang's is full: what slime and verl take, more of it, and all at once."""
READY = "one, flattened beforehand"
USUAL = "512 MiB"


def time_peer(
    engine: Sglang, refitter: Refitter, policy: dict[str, Tensor], layout: EngineLayout, checksums: dict, rounds: int
) -> dict:
    """Interleaved on one engine: SGLang's own update to policy 2, quantized before, and our refit to policy 1, from BF16.

    Both are timed from call to return, with and without the flush of the radix cache; the live bytes are looked at after each.
    """
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    if torch.cuda.is_available():
        monkey_patch_torch_reductions()
    log("quantize for the peer")
    quantized = [  # without the memory of the policy
        (name, tensor.clone() if tensor is policy.get(name) else tensor)
        for name, tensor in as_specified(policies.fill_policy(policy, 2), layout)
    ]
    policies.fill_policy(policy, 1)
    buckets = {name: list(in_buckets(quantized, max_bytes)) for name, max_bytes in BUCKETS.items()}
    found: dict = {"ours": [], "theirs": [], "copy_gb_per_s": [], "end_of_work_s": [], "from_bf16_s": []}
    num_bytes = sum(tensor.nbytes for _, tensor in quantized)
    for round_ in range(rounds):
        log(f"round {round_}")
        found["copy_gb_per_s"].append(measure_copy_gb_per_s())
        for name, is_flushed in [(name, is_flushed) for name in (*buckets, READY) for is_flushed in (True, False)]:
            engine.ask("end_of_work")
            theirs = time_update(engine, [flatten(quantized)] if name == READY else buckets[name], is_flushed)
            theirs |= {"round": round_, "buckets": name, "is_flushed": is_flushed}
            found["theirs"].append(theirs | {"same_bytes": engine.ask("checksum") == checksums[2]})
            ours = timed_refit(refitter, policy) | {"round": round_}
            found["ours"].append(ours | {"same_bytes": engine.ask("checksum") == checksums[1]})
        if torch.cuda.is_available():  # what a trainer with BF16 weights waits for; other scales, so other bytes
            quantized_s, _, named = timed(lambda: list(quantize_by_sglang(policy, layout)))
            theirs = time_update(engine, list(in_buckets(named, BUCKETS[USUAL])), True)
            found["from_bf16_s"].append(quantized_s + theirs["s"])
            del named
            refitter.refit(policy)
        found["end_of_work_s"].append(seconds_of(lambda: engine.ask("end_of_work")))
    return found | {"num_bytes": num_bytes, "num_buckets": {name: len(parts) for name, parts in buckets.items()}}


def quantize_by_sglang(policy: dict[str, Tensor], layout: EngineLayout) -> Iterator[tuple[str, Tensor]]:
    """The same by SGLang's own quantizer of weights, which rounds scales to powers of two."""
    from sglang.srt.layers.quantization.fp8_utils import quant_weight_ue8m0

    for slot in layout.slots:
        if slot.scale_format is None:
            yield slot.name, policy[slot.name]
        else:
            codes, scale = quant_weight_ue8m0(policy[slot.name], list(slot.block_size))
            yield slot.name, codes
            yield f"{slot.name}_scale_inv", scale


def flatten(bucket: list[tuple[str, Tensor]]):
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    return FlattenedTensorBucket(named_tensors=bucket)


def time_update(engine: Sglang, buckets: list, is_flushed: bool) -> dict:
    """SGLang's own update, as slime and verl do it: flatten a bucket, hand over its IPC handle, wait, go on to the next."""
    seconds, extra_bytes, wall_s = timed(lambda: update(engine, buckets, is_flushed))
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
    return {"s": wall_s, "with_end_of_work_s": seconds, "extra_bytes": extra_bytes}


def update(engine: Sglang, buckets: list, is_flushed: bool) -> float:
    """Returns seconds until it returned; then waits for the ranks' GPUs too."""
    from sglang.srt.utils import MultiprocessingSerializer

    start_s, sglang = time.perf_counter(), engine.candidate
    has_sessions = hasattr(sglang, "begin_weight_update")  # 0.5.17 has none
    if has_sessions:
        sglang.begin_weight_update()
    for index, bucket in enumerate(buckets, start=1):
        flat = flatten(bucket) if isinstance(bucket, list) else bucket
        payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        serialized = [MultiprocessingSerializer.serialize(payload) for _ in range(sglang.server_args.tp_size)]
        success, message = sglang.update_weights_from_tensor(
            serialized, load_format="flattened_bucket", flush_cache=is_flushed and index == len(buckets)
        )
        assert success, message
        del flat, payload
    if has_sessions:
        sglang.end_weight_update()
    wall_s = time.perf_counter() - start_s
    engine.ask("end_of_work")
    return wall_s
