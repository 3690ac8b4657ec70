"""vLLM's KV connectors: those that keep KV for later requests, which a refit could not take back, are refused by name."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm
ON_DISK = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
IN_MEMORY = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
PASSED_ON = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


def several(*connectors):
    options = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}


def check(transfer):
    from fp8refit_vllm.clients import check_layout
    from vllm.config import KVTransferConfig

    transfer = None if transfer is None else KVTransferConfig(**transfer)
    parallel = SimpleNamespace(data_parallel_size=1)
    check_layout(SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel))


@pytest.mark.parametrize(
    "transfer",
    [None, PASSED_ON, PASSED_ON | {"kv_role": "kv_consumer"}, IN_MEMORY, several(PASSED_ON, IN_MEMORY)],
    ids=["none", "prefill", "decode", "in memory", "several"],
)
def test_connectors_that_pass_kv_on_or_can_drop_it_are_taken(transfer):
    check(transfer)


@pytest.mark.parametrize("transfer", [ON_DISK, several(PASSED_ON, ON_DISK)], ids=["alone", "among several"])
def test_a_connector_that_keeps_kv_of_the_old_policy_is_refused_by_name(transfer):
    from fp8refit import UnsupportedEngineError

    with pytest.raises(UnsupportedEngineError, match="cannot make ExampleConnector drop what it keeps"):
        check(transfer)
