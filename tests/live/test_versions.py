"""Versions that cannot be refitted are refused by name and range, and others are not."""

import pytest

from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.versions import Versions

VERSIONS = Versions(engine="vLLM", oldest="0.26", newest="0.33")


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2.post2", "v0.25.0rc1", "0.11.2.dev278+gdbc3d9991"])
def test_an_older_version_is_refused(version):
    with pytest.raises(UnsupportedEngineError) as caught:
        VERSIONS.check(version)
    said = f"this is vLLM {version}; fp8refit works with vLLM 0.26 or later (tested up to 0.33): install one of those"
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    "version", ["0.26.0", "0.26", "0.26.1rc1", "0.33.0", "0.40.0", "1.0", "0.1.dev1+g1234", "unknown", "", "main"]
)
def test_others_are_not(version):
    VERSIONS.check(version)
