"""Where a weight update of vLLM's fails at its end, it is over. On real engines: `tests/vllm`."""

from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm import drop_in as vllm
from torch import nn

from fp8refit.driver.drop_in import DropInOptions
from fp8refit.errors import InvalidSourceError, UnsupportedEngineError
from fp8refit.live.slots import FP8_DTYPE
from tests.driver.test_drop_in import Site, fake_engine

__all__ = ["fake_engine"]


@pytest.mark.parametrize("finalize", ["finalize_layerwise_reload", "finalize_layerwise_processing"])
def test_an_update_of_vllm_that_fails_at_its_end_is_over_and_another_one_may_start(finalize, fake_engine):
    site = Site("tensor")
    policy = site.cluster.make_policy(1)

    def update(items):
        site.each(vllm._INSTEAD["initialize_layerwise_reload"])
        for drop_in in site.drop_ins:
            drop_in.owner._weight_update_active = True  # as vLLM's workers do then
            drop_in.owner._skyrl_weight_update_active = True  # and SkyRL's extension of them
        site.load(items)
        return site.each(vllm._INSTEAD[finalize])

    outcomes = update(list(policy.items())[1:])
    assert all(isinstance(error, InvalidSourceError) and "missing" in str(error) for error in outcomes)
    assert [drop_in.owner._weight_update_active for drop_in in site.drop_ins] == [False] * len(site.drop_ins)
    assert [drop_in.owner._skyrl_weight_update_active for drop_in in site.drop_ins] == [False] * len(site.drop_ins)
    assert site.is_dirty
    assert update(list(policy.items())) == [None] * len(site.drop_ins)
    site.assert_holds(policy, 1)


def test_experts_that_are_spread_over_replicas_are_refused_before_a_rank_is_made():
    network = nn.Module()
    network.weight = nn.Parameter(torch.zeros(2).to(FP8_DTYPE), requires_grad=False)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=2),
        model_config=SimpleNamespace(is_moe=True, quantization="fp8"),
    )
    worker = SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(get_model=lambda: network))
    with pytest.raises(UnsupportedEngineError, match=r"spread over data-parallel replicas.*Leave out the drop-in"):
        vllm.install(worker, pytest.fail, DropInOptions(drop_in=True))
