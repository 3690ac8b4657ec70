"""Three steps of TRL's own GRPO trainer, unmodified, with vLLM in its process or behind TRL's server. For `test_trl.py`.

    python trl_steps.py FOLDER [sleep | server | fault [NUM_RANKS]]

Writes what each rank of the engine held, and what it said, when each batch was rewarded, and the trainer's weights of that
moment as a checkpoint. `fault` is a server whose third policy has a NaN.
"""

import json
import os
import runpy
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cpu_transfer
import torch
import vllm
from datasets import Dataset
from engines import live_bytes, said
from tokens import tokenizer_of_bytes
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from vllm import SamplingParams
from vllm.platforms.cpu import CpuPlatform

import fp8refit
from tests.serving import FORK, ask, free_port
from tests.tiny_models import save_model

NUM_STEPS = 3
PROBE = SamplingParams(max_tokens=4, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)
PROBED = [(13 * i) % 200 for i in range(24)]
START_S = 150
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


class Colocated:
    """The engine is in the trainer's process. A CPU ignores that it sleeps, but for the order of the calls."""

    def __init__(self, *, sleeps: bool) -> None:
        self._sleeps = sleeps
        if sleeps:
            CpuPlatform.is_sleep_mode_available = lambda _: True
        self.options = {"vllm_mode": "colocate", "vllm_max_model_length": 256, "vllm_enable_sleep_mode": sleeps}

    def wait(self) -> None:
        """There is no server."""

    def look(self, trainer: GRPOTrainer) -> dict:
        llm = trainer.vllm_generation.llm
        if self._sleeps:
            llm.wake_up()
        (output,) = llm.generate({"prompt_token_ids": PROBED}, PROBE, use_tqdm=False)
        if self._sleeps:
            llm.sleep(level=2)
        report = fp8refit.last_report()
        return {
            "live": [live_bytes(llm)],
            "said": said(output)["logprobs"],
            "version": report.version if report else None,
        }

    def close(self, trainer: GRPOTrainer) -> None:
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()


