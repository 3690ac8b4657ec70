"""What ranks of a trainer do in the test of a `Broadcaster` with a group. Each function runs on every rank at once."""

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fp8refit.driver.adapters
from fp8refit import Broadcaster, RefitError, gathered
from fp8refit.ranks.kv.calibration import to_float32
from fp8refit.ranks.kv.scales import MARGIN
from tests.fake_kv import ATTENTION, K_SCALE, V_SCALE
from tests.fake_ranks import EXPERTS, O_PROJ, Q_PROJ, ClientEntryPoint, Cluster, Remote, stack_experts

TIMEOUT_S = 20.0
GIVEN = {K_SCALE: 0.5, V_SCALE: 0.25}


def push_shards(rank: int) -> list[str]:
    """Policies that every rank holds half of: one with KV scales, one with NaN, one too early, and one that is calibrated."""
    fp8refit.driver.adapters.entry_points = lambda group: [ClientEntryPoint()]
    mesh = init_device_mesh("cpu", (2,))
    remotes = [Remote(Cluster(kv=[[ATTENTION]] * 2)) for _ in range(2)] if rank == 0 else []
    group = torch.distributed.group.WORLD
    broadcaster = Broadcaster([remote.client for remote in remotes], group=group, timeout_s=TIMEOUT_S)
    found = []
    for seed in (1, 2, 3, 4):
        policy = Cluster().make_policy(seed)
        if seed == 2:
            policy[Q_PROJ][3, 3] = torch.nan
        if seed == 3 and remotes:
            remotes[1].client.is_busy = True
        cut = {
            name: distribute_tensor(tensor, mesh, [Shard(1 if name == O_PROJ else 0)])
            for name, tensor in policy.items()
        }
        if seed == 1:
            cut |= {name: torch.tensor(scale) for name, scale in GIVEN.items()}
        try:
            broadcaster.push(cut, calibration=[[1, 2, 3]] if seed == 4 else None)
            found.append("pushed")
        except RefitError as error:
            found.append(type(error).__name__)
        for remote in remotes:
            remote.client.is_busy = False
            if found[-1] == "pushed":
                remote.cluster.assert_holds(policy, version=remote.ranks.version)
                measured = dict.fromkeys(GIVEN, to_float32(MARGIN))
                assert remote.cluster.scales == [GIVEN if seed == 1 else measured] * 2
    broadcaster.close()
    return found


def push_stacks(rank: int, layout: str) -> list[str]:
    """Experts stacked in one tensor a layer, which every rank holds half of, gathered expert by expert and broadcast."""
    fp8refit.driver.adapters.entry_points = lambda group: [ClientEntryPoint()]
    mesh = init_device_mesh("cpu", (2,))
    remotes = [Remote(Cluster(layout)) for _ in range(2)] if rank == 0 else []
    broadcaster = Broadcaster([remote.client for remote in remotes], timeout_s=TIMEOUT_S) if remotes else None
    found = []
    for seed, dim in enumerate((0, 1, 2), 1):
        policy = Cluster(layout).make_policy(seed)
        stacked = stack_experts(policy, is_transposed=seed == 3)
        cut = {
            name: distribute_tensor(tensor, mesh, [Shard(min(dim, tensor.ndim - 1))])
            for name, tensor in stacked.items()
        }
        with gathered(cut, bucket_bytes=200_000, timeout_s=TIMEOUT_S) as weights:
            if broadcaster is not None:
                broadcaster.push(weights)
                found += [
                    tensor.dtype
                    for tensor in broadcaster._refitter._engine.ranks._broadcast._plan.wire.tensors
                    if tensor.name.startswith(EXPERTS)
                ]
        for remote in remotes:
            remote.cluster.assert_holds(policy, version=seed)
    if broadcaster is not None:
        broadcaster.close()
    return sorted(set(found))
