"""What a rank's flag tells its engine's scheduler."""

from fp8refit.transport.shared_flag import SharedFlag


def test_a_flag_says_why_it_is_raised():
    raised = SharedFlag.make()
    seen = SharedFlag.find(raised.segment)
    assert (seen.reason, raised.is_read) == ("", 1)
    for reason in ("a policy is arriving", "it failed", "zu früh", ""):
        raised.reason, raised.is_raised = reason, True
        assert (seen.reason, seen.is_raised) == (reason, 1)


def test_a_long_reason_is_cut_between_characters():
    raised = SharedFlag.make()
    for start in ("", "x"):
        raised.reason = start + "ü" * 2000
        assert raised.reason == start + "ü" * 511
