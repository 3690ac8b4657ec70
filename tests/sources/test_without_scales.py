"""Sources that may set no KV scale, because KV of the old ones stays in use."""

from fnmatch import fnmatch

import pytest
import torch
from safetensors.torch import save_file

from fp8refit import InvalidSourceError
from fp8refit.sources.renamed import without_scales
from fp8refit.sources.source import as_source

SCALES = ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"]
POLICY = {"model.norm.weight": torch.ones(4)} | dict.fromkeys(SCALES, torch.tensor(0.5))
WEIGHTS = {"model.norm.weight": POLICY["model.norm.weight"]}


def none(name):
    return False


def saved(policy, folder):
    save_file({name: tensor.clone() for name, tensor in policy.items()}, folder / "model.safetensors")
    return folder


MAKE = {
    "mapping": lambda policy, _: policy,
    "repeatable stream": lambda policy, _: lambda: iter(policy.items()),
    "file": lambda policy, folder: saved(policy, folder),
}


@pytest.mark.parametrize("kind", MAKE)
def test_every_scale_is_named_before_anything_is_read(kind, tmp_path):
    with pytest.raises(InvalidSourceError) as failed:
        without_scales(as_source(MAKE[kind](POLICY, tmp_path)), none)
    assert all(name in str(failed.value) for name in SCALES)
    assert 'in_flight="continue"' in str(failed.value)


@pytest.mark.parametrize("kind", MAKE)
def test_a_source_of_weights_stays_what_it_is(kind, tmp_path):
    source = as_source(MAKE[kind](WEIGHTS, tmp_path))
    assert without_scales(source, none) is source


@pytest.mark.parametrize("kind", MAKE)
def test_scales_that_are_ignored_may_come(kind, tmp_path):
    source = as_source(MAKE[kind](POLICY, tmp_path))
    assert without_scales(source, lambda name: fnmatch(name, "*_scale")) is source


def test_a_stream_that_cannot_be_read_again_raises_when_the_scale_comes():
    source = without_scales(as_source(iter(POLICY.items())), none)
    assert source.scan() is None
    taken = iter(source)
    assert next(taken)[0] == "model.norm.weight"
    with pytest.raises(InvalidSourceError, match="k_scale"):
        next(taken)
    source = without_scales(as_source(iter(POLICY.items())), lambda name: fnmatch(name, "*_scale"))
    assert [name for name, _ in source] == list(POLICY)
