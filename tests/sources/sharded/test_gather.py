"""Sharded state dicts on two and four gloo ranks, each a process."""

import re
from functools import partial

import pytest
from torch.distributed.tensor import Replicate, Shard

from fp8refit import gathered
from tests import sharded
from tests.trainer_ranks import TrainerRanks


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    ranks = TrainerRanks(4, str(tmp_path_factory.mktemp("four") / "store"))
    yield ranks
    ranks.close()


@pytest.fixture
def doomed(tmp_path):
    """Four whose group is not of use any more after the test."""
    ranks = TrainerRanks(4, str(tmp_path / "store"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("max_bytes", [1 << 20, 5000])
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), (Shard(0),)),
        ((4,), (Shard(1),)),
        ((4,), (Replicate(),)),
        ((2, 2), (Replicate(), Shard(0))),
        ((2, 2), (Shard(0), Replicate())),
        ((2, 2), (Replicate(), Shard(1))),
        ((2, 2), (Shard(0), Shard(1))),
        ((2, 2), (Shard(1), Shard(0))),
        ((2, 2), (Shard(0), Shard(0))),
        ((1, 2, 2), (Shard(0), Shard(2), Shard(0))),
    ],
    ids=str,
)
def test_what_is_gathered_is_the_model(four, mesh, placements, max_bytes):
    assert four.run(sharded.gather_all, mesh, placements, max_bytes) == [[]] * 4


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_an_fsdp_model_is_gathered(four, mesh):
    assert four.run(sharded.gather_fsdp, *mesh) == [[]] * 4


def test_what_two_libraries_cut_and_partial_sums_are_left_to_torch(four):
    (placements,), *others = four.run(sharded.gather_oddly)
    assert "_StridedShard" in placements and others == [[]] * 3


@pytest.mark.parametrize("max_bytes", [1 << 20, 1000])
def test_a_megatron_model_is_gathered_under_checkpoint_names(four, max_bytes):
    assert four.run(sharded.gather_megatron, max_bytes) == [[]] * 4


@pytest.mark.parametrize("max_bytes", [1 << 20, 1000])
def test_pipeline_stages_and_experts_that_are_spread_are_one_checkpoint(four, max_bytes):
    assert four.run(sharded.gather_stages, max_bytes) == [[]] * 4


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("shape", "decoder.final_layernorm.weight: on rank 2 float32 [16], whole, checksum "),
        ("unreadable", "decoder.final_layernorm.weight: "),
        ("raise", "no room"),
    ],
)
def test_what_one_rank_of_a_stage_cannot_do_is_told_by_all(four, fault, told):
    found = four.run(sharded.gather_stages_in_vain, fault)
    assert all(told in one for one in found), found


def test_a_stream_that_takes_all_ranks_is_read_by_all(four):
    found = four.run(sharded.refit_from_a_stream, None)
    assert {told for told, _, _ in found} == {"nothing"}, found
    assert len({num_read for _, num_read, _ in found}) == 1
    assert found[0][1] > 0


def test_an_engine_that_is_busy_keeps_all_ranks_from_a_stream(four):
    found = four.run(sharded.refit_from_a_stream, "busy")
    assert all("unfinished" in told for told, _, _ in found), found
    assert [num_read for _, num_read, _ in found] == [0] * 4


def test_a_stream_that_does_not_fit_ends_on_all_ranks_alike(four):
    found = four.run(sharded.refit_from_a_stream, "unexpected")
    assert all("model.other" in told for told, _, _ in found), found
    assert len({num_read for _, num_read, _ in found}) == 1
    assert [is_dirty for _, _, is_dirty in found] == [False, False, False, True]


