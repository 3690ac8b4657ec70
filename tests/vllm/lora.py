"""Engines that serve LoRA adapters: what their base weights and their adapters are after refits, and in fresh engines."""

import os
import time
from pathlib import Path
from typing import Any

import observer
from engines import (
    IN_PROCESS,
    PROMPTS,
    SAMPLING,
    booted,
    booted_dummy,
    generate,
    live_bytes,
    make_policy,
    said,
    worker_of,
)
from subject import NOISE, AsyncSubject, Subject, booted_as
from vllm import LLM
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from fp8refit import Refitter
from tests.engines.adapters import RANK, matrices, save_adapter, try_adapters

FAMILY = "qwen2"
"""Tied, with biases."""
OPTIONS = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
SEVERAL = OPTIONS | {"max_loras": 2, "max_cpu_loras": 3}
OTHER = {"lora_alpha": 10, "use_rslora": True}
if hasattr(PEFTHelper, "get_rank_and_scaling"):  # other versions leave it out when they load an adapter
    OTHER["alpha_pattern"] = {"o_proj": 3}


def run_lora(work: str) -> dict:
    """A dummy engine that has an adapter, moved to policy 1 and then to policy 2."""
    adapter = save_adapter(Path(work) / "adapter", matrices(FAMILY, 7), lora_alpha=RANK)
    with booted_dummy(Path(work) / "bf16", "fp32", **OPTIONS) as llm:
        refitter = Refitter(llm)
        refitter.refit(make_policy(FAMILY, 1))
        found = {"before": generate_adapted(llm, adapter), "adapter_before": observer.adapter_bytes(worker_of(llm))}
        report = refitter.refit(make_policy(FAMILY, 2))
        layout = refitter.layout().model_dump(mode="json")
        found |= {"layout": layout, "kept": report.kept} | state_of(llm, adapter)
        refitter.refit_adapter("adapter", matrices(FAMILY, 8))
        found["adapter_refitted"] = generate_adapted(llm, adapter)
        other = save_adapter(Path(work) / "other", matrices(FAMILY, 9))
        generate_adapted(llm, other, "other", 2)  # vLLM has room for one, in host memory too
        found["adapter_again"] = generate_adapted(llm, adapter)
        llm.llm_engine.remove_lora(1)
        llm.llm_engine.reset_prefix_cache()
        return found | {"adapter_removed": generate_adapted(llm, adapter)}


def run_fresh_lora(work: str) -> dict:
    """One that loads the checkpoint of policy 2."""
    adapter = Path(work) / "adapter"
    with booted(Path(work) / "fp8", "fp32", **OPTIONS) as llm:
        return state_of(llm, adapter)


def state_of(llm: LLM, adapter: Path) -> dict:
    """Base weights, the adapter, and what is said without and with it."""
    adapted = generate_adapted(llm, adapter)
    held = observer.adapter_bytes(worker_of(llm))
    return {"generated": generate(llm), "adapted": adapted, "live": live_bytes(llm), "adapter": held}


def generate_adapted(llm: LLM, adapter: Path, name: str = "adapter", number: int = 1) -> list[dict]:
    """What the engine says with the adapter."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    request = LoRARequest(name, number, str(adapter))
    return [said(output) for output in llm.generate(prompts, SAMPLING, use_tqdm=False, lora_request=request)]


def run_adapters(layout: str, family: str, work: str) -> dict:
    """An engine with several adapters, of which one is refitted to other matrices, in every way, and after faults."""
    folder, new, other = Path(work), matrices(family, 8), matrices(family, 9)
    with served(layout, folder / f"{family}-bf16", **NOISE) as subject:
        engine = Adapters(subject, folder)
        subject.refit(make_policy(family, 1))
        found = try_adapters(engine, family, folder, OTHER)
        found["broadcast"] = broadcast(engine, new, other)
        found["verified"] = engine.verify(make_policy(family, 1)).is_equal
        found["evicted"] = evicted(engine, new, other)
        found["slept"] = slept(engine, family, new)
        found["base"] = base_after_adapters(engine, family)
        return found


def broadcast(engine: "Adapters", new: dict, other: dict) -> dict:
    """Sent to ranks in other processes as a broadcast, as over a network."""
    engine.refit("one", other)
    in_process = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    engine.refit("one", new, **({} if in_process else {"transport": "collective"}))
    return engine.state()


def evicted(engine: "Adapters", new: dict, other: dict) -> dict:
    """An adapter that loses its slot to others."""
    subject = engine.subject
    found: dict[str, Any] = {"three": engine.say("three"), "seats": subject.look("seats")}
    found["refused"] = subject.refused(engine.refit, "one", other)
    found["one"], found["seats_again"] = engine.say("one"), subject.look("seats")
    for when in ("prepared", "written"):
        subject.look("move_adapters", when)
        moved = {"error": subject.refused(engine.refit, "one", other), "dirty": subject.is_dirty}
        engine.add("one")
        engine.refit("one", new)
        found[when] = moved | {"said": [engine.say(name) for name in ("one", "two", "three")]}
        engine.say("one")
        subject.look("move_adapters", when)
        subject.refit(make_policy(make_policy_name(engine.folder), 1))
        found[when]["said_after_weights"] = [engine.say(name) for name in ("one", "two", "three")]
        engine.say("one")
    return found


def slept(engine: "Adapters", family: str, new: dict) -> dict:
    """A deep sleep, from which the adapters' memory wakes up as noise."""
    subject = engine.subject
    subject.call("sleep", 2)
    subject.look("scribble_adapters")
    found = {"adapter": subject.refused(engine.refit, "one", new)}
    engine.add("one")
    subject.layout()  # which has its slots again
    subject.refit(make_policy(family, 1))
    engine.refit("one", new)
    return found | {"said": [engine.say(name) for name in ("one", "two", "three")]}