class Served:
    """`trl vllm-serve`, and its client, whose GPU is a stand-in. The server is a fork of this process."""

    def __init__(self, model: Path, log: Path, num_ranks: int) -> None:
        self._model, self._url = str(model), f"http://127.0.0.1:{free_port()}"
        arguments = ["--model", model, "--host", "127.0.0.1"]
        arguments += ["--port", self._url.rpartition(":")[2], "--max_model_len", "256", "--dtype", "bfloat16"]
        arguments += [
            "--tensor_parallel_size",
            num_ranks,
            "--enforce_eager",
            "true",
            "--max-num-seqs",
            "4",
            "--num-gpu-blocks-override",
            "64",
        ]
        named = (
            model.parent / "named"
        )  # the CPU's wheel has another name, and vLLM's command asks for the version of this one
        (named / "vllm-0.dist-info").mkdir(parents=True)
        (named / "vllm-0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n"
        )
        os.environ["VLLM_HOST_IP"] = "127.0.0.1"
        self._log = log
        self._process = FORK.Process(target=_serve, args=(list(map(str, arguments)), named, log))
        self._process.start()
        cpu_transfer.install()
        init_communicator = VLLMClient.init_communicator

        def init_at_a_free_port(client: VLLMClient, device: Any) -> None:
            client.group_port = free_port()  # not before the server has booted, whose ranks listen at many
            for adapter in client.session.adapters.values():
                adapter.max_retries.backoff_factor = 0.1  # not 2 seconds, 4, 8: it asks again as often
            init_communicator(client, torch.device("cuda"))

        VLLMClient.init_communicator = init_at_a_free_port
        self.options = {
            "vllm_mode": "server",
            "vllm_server_base_url": self._url,
            "vllm_server_timeout": 150.0,
        }

    def wait(self) -> None:
        """Until it takes requests: TRL's client doubles the time after which it looks again, up to 32 seconds."""
        deadline_s = time.monotonic() + START_S
        while ask(self._url + "/health")[0] != 200:
            if not self._process.is_alive() or time.monotonic() > deadline_s:
                raise RuntimeError(f"the server does not start\n{self._log.read_text()[-6000:]}")
            time.sleep(0.2)

    def look(self, _: GRPOTrainer) -> dict:
        asked = {"model": self._model, "prompt": PROBED, "max_tokens": 4, "temperature": 0, "logprobs": 2}
        answer = self.post("/v1/completions", asked | {"ignore_eos": True})
        reports = self.call("fp8refit_last_report") if "FP8REFIT_DROP_IN" in os.environ else []
        versions = {json.loads(report)["version"] for report in reports if report}
        return {
            "live": [rank["found"] for rank in self.call("observe", "live_bytes")],
            "said": answer["choices"][0]["logprobs"] if "choices" in answer else answer,
            "version": versions.pop() if len(versions) == 1 else None,
        }

    def call(self, method: str, *arguments: str) -> list:
        """Every rank's answer to vLLM's `collective_rpc`; empty if there is none."""
        return self.post("/collective_rpc", {"method": method, "args": arguments}).get("results", [])

    def post(self, route: str, body: dict) -> dict:
        request = urllib.request.Request(
            self._url + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return {"status": error.code, "said": error.read().decode()}

    def close(self, _: GRPOTrainer) -> None:
        self._process.terminate()
        self._process.join(30)


def _serve(arguments: list[str], named: Path, log: Path) -> None:
    """TRL's command becomes vLLM's own: not by another program, which would import vLLM anew."""

    def become(_: str, command: list[str], environment: dict[str, str]) -> None:
        os.environ.update(environment)
        module = command.index("-m") + 1
        sys.argv = command[module:]
        runpy.run_module(command[module], run_name="__main__")

    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= {"FP8REFIT_TEST_TRANSFER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(named)])
    sys.path.append(str(named))
    sys.argv = ["trl.scripts.vllm_serve", *arguments]
    with patch.object(os, "execve", become):
        runpy.run_module("trl.scripts.vllm_serve", run_name="__main__")


class Fault(TrainerCallback):
    """Breaks one weight once two steps are done, and mends it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._whole: torch.Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
        if state.global_step == NUM_STEPS - 1:
            weight = model.get_parameter(DOWN_PROJ).data
            self._whole = weight.clone()
            weight[3, 5] = torch.nan
            self.seconds = -time.monotonic()

    def mend(self, model: torch.nn.Module) -> None:
        self.seconds += time.monotonic()
        model.get_parameter(DOWN_PROJ).data.copy_(self._whole)


def main(folder: Path, how: str = "", num_ranks: str = "1") -> None:
    save_model("qwen3" if num_ranks == "1" else "qwen2_wide", 1, folder / "model")
    tokenizer_of_bytes().save_pretrained(folder / "model")
    is_served = how in ("server", "fault")
    place = (
        Served(folder / "model", folder / "server.log", int(num_ranks))
        if is_served
        else Colocated(sleeps=how == "sleep")
    )
    seen: list[dict] = []

    def look() -> None:
        trainer.model.save_pretrained(folder / f"policy-{len(seen)}")
        seen.append(place.look(trainer))

    def reward(completions: list[str], **_: object) -> list[float]:
        """Looks at the engine, which has just answered."""
        look()
        return [len(set(text)) + len(text) / 7 for text in completions]

    config = GRPOConfig(
        output_dir=str(folder / "out"),
        use_vllm=True,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "bfloat16"},
        max_steps=NUM_STEPS,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        temperature=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        **place.options,
    )
    prompts = Dataset.from_dict({"prompt": ["one two", "three", "four five six", "seven"] * 4})
    fault = Fault() if how == "fault" else None
    place.wait()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=prompts,
        callbacks=[fault] if fault else None,
    )
    found: dict[str, Any] = {"steps": seen, "error": ""}
    try:
        trainer.train()
    except Exception as raised:  # noqa: BLE001 - of the control
        found["error"] = f"{type(raised).__name__}: {raised}"
    if fault:
        found["dirty"] = place.look(trainer)["said"]
        fault.mend(trainer.model)
        found["seconds"] = fault.seconds
        trainer.vllm_generation.sync_weights()
        look()
    (folder / "found.json").write_text(json.dumps(found))
    place.close(trainer)


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), *sys.argv[2:])
