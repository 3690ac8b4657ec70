"""The installed SGLang, or an unpacked wheel of one, has every place that the adapter reaches for. Nothing of it runs."""

from fp8refit_sglang.compat import SEAMS

from tests.seam_reader import assert_is_known

SINCE = {
    "building drafts": "0.5.20",
    "forward contexts, and graphs by kind": "0.5.15",
    "updates that say when": "0.5.23",
}
"""The first tested version that has what older ones go without."""


def test_it_has_all_that_the_adapter_reaches_for_but_what_older_versions_go_without():
    assert_is_known("sglang", SEAMS, SINCE)
