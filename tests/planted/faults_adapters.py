"""Faults between an engine, its plugin and its trainer: versions, replies, refusals, and votes of a trainer's ranks."""

from tests.planted.fault import Fault

REPLIES = "tests/adapters/test_vllm_replies.py"
VLLM_SEAMS, SGLANG_SEAMS = "tests/adapters/test_vllm_seams.py", "tests/adapters/test_sglang_seams.py"
SGLANG_LORA = "tests/adapters/test_sglang_lora.py"
LORAS = "fp8refit/tracing/loras.py"
SGLANG = "tests/adapters/test_sglang_engine.py"
GATHER = "tests/sources/sharded/test_gather.py"
CORE = "adapters/fp8refit_vllm/core_compat.py"
COMPAT = "adapters/fp8refit_vllm/compat.py"
TRAINERS = "fp8refit/sources/sharded/trainer_group.py"

FAULTS = [
    Fault(
        name="experts of the old policy are put in place after a refit",
        at="adapters/fp8refit_vllm/eplb.py::end_moves",
        before="state.drain_async()",
        found_by="tests/adapters/test_vllm_eplb.py",
    ),
    Fault(
        name="experts that have moved since a refit was prepared are written where they were",
        at="fp8refit/driver/lora_target.py::LoraTarget.begin",
        before="self.is_current(prepared) and prepared.inventory.has_moved()",
        after="False",
        found_by="tests/vllm/test_moved_experts.py -k after_a_refit_was_prepared",
    ),
    Fault(
        name="latents are attended to as values by the scale of another policy",
        at="adapters/fp8refit_vllm/kv_cache.py::_write_kv_scale_copies",
        before='kind == "k" and _is_latent(module)',
        after="False",
        found_by="tests/adapters/test_vllm_kv_cache.py -k latents",
    ),
    Fault(
        name="replies after an error are taken for those to the next call",
        at=f"{CORE}::_AllReplies.__iter__",
        before="unread.num_due += 1",
        found_by=REPLIES,
    ),
    Fault(
        name="a reply that was too late is taken for that to the next call",
        at=f"{CORE}::_Replies.dequeue",
        before="self.num_due + 1",
        after="1",
        found_by=REPLIES,
    ),
    Fault(
        name="an AsyncLLM gets an empty answer for a refused request",
        at=f"{CORE}::raise_refusals.process",
        before="state.queue.put(late_refusal(said.removeprefix(_REFUSED)))",
        found_by=REPLIES,
    ),
    Fault(
        name="a refused request stays with the AsyncLLM",
        at=f"{CORE}::raise_refusals.process",
        before='[getattr(state.parent_req, "request_id", output.request_id)]',
        after="[]",
        found_by=REPLIES,
    ),
    Fault(
        name="an AsyncLLM wraps our refusal in an error of its own",
        at=f"{COMPAT}::http_refusal",
        before="(EngineDirtyError, Refused)",
        after="(EngineDirtyError,)",
        found_by=REPLIES,
    ),
    Fault(
        name="a refusal cannot be sent to another process",
        at=f"{COMPAT}::http_refusal",
        before='{"__init__": lambda *_: None, "__reduce__": lambda error: (EngineDirtyError, error.args)}',
        after='{"__init__": lambda *_: None}',
        found_by=REPLIES,
    ),
    Fault(
        name="registration does not look at the version",
        at="fp8refit/live/versions.py::Versions.admits",
        before="self.check(version)",
        found_by=VLLM_SEAMS,
    ),
    Fault(
        name="a place that registration reaches for is not looked at",
        at=COMPAT,
        before='"abort_request(engine,[],internal=True) step(engine)"',
        after='"abort_request(engine,[],internal=True)"',
        found_by=VLLM_SEAMS,
    ),
    Fault(
        name="an engine without the drop-in that was asked for boots",
        at="fp8refit/live/versions.py::Versions.admits",
        before="if is_asked:\n    raise",
        found_by=VLLM_SEAMS,
    ),
    Fault(
        name="vLLM is touched before all places are looked at",
        at="adapters/fp8refit_vllm/worker.py::register",
        before="seams = (*NEEDED, DROP_IN) if is_asked else NEEDED",
        after="raise_refusals()\nseams = (*NEEDED, DROP_IN) if is_asked else NEEDED",
        found_by=VLLM_SEAMS,
    ),
    Fault(
        name="an older vLLM takes the worker extension",
        at="adapters/fp8refit_vllm/worker.py::__getattr__",
        before="VERSIONS.check(vllm.__version__)",
        found_by=VLLM_SEAMS,
    ),
    Fault(
        name="SGLang swallows the refusal of the drop-in and serves",
        at="adapters/fp8refit_sglang/plugin.py::register",
        before='SystemExit(f"FP8REFIT_DROP_IN is set, but {error}")',
        after='UnsupportedEngineError(f"FP8REFIT_DROP_IN is set, but {error}")',
        found_by=SGLANG_SEAMS,
    ),
    Fault(
        name="a place that SGLang is hooked at is not looked at",
        at="adapters/fp8refit_sglang/compat.py",
        before="(IN_ADMISSION, IN_SLEEP)",
        after="(IN_ADMISSION, IN_START)",
        found_by=SGLANG_SEAMS,
    ),
    Fault(
        name="a stage of a pipeline waits for its driver before the next one hears of it",
        at="adapters/fp8refit_sglang/worker.py::serve",
        before="setattr(scheduler.itself, _PUT_OFF, [scheduler.num_later_stages, request])\nreturn None",
        found_by=f"{SGLANG} -k stage_of_a_pipeline",
    ),
    Fault(
        name="a stage of a pipeline makes no more steps than the next one before it waits",
        at="adapters/fp8refit_sglang/worker.py::answer_late",
        before="put_off[0] -= 1",
        after="put_off[0] = 0",
        found_by=f"{SGLANG} -k stage_of_a_pipeline",
    ),
    Fault(
        name="votes go through the trainer's own group",
        at=f"{TRAINERS}::_connect",
        before="return _Votes(ProcessGroupGloo(own, rank, group.size(), timedelta(seconds=left_s)), own)",
        after="return _Votes(group, own)",
        found_by=f"{GATHER} -k 'while_the_others and 100000-5'",
        crashes=True,
    ),
    Fault(
        name="a rank that left in an earlier vote is waited for",
        at=f"{TRAINERS}::VoteGroup.exchange",
        before="not _voting[self._group].is_left()",
        after="True",
        found_by=f"{GATHER} -k gives_up_alone",
    ),
    Fault(
        name="connections end while an operation waits for a rank that left",
        at=f"{TRAINERS}::VoteGroup.exchange",
        before="_voting.pop(self._group).linger(timeout_s)",
        after="_voting.pop(self._group)",
        found_by=f"{GATHER} -k gives_up_alone",
    ),
    Fault(
        name="a rank that gave up connecting is waited for in the next vote",
        at=f"{TRAINERS}::_connect",
        before='store.compare_set(str(rank), ticket, "")',
        found_by=f"{GATHER} -k left_its_ticket",
    ),
    Fault(
        name="values that are whole on every rank are not compared",
        at="fp8refit/sources/sharded/owned.py::Holding.of",
        before='f"{part.placed}, checksum {int(checksum(part.local)):x}"',
        after='f"{part.placed}"',
        found_by=f"{GATHER} -k whole_on_every",
    ),
    Fault(
        name="a checksum does not see the order of values",
        at="fp8refit/live/fingerprint.py::_weighed",
        before="sums * (torch.arange(sums.numel(), device=sums.device) % _WEIGHTS + 1)",
        after="sums",
        found_by="tests/live/test_fingerprint.py",
    ),
    Fault(
        name="host memory keeps what an adapter was before its refit",
        at=f"{LORAS}::Loras.write_copies",
        before="copy.copy_(weight)",
        found_by=SGLANG_LORA,
    ),
    Fault(
        name="a refit writes into what a trainer has loaded as an adapter",
        at="adapters/fp8refit_sglang/lora.py::note_load",
        before="matrix.is_shared()",
        after="False",
        found_by=SGLANG_LORA,
    ),
    Fault(
        name="a matrix that is in a slot several times is written once",
        at="adapters/fp8refit_sglang/lora.py::_parts_of",
        before="boxes = [piece.into for piece in pieces]",
        after="boxes = [piece.into for piece in pieces if places.into == 0]",
        found_by=SGLANG_LORA,
    ),
]
