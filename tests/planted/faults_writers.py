"""Faults of who may write a live model, and of what an aborted write leaves."""

from tests.planted.fault import Fault

ONE_WRITER = "tests/driver/test_one_writer.py"
WRITERS = "tests/fuzz/test_writers.py"
ABORTED = "tests/fuzz/test_aborted.py"
TABLES = "tests/kernels/test_table.py"

FAULTS = [
    Fault(
        name="a first attachment that is not atomic",
        at="fp8refit/driver/attach.py::made_once",
        before="_making.setdefault(id(owner), threading.RLock())",
        after="threading.RLock()",
        found_by=f"{ONE_WRITER}::test_threads_that_attach_at_once_get_the_same_adapter",
    ),
    Fault(
        name="a lock for each attached object",
        at="fp8refit/driver/attach.py::AttachedEngine.turns",
        before="Turns((self.turn, ranks.rank.target.turn)) if isinstance(ranks, LocalRanks) else self.turn",
        after="self.turn",
        found_by=f"{WRITERS}::test_whoever_comes_in_the_middle_of_a_write_is_refused",
    ),
    Fault(
        name="an order that takes no turn",
        at="fp8refit/remote/rank_orders.py::RankOrders.execute",
        before="None if is_held else EngineBusyError(IN_USE)",
        found_by=f"{ONE_WRITER}::test_an_order_during_a_local_refit_is_refused_and_changes_nothing",
    ),
    Fault(
        name="an order that is refused on one rank alone",
        at="fp8refit/remote/rank_orders.py::RankOrders._prepare",
        before=(
            "self.rank.prepare(lambda: self._make_source(order), order.job, driver_error=held, "
            "is_known=order.is_known, on_judged=receive)"
        ),
        after=(
            "self.rank.prepare(lambda: self._make_source(order), order.job, is_known=order.is_known, on_judged=receive)"
        ),
        found_by=f"{ONE_WRITER}::test_all_ranks_refuse_an_order_if_one_of_them_is_being_written",
    ),
    Fault(
        name="a driver that keeps nobody out between its orders",
        at="fp8refit/live/turn.py::Turn.during",
        before="self.take(owner, for_s=seconds, after=order)",
        found_by=f"{ONE_WRITER}::test_a_driver_keeps_others_out_between_its_orders_until_it_is_silent_for_too_long",
    ),
    Fault(
        name="a silent driver that keeps others out for good",
        at="fp8refit/live/turn.py::Turn.take",
        before="time.monotonic() > hold.until_s",
        after="hold.until_s < 0",
        found_by=f"{ONE_WRITER}::test_a_turn_that_ran_out_goes_to_whoever_asks_first",
    ),
    Fault(
        name="a host that lets others in",
        at="fp8refit/driver/hosted_engine.py::_HostControls._in_turn",
        before="if not is_held:\n    raise EngineBusyError(IN_USE)",
        found_by=f"{ONE_WRITER}::test_ranks_elsewhere_are_kept_for_a_refit_from_the_process_of_their_host",
    ),
    Fault(
        name="two models in one memory with a writer each",
        at="fp8refit/ranks/target.py::Target.check_ready",
        before="not self.live.memory.isdisjoint(busy.live.memory)",
        after="self.live is busy.live",
        found_by=f"{ONE_WRITER}::test_a_model_and_a_part_of_it_have_one_writer",
    ),
    Fault(
        name="a displaced write that goes on",
        at="fp8refit/fill/stream_writer.py::StreamWriter.release",
        before="self._is_released = True",
        found_by=f"{ONE_WRITER}::test_a_displaced_write_stops_at_its_next_tensor_and_is_never_finished",
    ),
    Fault(
        name="a displaced write that gives up its successor",
        at="fp8refit/ranks/target.py::Target.abandon",
        before="EngineBusyError | DisplacedError",
        after="EngineBusyError",
        found_by=f"{ONE_WRITER}::test_a_displaced_write_stops_at_its_next_tensor_and_is_never_finished",
    ),
    Fault(
        name="a write that sleep discarded, committed",
        at="fp8refit/ranks/target.py::Target.forget_values",
        before="self.abandon()",
        found_by=f"{ONE_WRITER}::test_weights_that_sleep_discards_during_a_write_are_never_committed",
    ),
    Fault(
        name="flags of an aborted stream",
        at="fp8refit/fill/program.py::Launched.forget",
        before="for program in self._programs:\n    program.table.forget_flags()",
        found_by=f"{ABORTED}::test_an_error_at_every_line_of_a_fill",
    ),
    Fault(
        name="layouts that are known without their rows",
        at="fp8refit/fill/direct.py::DirectFill.end",
        before="if new and not self._join(new):\n    self.forget()\nself.expected = came",
        after="self.expected = came\nif new and not self._join(new):\n    self.forget()",
        found_by=f"{ABORTED}::test_an_error_at_every_line_of_a_fill",
    ),
    Fault(
        name="flags of an interrupted launch",
        at="fp8refit/kernels/triton_table.py::TritonTable.run",
        before="self._has_run |= bool(launches)\nwith on_device(self._device):\n    ...",
        after="with on_device(self._device):\n    ...\nself._has_run |= bool(launches)",
        found_by=f"{TABLES}::test_flags_of_a_launch_that_was_interrupted_are_dropped",
    ),
    Fault(
        name="a table that is taken to point where it does not",
        at="fp8refit/kernels/triton_table.py::TritonTable._point",
        before="self._pointed_at[first : first + len(addresses)] = _NOWHERE",
        found_by=f"{TABLES}::test_a_table_that_was_interrupted_while_it_was_pointed_elsewhere_is_pointed_again",
    ),
]
