"""Where a weight update of vLLM's fails at its end, it is over. On real engines: `tests/vllm`."""

import pytest
from fp8refit_vllm import drop_in as vllm

from fp8refit.errors import InvalidSourceError
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
