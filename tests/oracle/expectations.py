"""What a campaign has to have found."""

import json
import os
from collections.abc import Mapping
from typing import Any

from tests.oracle.judge import VIOLATIONS

LENGTH = os.environ.get("FP8REFIT_ORACLE", "short")
"""Of a campaign: `short` in the suites of the engines, `long` where FP8REFIT_ORACLE says so."""


def check(found: Mapping[str, Any], *, least: Mapping[str, int]) -> None:
    """Check that a server never said what it may not say, and that it was attacked.

    Args:
        found: By a campaign.
        least: How often what was done, so that the figures mean something.
    """
    assert found["ended_by"] is None, found["ended_by"]
    judged = found["judged"]
    assert {kind: judged.get(kind, 0) for kind in VIOLATIONS} == dict.fromkeys(VIOLATIONS, 0), json.dumps(
        judged, indent=1
    )
    assert found["policies_with_several_fingerprints"] == 0
    assert {name: found[name] for name in least if found[name] < least[name]} == {}, json.dumps(found, indent=1)
    for kind in ("of_one", "of_two_across_keep", "of_two_across_continue", "refused"):
        assert judged.get(kind, 0), f"no answer is {kind}: {judged}"
    assert found["pushes_that_healed"] >= found["kills_inside_the_write"] / 2, found
