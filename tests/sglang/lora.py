"""Engines that serve LoRA adapters: what base weights and adapters are after refits, and in engines that load them anew."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

from cpu_lora import ASKS
from engines import ASKED, PROMPTS, bf16_of, booted, drop_caches, make_policy, said
from sglang import Engine
from subject import Subject

from fp8refit import Refitter
from fp8refit.checkpoint import quantize_checkpoint
from tests.engines.adapters import ALPHA, matrices, save_adapter, try_adapters

OPTIONS = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras_per_batch": 3,  # one is for requests without any
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "lora_backend": "torch_native",
}
OTHER = {"lora_alpha": 2 * ALPHA}
"""Matrices of this scale are multiplied by two, exactly."""
LONG = 160
"""Tokens of a request that is refitted under."""


def run_adapters(family: str, num_ranks: int, work: Path) -> dict:
    """An engine of policy 2 with adapters, moved to policy 1, of which one is refitted; then one that loads all that anew."""
    os.environ[ASKS] = "1"
    folder = work / f"adapters-{family}"
    for seed in (1, 2):
        quantize_checkpoint(bf16_of(family, seed, work), folder / f"fp8-{seed}")
    files = {
        name: save_adapter(folder / name, matrices(family, n)) for n, name in enumerate(("one", "two", "three"), 1)
    }
    with booted(folder / "fp8-2", num_ranks, **OPTIONS, lora_paths={"one": str(files["one"])}) as engine:
        adapters = Adapters(engine, files)
        before = digest(files["one"])
        adapters.subject.refit(make_policy(family, 1))
        found = try_adapters(adapters, family, folder, OTHER)
        found["verified"] = adapters.subject.verify(make_policy(family, 1)).is_equal
        if num_ranks == 1:
            found["in flight"] = try_in_flight(adapters, matrices(family, 1), matrices(family, 8))
        found["evicted"] = try_evicted(adapters, family)
        found["weights"] = try_weights(adapters, family)
        found["removed"] = try_removed(adapters, family)
        found["are files left"] = digest(files["one"]) == before
    save_adapter(folder / "other", matrices(family, 9), **OTHER)
    with booted(folder / "fp8-1", num_ranks, **OPTIONS) as engine:
        fresh = {}
        for name in ("new", "other"):
            adapters = Adapters(engine, files | {"one": folder / name})
            adapters.say("one"), adapters.say("two")
            fresh[name] = adapters.state()
            fresh[f"{name} three"] = adapters.say("three")
            fresh[f"{name} copies"] = adapters.subject.look("adapter_copies")
            for adapter in files:
                engine.unload_lora_adapter(adapter)
    return {"refitted": found, "fresh": fresh}


def try_in_flight(adapters: "Adapters", old: dict, new: dict) -> dict:
    """Requests with an adapter that is refitted, by what becomes of them; and what the engine says to their prompt before and
    after.
    """
    found: dict[str, Any] = {}
    for mode in ("wait", "abort", "keep"):
        adapters.refit("one", old)
        before = adapters.ask(PROMPTS[0], "one", LONG)
        answer = adapters.refit_under("one", new, mode)
        found[mode] = {"before": before, "answer": answer}
        if mode == "keep":  # from where the answer is another, or a little earlier: both may say the same for a while
            same = next((n for n in range(LONG) if answer["tokens"][n] != before[n]), LONG)
            tried = [before[:n] for n in range(same, max(same - 6, 0), -1)]
            found[mode]["goes on"] = [said + adapters.ask(PROMPTS[0] + said, "one", LONG - len(said)) for said in tried]
    return found


def try_evicted(adapters: "Adapters", family: str) -> dict:
    """An adapter that loses its slot to others."""
    subject = adapters.subject
    adapters.refit("one", matrices(family, 8))
    found: dict[str, Any] = {"copies": subject.look("adapter_copies")}
    found["others"] = [adapters.say("two"), adapters.say("three")]
    found["refused"] = subject.refused(adapters.refit, "one", matrices(family, 9))
    found["one"], found["state"] = adapters.say("one"), adapters.state()
    found["moved"] = {}
    for when in ("prepared", "written"):
        adapters.say("three"), adapters.say("one")
        subject.look("move_adapters", when)
        moved = {"error": subject.refused(adapters.refit, "one", matrices(family, 9)), "dirty": subject.is_dirty}
        if not moved["dirty"]:  # else all have lost theirs
            adapters.say("one")
        adapters.refit("one", matrices(family, 8))
        found["moved"][when] = moved | {"said": [adapters.say(name) for name in ("one", "two", "three")]}
    return found


def try_weights(adapters: "Adapters", family: str) -> dict:
    """Weights are refitted while an adapter holds what it was refitted to."""
    adapters.say("one"), adapters.say("two")
    report = adapters.subject.refit(make_policy(family, 2))
    found = {"kept": report.kept, "other": adapters.state()}
    adapters.subject.refit(make_policy(family, 1))
    return found | {"state": adapters.state()}


def try_removed(adapters: "Adapters", family: str) -> dict:
    """An adapter that is removed, and loaded anew as its files are."""
    adapters.engine.unload_lora_adapter("one")
    refused = adapters.subject.refused(adapters.refit, "one", matrices(family, 8))
    return {"refused": refused, "again": adapters.say("one")}


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


class Adapters:
    """The adapters of an engine.

    Args:
        engine: The engine.
        files: The folder of each adapter.
    """

    def __init__(self, engine: Engine, files: dict[str, Path]) -> None:
        self.engine, self.subject, self._files = engine, Subject(engine), files

    def refit(self, name: str, state_dict: Any, lora_config: Any = None, **options: Any) -> Any:
        return Refitter(self.engine, **options).refit_adapter(name, state_dict, lora_config=lora_config)

    def say(self, name: str | None) -> list[dict]:
        if name is not None and name not in self.engine.tokenizer_manager.lora_registry.get_all_adapters():
            self.engine.load_lora_adapter(name, str(self._files[name]))
        return [said(self.engine.generate(input_ids=prompt, lora_path=name, **ASKED)) for prompt in PROMPTS]

    def num_cached(self, name: str) -> int:
        return self.say(name)[0]["num_cached"]

    def state(self) -> dict:
        drop_caches(self.engine)
        spoken = {str(name): self.say(name) for name in ("one", "two", None)}
        return {"live": self.subject.live(), "adapters": self.subject.look("adapter_bytes"), "said": spoken}

    def ask(self, prompt: list[int], name: str, num_new: int) -> list[int]:
        return self.engine.generate(input_ids=prompt, lora_path=name, sampling_params=asking(num_new))["output_ids"]

    def refit_under(self, name: str, state_dict: dict, mode: str) -> dict:
        """Refit an adapter once a request with it has begun to answer, and return the answer."""

        async def refit() -> dict:
            stream = await self.engine.async_generate(
                input_ids=PROMPTS[0], lora_path=name, sampling_params=asking(LONG), stream=True
            )
            outputs = [await anext(stream)]
            refitter = Refitter(self.engine, in_flight=mode)
            refitted = asyncio.ensure_future(refitter.refit_adapter_async(name, state_dict))
            outputs += [output async for output in stream]
            await refitted
            return {"tokens": outputs[-1]["output_ids"], "reason": outputs[-1]["meta_info"]["finish_reason"]["type"]}

        return self.engine.loop.run_until_complete(asyncio.wait_for(refit(), 60))


def asking(num_new: int) -> dict:
    return {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
