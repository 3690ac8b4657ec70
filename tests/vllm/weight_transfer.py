"""vLLM's own weight-transfer API with fp8refit as its backend: an engine of two ranks, one in this process, and a server."""

import json
import os
from pathlib import Path
from typing import Any

from engines import PROMPTS, booted_dummy, live_bytes, make_policy, refused
from fp8refit_vllm.compat import takes_version
from fp8refit_vllm.trainer import RefitTrainer, RefitTrainerInitInfo
from fp8refit_vllm.transfer_driver import Letter
from servers import KEY, Server
from subject import NOISE, Subject, booted_as
from vllm import LLM
from vllm.distributed.weight_transfer.base import ModuleSource, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from fp8refit import RefitConfig, Refitter
from fp8refit.transport.collective.board import Address
from tests.engines.attempts import bad_policy
from tests.serving import die, run_driver
from tests.tiny_models import make_model, save_model
from tests.weight_transfers import LlmClient, PolicySource, open_trainer

FAMILY, KERNEL = "qwen2_wide", "ue8m0"
CONFIG = {"weight_transfer_config": {"backend": "fp8refit"}}
TIMEOUT_S = 20.0


class VersionedClient(LlmClient):
    """The same since vLLM names the version of what it was brought (0.32)."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


NAMES_VERSIONS = takes_version(LLM)


def client_of(llm: LLM) -> LlmClient:
    return (VersionedClient if NAMES_VERSIONS else LlmClient)(llm)


def version_named_by(llm: LLM) -> str | None:
    """None from a vLLM that names no versions."""
    return llm.get_weight_version() if NAMES_VERSIONS else None


def trainer_of(client: Any, source: WeightSource, **options: Any) -> RefitTrainer:
    """As a trainer makes one by vLLM's API."""
    config = RefitConfig(timeout_s=TIMEOUT_S, **options)
    init_info = RefitTrainerInitInfo(rank=0, config=config)
    return open_trainer(init_info, client=client, source=source)


def run_weight_transfer(work: str) -> dict:
    """Two ranks in processes of their own: policies by ordinary refits and by vLLM's API, and what goes wrong."""
    policies = {seed: make_policy(FAMILY, seed) for seed in (1, 2)}
    batch = [[(7 * i + j) % 256 for j in range(64)] for i in range(2)]
    with booted_as("tensor parallel", Path(work) / f"{FAMILY}-bf16", KERNEL, **NOISE, **CONFIG) as subject:
        llm, client = subject.llm, client_of(subject.llm)
        found: dict[str, Any] = {"strangers": try_strangers(subject)}
        subject.refit(policies[1])
        found["ordinary"] = {"1": subject.live()}
        first = trainer_of(client, PolicySource(policies[1]), transport="collective")
        subject.look("scribble")
        first.send_weights()
        found["broadcast"] = subject.live()
        subject.refit(policies[2], calibration=batch)
        found["ordinary"]["2"] = subject.state() | {"scales": subject.look("kv_scales")}
        subject.look("scribble")
        second = trainer_of(client, PolicySource(policies[2]))
        report = second.send_weights(calibration=batch)
        found["sent"] = subject.state() | {"scales": subject.look("kv_scales"), "version": report.version}
        found["fingerprints"] = [second.fingerprints(), Refitter(llm).fingerprints()]
        found["versions"] = [second.version, subject.version, version_named_by(llm)]
        found["nan"] = try_nan(subject, second)
        second.source = PolicySource(policies[2])
        second.send_weights()
        found["healed"] = subject.live()
        second.shutdown()
        return found


def try_strangers(subject: Subject) -> dict:
    """Letters and invitations that nobody of ours wrote; vLLM's calls stay in step, and its next update begins."""
    llm = subject.llm
    llm.start_weight_update()
    address = Address(token="0" * 32, host="127.0.0.1", port=1)
    letter = Letter(address=address, message="{}").model_dump()
    found = {"letter": subject.refused(llm.update_weights, {"update_info": letter})}
    llm.start_weight_update()
    found["foreign"] = subject.refused(llm.update_weights, {"update_info": {"names": ["a"], "shapes": [[1]]}})
    found["invitation"] = subject.refused(llm.init_weight_transfer_engine, {"init_info": {"master_port": 1}})
    return found | {"ranks": [answer["rank"] for answer in subject.call("observe", "pids")]}


def try_nan(subject: Subject, trainer: RefitTrainer) -> dict:
    """Seen while it is written. Nobody gets the update past vLLM."""
    trainer.source = PolicySource(bad_policy(FAMILY))
    found = {"send": subject.refused(trainer.send_weights), "dirty": trainer.is_dirty}
    subject.llm.start_weight_update()
    found["finish"] = subject.refused(subject.llm.finish_weight_update, *(["9"] if NAMES_VERSIONS else []))
    return found | {"version": version_named_by(subject.llm)}


def run_served_transfer(work: str) -> dict:
    """A server in vLLM's development mode, driven by its own HTTP client; beside it an engine in this process."""
    folder = Path(work) / "bf16"
    save_model(FAMILY, 1, folder)
    models = {seed: make_model(FAMILY, seed) for seed in (1, 2)}
    os.environ["FP8REFIT_API_KEY"] = KEY
    with Server(folder, weight_transfer_config=json.dumps(CONFIG["weight_transfer_config"])) as server:
        with booted_dummy(folder, "fp32", **CONFIG) as llm:  # while the server starts
            found: dict[str, Any] = {"ordinary": {}}
            for seed in (1, 2):
                Refitter(llm).refit(make_policy(FAMILY, seed))
                found["ordinary"][seed] = [live_bytes(llm)]
            trainer_of(client_of(llm), ModuleSource(models[1])).send_weights()
            found["in process"] = {"live": [live_bytes(llm)], "version": Refitter(llm).version}
        server.wait()
        client = HTTPVLLMWeightSyncClient(server.url, timeout=TIMEOUT_S)
        trainer = trainer_of(client, ModuleSource(models[1]))
        found["1"] = send(server, trainer)
        trainer.source = ModuleSource(models[2])
        found["2"] = send(server, trainer) | {
            "fingerprints": [trainer.fingerprints(), Refitter(server.url).fingerprints()]
        }
        found["draft"] = server.post("/start_draft_weight_update", "")["status"]
        found["init"] = server.post("/init_weight_transfer_engine", '{"init_info": {"rank_offset": 1}}')["status"]

        def drive() -> None:
            dying = PolicySource(make_policy(FAMILY, 1), half_way=die)
            trainer_of(HTTPVLLMWeightSyncClient(server.url), dying).send_weights()

        found["killed"] = {"code": run_driver(drive), "first": refused(trainer.send_weights)}
        trainer = trainer_of(client, ModuleSource(models[2]))
        found["healed"] = send(server, trainer)
        trainer.shutdown()
        return found


def send(server: Server, trainer: RefitTrainer) -> dict:
    """Pause, send, resume, as vLLM's documentation has it."""
    assert server.post("/pause", "")["status"] == 200
    trainer.send_weights()
    assert server.post("/resume", "")["status"] == 200
    told = server.post("/weight_info", None)["body"] if NAMES_VERSIONS else None
    return {"live": server.live(), "says": server.complete(PROMPTS[0]), "told": told}
