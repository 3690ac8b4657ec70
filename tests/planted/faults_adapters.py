"""Faults between an engine, its plugin and its trainer: versions, replies, refusals, and votes of a trainer's ranks."""

from tests.planted.fault import Fault

REPLIES = "tests/adapters/test_vllm_replies.py"
VLLM_SEAMS, SGLANG_SEAMS = "tests/adapters/test_vllm_seams.py", "tests/adapters/test_sglang_seams.py"
GATHER = "tests/sources/sharded/test_gather.py"
CORE = "adapters/fp8refit_vllm/core_compat.py"
COMPAT = "adapters/fp8refit_vllm/compat.py"
TRAINERS = "fp8refit/sources/sharded/trainer_group.py"

FAULTS = [
    Fault(
        name="replies after an error are taken for those to the next call",
        path=CORE,
        before="                unread.num_due += 1\n",
        after="                pass\n",
        found_by=REPLIES,
    ),
    Fault(
        name="a reply that was too late is taken for that to the next call",
        path=CORE,
        before="        reply, self.num_due = None, self.num_due + 1\n",
        after="        reply, self.num_due = None, 1\n",
        found_by=REPLIES,
    ),
    Fault(
        name="an AsyncLLM gets an empty answer for a refused request",
        path=CORE,
        before="                state.queue.put(late_refusal(said.removeprefix(_REFUSED)))\n",
        after="",
        found_by=REPLIES,
    ),
    Fault(
        name="a refused request stays with the AsyncLLM",
        path=CORE,
        before='[getattr(state.parent_req, "request_id", output.request_id)]',
        after="[]",
        found_by=REPLIES,
    ),
    Fault(
        name="an AsyncLLM wraps our refusal in an error of its own",
        path=COMPAT,
        before='type("EngineDirtyError", (EngineDirtyError, Refused), methods)',
        after='type("EngineDirtyError", (EngineDirtyError,), methods)',
        found_by=REPLIES,
    ),
    Fault(
        name="a refusal cannot be sent to another process",
        path=COMPAT,
        before=', "__reduce__": lambda error: (EngineDirtyError, error.args)}',
        after="}",
        found_by=REPLIES,
    ),
    Fault(
        name="registration does not look at the version",
        path="fp8refit/live/versions.py",
        before="            self.check(version)\n            for seam",
        after="            for seam",
        found_by=VLLM_SEAMS,
    ),
    Fault(
        name="a place that registration reaches for is not looked at",
        path=COMPAT,
        before='    "vllm.distributed.weight_transfer.factory.WeightTransferTrainerFactory.register_engine",\n',
        after="",
        found_by=VLLM_SEAMS,
    ),
    Fault(
        name="an engine without the drop-in that was asked for boots",
        path="fp8refit/live/versions.py",
        before="            if is_asked:\n                raise\n",
        after="",
        found_by=VLLM_SEAMS,
    ),
    Fault(
        name="vLLM is touched before all places are looked at",
        path="adapters/fp8refit_vllm/worker.py",
        before="    is_asked = DropInOptions.read(os.environ).is_asked\n",
        after="    is_asked = DropInOptions.read(os.environ).is_asked\n    raise_refusals()\n",
        found_by=VLLM_SEAMS,
    ),
    Fault(
        name="an older vLLM takes the worker extension",
        path="adapters/fp8refit_vllm/worker.py",
        before="    VERSIONS.check(vllm.__version__)\n    return Extension\n",
        after="    return Extension\n",
        found_by=VLLM_SEAMS,
    ),
    Fault(
        name="SGLang swallows the refusal of the drop-in and serves",
        path="adapters/fp8refit_sglang/plugin.py",
        before="        raise SystemExit(",
        after="        raise UnsupportedEngineError(",
        found_by=SGLANG_SEAMS,
    ),
    Fault(
        name="what attention layers of SGLang are given is not looked at",
        path="adapters/fp8refit_sglang/plugin.py",
        before="    seams = (*SEAMS, *hooks,",
        after="    seams = (*SEAMS, *_DOORS,",
        found_by=SGLANG_SEAMS,
    ),
    Fault(
        name="votes go through the trainer's own group",
        path=TRAINERS,
        before="            return ProcessGroupExchange(voting).exchange(message, timeout_s=timeout_s)\n",
        after="            return ProcessGroupExchange(self._group).exchange(message, timeout_s=timeout_s)\n",
        found_by=f"{GATHER} -k 'while_the_others and 100000-5'",
        crashes=True,
    ),
    Fault(
        name="connections of a vote that failed are used again",
        path=TRAINERS,
        before="            _voting.pop(self._group, None)\n",
        after="            pass\n",
        found_by=f"{GATHER} -k vote_after",
    ),
    Fault(
        name="a rank that gave up connecting is waited for in the next vote",
        path=TRAINERS,
        before='            store.set(str(rank), "")\n',
        after="",
        found_by=f"{GATHER} -k left_its_ticket",
    ),
    Fault(
        name="values that are whole on every rank are not compared",
        path="fp8refit/sources/sharded/owned.py",
        before=", checksum {int(checksum(part.local)):x}",
        after="",
        found_by=f"{GATHER} -k whole_on_every",
    ),
    Fault(
        name="a checksum does not see the order of values",
        path="fp8refit/live/fingerprint.py",
        before="    return (sums * (torch.arange(sums.numel(), device=sums.device) % _WEIGHTS + 1)).sum()\n",
        after="    return sums.sum()\n",
        found_by="tests/live/test_fingerprint.py",
    ),
]
