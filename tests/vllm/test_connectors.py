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


def check(transfer, encoder=None):
    from fp8refit_vllm.clients import check_layout
    from vllm.config import KVTransferConfig

    transfer = None if transfer is None else KVTransferConfig(**transfer)
    parallel = SimpleNamespace(data_parallel_size=1)
    check_layout(SimpleNamespace(kv_transfer_config=transfer, ec_transfer_config=encoder, parallel_config=parallel))


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


TIERS = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}]}
UNKNOWN = PASSED_ON | {"kv_connector_module_path": "no_such_module"}


@pytest.mark.parametrize(
    "transfer",
    [IN_MEMORY | {"kv_connector_extra_config": TIERS}, UNKNOWN, several(UNKNOWN)],
    ids=["tiers of files", "of a module", "among several"],
)
def test_a_connector_of_which_nobody_knows_that_it_drops_all_is_refused(transfer):
    from fp8refit import UnsupportedEngineError

    with pytest.raises(UnsupportedEngineError, match=f"cannot make {transfer['kv_connector']}|make NixlConnector"):
        check(transfer)


def test_what_an_encoder_has_computed_is_not_to_be_kept_outside():
    from fp8refit import UnsupportedEngineError

    with pytest.raises(UnsupportedEngineError, match="boot it without ec_transfer_config"):
        check(None, encoder=SimpleNamespace(ec_connector="ECExampleConnector"))
