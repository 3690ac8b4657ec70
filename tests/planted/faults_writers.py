"""Faults of who may write a live model, and of what an aborted write leaves."""

from tests.planted.fault import Fault

ONE_WRITER = "tests/driver/test_one_writer.py"
WRITERS = "tests/fuzz/test_writers.py"
ABORTED = "tests/fuzz/test_aborted.py"
TABLES = "tests/fill/kernels/test_table.py"

FAULTS = [
    Fault(
        name="a first attachment that is not atomic",
        path="fp8refit/driver/attach.py",
        before="        lock = _making.setdefault(id(owner), threading.RLock())\n",
        after="        lock = threading.RLock()\n",
        found_by=f"{ONE_WRITER}::test_threads_that_attach_at_once_get_the_same_adapter",
    ),
    Fault(
        name="a lock for each attached object",
        path="fp8refit/driver/attach.py",
        before="        return Turns((self.turn, ranks.rank.target.turn)) if isinstance(ranks, LocalRanks) else self.turn\n",
        after="        return self.turn\n",
        found_by=f"{WRITERS}::test_whoever_comes_in_the_middle_of_a_write_is_refused",
    ),
    Fault(
        name="an order that takes no turn",
        path="fp8refit/remote/rank_orders.py",
        before="None if is_held else EngineBusyError(IN_USE))\n",
        after="None)\n",
        found_by=f"{ONE_WRITER}::test_an_order_during_a_local_refit_is_refused_and_changes_nothing",
    ),
    Fault(
        name="an order that is refused on one rank alone",
        path="fp8refit/remote/rank_orders.py",
        before="            driver_error=held,\n            is_known",
        after="            is_known",
        found_by=f"{ONE_WRITER}::test_all_ranks_refuse_an_order_if_one_of_them_is_being_written",
    ),
    Fault(
        name="a driver that keeps nobody out between its orders",
        path="fp8refit/live/turn.py",
        before="                    self.take(owner, for_s=seconds, after=order)\n",
        after="                    pass\n",
        found_by=f"{ONE_WRITER}::test_a_driver_keeps_others_out_between_its_orders_until_it_is_silent_for_too_long",
    ),
    Fault(
        name="a silent driver that keeps others out for good",
        path="fp8refit/live/turn.py",
        before="(hold.holder is after or time.monotonic() > hold.until_s)",
        after="(hold.holder is after or hold.until_s < 0)",
        found_by=f"{ONE_WRITER}::test_a_turn_that_ran_out_goes_to_whoever_asks_first",
    ),
    Fault(
        name="a host that lets others in",
        path="fp8refit/driver/hosted_engine.py",
        before="            if not is_held:\n                raise EngineBusyError(IN_USE)\n",
        after="",
        found_by=f"{ONE_WRITER}::test_ranks_elsewhere_are_kept_for_a_refit_from_the_process_of_their_host",
    ),
    Fault(
        name="two models in one memory with a writer each",
        path="fp8refit/ranks/target.py",
        before="            if not self.live.memory.isdisjoint(busy.live.memory):\n",
        after="            if self.live is busy.live:\n",
        found_by=f"{ONE_WRITER}::test_a_model_and_a_part_of_it_have_one_writer",
    ),
    Fault(
        name="a displaced write that goes on",
        path="fp8refit/fill/stream_writer.py",
        before="        self._is_released = True\n",
        after="",
        found_by=f"{ONE_WRITER}::test_a_displaced_write_stops_at_its_next_tensor_and_is_never_finished",
    ),
    Fault(
        name="a displaced write that gives up its successor",
        path="fp8refit/ranks/target.py",
        before="        if isinstance(because, EngineBusyError | DisplacedError):\n",
        after="        if isinstance(because, EngineBusyError):\n",
        found_by=f"{ONE_WRITER}::test_a_displaced_write_stops_at_its_next_tensor_and_is_never_finished",
    ),
    Fault(
        name="a write that sleep discarded, committed",
        path="fp8refit/ranks/target.py",
        before="        self.abandon()\n        self._has_lost_values, self.live.has_constants = True, False\n",
        after="        self._has_lost_values, self.live.has_constants = True, False\n",
        found_by=f"{ONE_WRITER}::test_weights_that_sleep_discards_during_a_write_are_never_committed",
    ),
    Fault(
        name="flags of an aborted stream",
        path="fp8refit/fill/program.py",
        before="        for program in self._programs:\n            program.table.forget_flags()\n",
        after="",
        found_by=f"{ABORTED}::test_an_error_at_every_line_of_a_fill",
    ),
    Fault(
        name="layouts that are known without their rows",
        path="fp8refit/fill/direct.py",
        before="        if new and not self._join(new):\n            self.forget()\n        self.expected = came\n",
        after="        self.expected = came\n        if new and not self._join(new):\n            self.forget()\n",
        found_by=f"{ABORTED}::test_an_error_at_every_line_of_a_fill",
    ),
    Fault(
        name="flags of an interrupted launch",
        path="fp8refit/fill/kernels/triton_table.py",
        before="        self._has_run |= bool(launches)\n        with on_device(self._device):\n"
        "            for launch, first_tile, num_tiles in launches:\n"
        "                launch.launch_tiles(self._arrays, shift, first_tile, num_tiles)\n",
        after="        with on_device(self._device):\n"
        "            for launch, first_tile, num_tiles in launches:\n"
        "                launch.launch_tiles(self._arrays, shift, first_tile, num_tiles)\n"
        "        self._has_run |= bool(launches)\n",
        found_by=f"{TABLES}::test_flags_of_a_launch_that_was_interrupted_are_dropped",
    ),
    Fault(
        name="a table that is taken to point where it does not",
        path="fp8refit/fill/kernels/triton_table.py",
        before="        self._pointed_at[first : first + len(addresses)] = _NOWHERE  # until all is done\n",
        after="",
        found_by=f"{TABLES}::test_a_table_that_was_interrupted_while_it_was_pointed_elsewhere_is_pointed_again",
    ),
]
