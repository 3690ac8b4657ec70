"""Where SGLang loads from disk, and that fails, the next policy may come any other way. On real engines: `tests/sglang`."""

import pytest
from fp8refit_sglang import drop_in as sglang

from fp8refit.errors import InvalidSourceError, RefitError
from tests.driver.test_drop_in import Site, fake_engine

__all__ = ["fake_engine"]


@pytest.mark.parametrize("version", ["0.5.15", "0.5.23"])
def test_a_load_from_disk_that_fails_leaves_nothing_to_end(version, fake_engine):
    site = Site("alone")
    (drop_in,) = site.drop_ins
    policy = site.cluster.make_policy(1)

    def load_from_disk(weights):
        if version == "0.5.15":
            sglang._INSTEAD_BEFORE["load_weights_and_postprocess"](drop_in, weights, "cpu")
        else:
            sglang._INSTEAD["restore_weights_before_loading"](drop_in, "cpu")
            sglang._INSTEAD["load_weights_and_postprocess"](drop_in, weights, "cpu")

    def broken():
        yield next(iter(policy.items()))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        load_from_disk(broken())
    with pytest.raises(InvalidSourceError, match="no such weight"):
        load_from_disk(iter([*policy.items(), ("other.weight", next(iter(policy.values())))]))
    assert site.is_dirty
    site.load_policy(policy)
    site.assert_holds(policy, 1)
    load_from_disk(iter(policy.items()))
    site.assert_holds(policy, 2)
    with pytest.raises(RefitError):
        load_from_disk(list(policy.items())[:2])
    site.load_policy(policy)
    site.assert_holds(policy, 3)
