"""ms-swift's `swift rollout`, unmodified, on a host without GPUs, and a route to look at its engine.

python swift_rollout.py NUM_GPUS OPTION...
"""

import sys
from typing import Any

import cpu_transfer

cpu_transfer.install()  # also in the process of the engine, and before swift takes names from vLLM

from swift.arguments import deploy_args  # noqa: E402
from swift.pipelines.infer.rollout import SwiftRolloutDeploy  # noqa: E402


class Seen(SwiftRolloutDeploy):
    def _register_rl_rollout_app(self) -> None:
        super()._register_rl_rollout_app()
        self.app.post("/collective_rpc")(self.call)

    async def call(self, asked: dict) -> dict[str, Any]:
        (engine,) = self.connections
        engine.send({"type": "call", "method": "collective_rpc", "kwargs": asked})
        return {"results": engine.recv()}


if __name__ == "__main__":
    deploy_args.get_device_count = lambda: int(sys.argv[1])
    Seen(sys.argv[2:]).main()