@pytest.mark.parametrize("fault", ["raise", "end"])
def test_a_stream_that_one_rank_alone_leaves_ends_on_all_in_time(doomed, fault):
    """The others are in an operation of the trainer's, which nobody else can end."""
    found = doomed.run(sharded.refit_from_a_stream, fault)
    assert not any(told.startswith("nothing") for told, _, _ in found), found
    assert found[2][0] == "MemoryError: no room" or fault == "end"
    assert [is_dirty for _, _, is_dirty in found] == [False, False, False, True]


def test_a_stream_of_which_one_rank_dies_ends_on_all_in_time(doomed):
    found = doomed.run(sharded.refit_from_a_stream, "die", dying=[2])
    assert not any(told.startswith("nothing") for told, _, _ in found), found
    assert found[-1][2], "the engine is dirty"


def test_every_rank_refits_its_engine_from_shards(four):
    assert four.run(sharded.refit_everywhere) == [[1, 2, -2, 3]] * 4


def test_an_engine_that_is_busy_keeps_all_ranks_from_the_first_gather(four):
    for error, is_written in four.run(sharded.refit_where_one_is_busy):
        assert error == "EngineBusyError: rank 3: 2 requests are unfinished" or error.endswith(
            ": 2 requests are unfinished"
        )
        assert not is_written


@pytest.mark.parametrize("strict", [False, True], ids=["fused", "strict"])
def test_one_rank_refits_its_engines_while_the_others_take_part(four, strict):
    assert four.run(partial(sharded.refit_one, strict=strict)) == [1, None, None, None]


@pytest.mark.parametrize(
    ("fault", "kind", "match"),
    [
        ("missing everywhere", "InvalidSourceError", r"o_proj\.weight"),
        ("missing on one", "InvalidSourceError", r"o_proj\.weight: on rank 0, 2, 3 bfloat16 .*; on rank 1 absent"),
        ("placed otherwise", "InvalidSourceError", r"o_proj\.weight: on rank 0, 1, 3 .*dim=0.*; on rank 2 .*dim=1"),
        ("other order", "InvalidSourceError", "same tensors in different orders"),
        ("broken shard", "InvalidSourceError", r"o_proj\.weight: on rank 0, 2, 3 .*; on rank 1 its shard here is"),
    ],
)
def test_what_differs_between_ranks_is_found_before_the_first_gather(four, fault, kind, match):
    for error, is_written in four.run(sharded.refit_in_vain, fault):
        assert error.startswith(kind) and re.search(match, error), error
        assert not is_written


def test_a_rank_that_fails_in_the_middle_ends_the_pass_on_every_rank(four):
    errors = [error for error, _ in four.run(sharded.refit_in_vain, "late")]
    assert errors[2] == "MemoryError: no room for a third bucket"
    for error in (errors[0], errors[1], errors[3]):
        assert error == "RankFailedError: rank 2: MemoryError: no room for a third bucket"


def test_an_interrupt_on_one_rank_ends_it_on_all(four):
    errors = [error for error, _ in four.run(sharded.refit_in_vain, "interrupted")]
    assert errors[1] == "KeyboardInterrupt: "
    assert errors[0] == errors[2] == errors[3] == "RankFailedError: rank 1: KeyboardInterrupt: "


@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        (
            "break",
            "no error",
            "RankFailedError: rank 0: a rank of the trainer stopped before it had read the whole state dict",
        ),
        ("raise", "ValueError: a reader of its own", "RankFailedError: rank 0: ValueError: a reader of its own"),
    ],
)
def test_a_reader_that_stops_lets_the_others_go(four, how, own, others):
    assert four.run(sharded.read_partly, how) == [own, others, others, others]


@pytest.mark.parametrize("placements", [(Shard(0),), (Shard(1),)], ids=str)
def test_the_next_batch_is_on_its_way_while_one_is_read(four, placements, tmp_path):
    """The reader keeps each batch until the others have all of the next, which would never come if it were not sent yet."""
    sharded.assert_overlap(*four.run(sharded.read_slowly, placements, str(tmp_path / "store")))


