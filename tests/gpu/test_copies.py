"""Copies of weights are told from tables wherever a twin was built. tests/live/test_copies.py has the rules."""

import pytest
import torch

from tests.live.test_copies import COPIES, copies_of, make_model, refused

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_tables_of_a_twin_on_any_device_are_recognized(place):
    assert refused(copies_of(make_model().cuda(), twin=make_model().to(place))) == []


@pytest.mark.parametrize("kind", ["copy", "impl", "buffer", "table", "restored buffer"])
def test_copies_are_refused_there_too(kind):
    model = make_model().cuda()
    copies = copies_of(model, twin=make_model().cuda())
    assert refused(copies) == []
    COPIES[kind](model["attn"])
    assert len(refused(copies)) == 1
