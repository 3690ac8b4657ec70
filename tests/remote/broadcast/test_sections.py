"""Who gets what of a broadcast, from layouts alone."""

import pytest

from fp8refit.remote.broadcast.sections import Sections, find_sections
from fp8refit.transport.collective.buckets import Cut
from tests.fake_ranks import (
    EMBED,
    EXPERT_0,
    EXPERT_1,
    EXPERTS,
    K_PROJ,
    NORM,
    O_PROJ,
    Q_PROJ,
    UP_PROJ,
    Cluster,
)
from tests.fakes import FakeModel, make_target


def layouts_of(*engines):
    return [target.live.layout() for engine in engines for target in Cluster(engine).targets]


def test_ranks_of_tensor_parallelism_get_their_rows_and_columns():
    sections = find_sections(layouts_of("tensor"))
    assert sections.of_rank == (0, 1)
    assert sections.cuts == {
        EMBED: Cut(dim=0, spans=((0, 5), (5, 5))),
        Q_PROJ: Cut(dim=0, spans=((0, 128), (128, 128))),
        O_PROJ: Cut(dim=1, spans=((0, 128), (128, 128))),
        UP_PROJ: Cut(dim=0, spans=((0, 160), (160, 160))),
    }


def test_the_same_rank_of_every_replica_is_in_the_same_section():
    sections = find_sections(layouts_of("tensor", "tensor", "tensor"))
    assert sections.of_rank == (0, 1) * 3
    assert sections.cuts == find_sections(layouts_of("tensor")).cuts


def test_stages_of_a_pipeline_get_their_layers():
    sections = find_sections(layouts_of("pipeline"))
    assert sections.of_rank == (0, 1)
    assert sections.cuts[Q_PROJ].spans == ((0, 256), (0, 0))
    assert sections.cuts[UP_PROJ].spans == ((0, 0), (0, 320))
    assert NORM not in sections.cuts, "it is small"


def test_ranks_of_expert_parallelism_get_their_experts():
    cuts = find_sections(layouts_of("expert")).cuts
    assert (cuts[EXPERT_0].spans, cuts[EXPERT_1].spans) == (((0, 128), (0, 0)), ((0, 0), (0, 128)))
    cuts = find_sections(layouts_of("experts apart")).cuts
    assert cuts[f"{EXPERTS}.1.down_proj.weight"].spans == ((0, 0), (0, 192))


@pytest.mark.parametrize("engines", [("replicated",), ("replicated", "replicated")])
def test_ranks_that_hold_the_same_form_no_sections(engines):
    assert find_sections(layouts_of(*engines)) == Sections()


def test_one_rank_needs_no_sections():
    assert find_sections([make_target(FakeModel()).live.layout()]) == Sections()


def test_what_would_be_sent_more_than_once_goes_to_all():
    assert K_PROJ not in find_sections(layouts_of("tensor")).cuts
    assert find_sections(layouts_of("tensor", "replicated")).cuts.keys() == {EMBED}


def test_a_tensor_that_ranks_know_in_different_shapes_goes_to_all():
    first, last = layouts_of("tensor")
    slots = tuple(
        slot.model_copy(update={"full_shape": (512, 192)}) if slot.name == Q_PROJ else slot for slot in last.slots
    )
    sections = find_sections([first, last.model_copy(update={"slots": slots})])
    assert sections.cuts.keys() == {EMBED, O_PROJ, UP_PROJ}
