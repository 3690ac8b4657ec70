"""Trainers' calls to SGLang, with the drop-in and stubbed kernels. `clients.py` makes them."""

import importlib.util

import pytest

from tests.engines.clients import (  # noqa: F401 - the tests
    test_a_fault_is_raised_where_the_trainer_sees_it_and_keeps_nobody_waiting,
    test_a_second_policy_before_the_first_is_whole_is_never_mixed_with_it,
    test_after_many_policies_in_a_row_the_last_one_is_there,
    test_every_rank_holds_what_that_of_a_fresh_engine_boots,
    test_no_live_tensor_moves,
    test_no_reply_is_that_of_an_older_call,
    test_the_next_policy_heals_it,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
CASES = {
    "slime": (1, 2),
    "slime in stages": (1,),
    "slime distributed": (2,),
    "miles": (1, 2),
    "miles distributed": (2,),
    "NeMo RL": (1, 2),
    "NeMo RL pairs": (1,),
    "verl": (1,),
}
"""Clients of `clients.py`, and numbers of ranks."""


@pytest.fixture(scope="session")
def fresh(run_engine):
    """What each rank of a fresh engine holds, for every policy, by the number of ranks."""
    booted: dict[int, list] = {}

    def boot(num_ranks):
        if num_ranks not in booted:
            booted[num_ranks] = run_engine("client fresh", num_ranks=num_ranks)
        return booted[num_ranks]

    return boot


@pytest.fixture(
    scope="session",
    params=[(name, ranks) for name, numbers in CASES.items() for ranks in numbers],
    ids=lambda case: f"{case[0]}, ranks {case[1]}",
)
def tried(request, run_engine, fresh):
    name, num_ranks = request.param
    if name == "verl" and importlib.util.find_spec("verl") is None:
        pytest.skip("`nox -s trainers` has verl")
    found = run_engine("client", client=name, num_ranks=num_ranks)
    if "why not" in found:
        pytest.skip(found["why not"])
    return found | {"fresh": fresh(num_ranks)}
