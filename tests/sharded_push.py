"""What ranks of a trainer do in the test of a `Broadcaster` with a group. Each function runs on every rank at once."""

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fp8refit.engine
from fp8refit import Broadcaster, RefitError
from tests.fake_ranks import O_PROJ, Q_PROJ, ClientEntryPoint, Cluster, Remote

TIMEOUT_S = 20.0


def push_shards(rank: int) -> list[str]:
    """Three policies that every rank holds half of: a good one, one with NaN, and a good one again."""
    fp8refit.engine.entry_points = lambda group: [ClientEntryPoint()]
    mesh = init_device_mesh("cpu", (2,))
    remotes = [Remote(Cluster()) for _ in range(2)] if rank == 0 else []
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
        try:
            broadcaster.push(cut)
            found.append("pushed")
        except RefitError as error:
            found.append(type(error).__name__)
        for remote in remotes:
            remote.client.is_busy = False
            if found[-1] == "pushed":
                remote.cluster.assert_holds(policy, version=remote.ranks.version)
    broadcaster.close()
    return found