@pytest.mark.parametrize(
    "placements", [(Replicate(), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Shard(1))], ids=str
)
def test_a_pass_takes_two_buckets_beside_the_model(four, placements):
    max_bytes = 1 << 18
    for peak, num_model_bytes in four.run(sharded.peak_bytes, placements, max_bytes):
        assert max_bytes < peak <= 2.5 * max_bytes < num_model_bytes


@pytest.mark.parametrize(("num_elements", "when"), [(1, 0), (1, 16), (512, 5), (512, 20), (100_000, 1), (100_000, 20)])
def test_a_function_that_raises_on_one_rank_while_the_others_gather_ends_on_all_in_time(doomed, num_elements, when):
    """Nobody's process ends, and all of them can vote after it."""
    found = doomed.run(partial(sharded.leave_others_in_a_gather, when=when), num_elements)
    assert [heard for _, _, heard in found] == [[0, 1, 2, 3]] * 4
    assert all(is_in_time for _, is_in_time, _ in found), found
    assert found[1][0] == "MemoryError: no room"
    assert not any(told == "nothing" for told, _, _ in found), found


@pytest.mark.parametrize("is_apart", [False, True], ids=["alike", "apart"])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("", None),
        ("other value", r"whole: on rank 0, 1, 3 bfloat16 \[39999\], whole, checksum .*; on rank 2 bfloat16 "),
        ("other order", r"whole: on rank 0, 2, 3 bfloat16 \[39999\], whole, checksum .*; on rank 1 bfloat16 "),
        ("replicated", r"replicated: on rank 0, 1, 2 float32 \[24\], .*Replicate.*; on rank 3 float32 "),
    ],
)
def test_tensors_that_are_whole_on_every_rank_must_be_equal(four, fault, told, is_apart):
    for found in four.run(partial(sharded.gather_whole, is_apart=is_apart), fault):
        assert found == "nothing" if told is None else re.search(told, found), found
        assert told is None or found.startswith("InvalidSourceError")


def test_groups_of_some_ranks_gather_at_once(four):
    assert four.run(sharded.gather_in_pairs) == [[]] * 4


def test_ranks_vote_after_votes_to_which_not_all_came(doomed):
    told = doomed.run(sharded.come_alone_first)
    assert told == [["EngineLostError"] * 2, [], [], ["EngineLostError"]]


def test_a_rank_that_gave_up_a_vote_has_not_left_its_ticket_for_the_next(doomed):
    assert doomed.run(sharded.come_late_after_giving_up) == [4] * 4


def test_votes_end_with_their_group_and_begin_with_another(doomed, tmp_path):
    assert doomed.run(sharded.begin_anew, str(tmp_path / "other")) == [(0, ["nothing"] * 2)] * 4


def test_ranks_that_never_come_are_an_error_in_time(four):
    assert four.run(sharded.come_alone, 1.0)[0].startswith(
        "RankFailedError: rank 0 of 4 of the trainer was at 'read' and did not hear from every other rank within 1 s"
    )


def test_a_rank_that_dies_in_the_middle_is_an_error_on_the_others(four):
    for error in four.run(sharded.die_in_the_middle, dying=[3]):
        assert error.startswith("RankFailedError")


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"rename": "prefix."}, ValueError, "rename is 'prefix.'; pass a pair of prefixes"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes is 0"),
        ({"bucket_bytes": "1 GB"}, ValueError, "bucket_bytes is '1 GB'"),
        *(
            ({"timeout_s": value}, ValueError, "timeout_s is ")
            for value in (0, -1, float("inf"), float("nan"), "1", None)
        ),
    ],
)
def test_options_are_checked(options, kind, match):
    with pytest.raises(kind, match=match):
        gathered({}, **options)


def test_a_rank_that_gives_up_alone_is_met_in_the_next_vote(doomed):
    assert doomed.run(sharded.give_up_alone) == [[0, 1, 2, 3, True]] * 4
