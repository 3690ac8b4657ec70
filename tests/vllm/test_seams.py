"""The installed vLLM, or an unpacked wheel of one, has every place that the adapter reaches for. Nothing of it runs."""

from fp8refit_vllm.compat import SEAMS

from tests.seam_reader import assert_is_known

SINCE = {
    "weight transfer": "0.26",
    "servers": "0.26",
    "patches of single values": "0.29",
    "versions in outputs": "0.27",
}
"""The first version that has what older ones go without."""


def test_it_has_all_that_the_adapter_reaches_for_but_what_older_versions_go_without():
    assert_is_known("vllm", SEAMS, SINCE)