def base_after_adapters(engine: "Adapters", family: str) -> dict:
    """Weights are refitted, and an adapter is removed and loaded anew, as its files are."""
    subject = engine.subject
    found: dict[str, Any] = {"said": engine.say("one")}
    report = subject.refit(make_policy(family, 1))
    found |= {"kept": report.kept, "said_after": engine.say("one")}
    engine.remove("one")
    found["removed"] = subject.refused(engine.refit, "one", matrices(family, 8))
    found["again"] = engine.say("one")
    engine.refit("one", matrices(family, 8))
    return found | {"refitted": engine.say("one")}


def run_fresh_adapters(layout: str, family: str, work: str, fp8: str) -> dict:
    """Engines that load the checkpoint of policy 1, and the adapters from their files. No fp8refit in them."""
    folder, found = Path(work), {}
    save_adapter(folder / "other", matrices(family, 9), **OTHER)
    with served(layout, Path(fp8)) as subject:
        for name in ("new", "other"):
            engine = Adapters(subject, folder, one=name)
            engine.say("one")
            engine.say("two")
            found[name] = engine.state()
            found[f"{name}_three"] = engine.say("three")
            for adapter in ("one", "two", "three"):
                engine.remove(adapter)
    return found


class Adapters:
    """The adapters of an engine.

    Args:
        subject: The engine.
        folder: Where their files go.
        one: The folder of the first of them.
    """

    def __init__(self, subject: Subject, folder: Path, *, one: str = "one") -> None:
        self.subject, self.folder = subject, folder
        family = make_policy_name(folder)
        self.requests = {}
        for number, (name, stored) in enumerate((("one", one), ("two", "two"), ("three", "three")), 1):
            if not (folder / stored).exists():
                save_adapter(folder / stored, matrices(family, number))
            self.requests[name] = LoRARequest(name, number, str(folder / stored))

    def verify(self, policy: dict) -> Any:
        refitter = Refitter(self.subject.llm)
        if isinstance(self.subject, AsyncSubject):
            return self.subject.run(refitter.verify_async(policy))
        return refitter.verify(policy)

    def refit(self, name: str, state_dict: Any, lora_config: Any = None, **options: Any) -> Any:
        refitter = Refitter(self.subject.llm, **options)
        if isinstance(self.subject, AsyncSubject):
            return self.subject.run(refitter.refit_adapter_async(name, state_dict, lora_config))
        return refitter.refit_adapter(name, state_dict, lora_config=lora_config)

    def say(self, name: str | None) -> list[dict]:
        """What the engine says with an adapter. It is loaded if it is not."""
        return [said(self._answer(prompt, name)) for prompt in PROMPTS]

    def num_cached(self, name: str) -> int:
        return self._answer(PROMPTS[-1], name).num_cached_tokens

    def _answer(self, prompt: list[int], name: str | None) -> Any:
        subject, request = self.subject, None if name is None else self.requests[name]
        if not isinstance(subject, AsyncSubject):
            (output,) = subject.llm.generate(
                {"prompt_token_ids": prompt}, SAMPLING, use_tqdm=False, lora_request=request
            )
            return output

        async def answer() -> Any:
            asked = {"prompt_token_ids": prompt}, SAMPLING, f"adapted-{time.monotonic_ns()}"
            return [output async for output in subject.llm.generate(*asked, lora_request=request)][-1]

        return subject.run(answer())

    def add(self, name: str) -> None:
        """Also while the engine refuses requests."""
        subject, request = self.subject, self.requests[name]
        if isinstance(subject, AsyncSubject):
            subject.run(subject.llm.add_lora(request))
        else:
            subject.engine.add_lora(request)

    def remove(self, name: str) -> None:
        """Also from the prefix cache, in which vLLM leaves what a removed adapter made."""
        number, subject = self.requests[name].lora_int_id, self.subject
        if isinstance(subject, AsyncSubject):
            subject.run(subject.llm.remove_lora(number))
            subject.run(subject.llm.reset_prefix_cache())
        else:
            subject.engine.remove_lora(number)
            subject.engine.reset_prefix_cache()

    def state(self) -> dict:
        """What every rank holds, and what the engine says with each of two adapters, and without."""
        held = {"live": self.subject.live(), "adapters": self.subject.look("adapter_bytes")}
        return held | {"said": {str(name): self.say(name) for name in ("one", "two", None)}}


def served(layout: str, model: Path, **options: Any) -> Any:
    """An engine with room for two of three adapters."""
    own = IN_PROCESS if layout == "in one process" else {}
    return booted_as("multi-process" if own else layout, model, "fp32", **own, **SEVERAL, **options)


def make_policy_name(folder: Path) -> str:
    """The family whose model is in a folder."""
    (model,) = folder.glob("*-bf16")
    return model.name.removesuffix("-bf16")
