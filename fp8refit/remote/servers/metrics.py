"""Counts a server's refits in Prometheus' format, beside the engine's own metrics at `/metrics`."""

from collections.abc import Callable
from functools import cache, partial


@cache
def exported() -> Callable[..., None]:
    """Register the metrics, and return what notes `failure`, a kind, or new values of `version`, `is_dirty` and `seconds`.

    It does nothing if `prometheus_client` is missing. That reads its settings when it is imported, so the engine comes first.
    """
    try:
        from prometheus_client import Counter, Gauge
    except ImportError:
        return lambda **_: None
    gauge = partial(Gauge, multiprocess_mode="mostrecent")
    refits = Counter("fp8refit_refits", "Policies that were taken.")
    failures = Counter("fp8refit_failures", "Orders of refits that failed, by the kind of error.", ["kind"])
    gauges = {
        "version": gauge("fp8refit_version", "Version of the policy that was taken last."),
        "is_dirty": gauge("fp8refit_is_dirty", "1 while requests are refused until the next good refit."),
        "seconds": gauge("fp8refit_last_refit_seconds", "Seconds for which the last refit held requests up."),
    }

    def note(*, failure: str | None = None, **values: float) -> None:
        if failure is not None:
            failures.labels(kind=failure).inc()
        refits.inc("version" in values)
        for name, value in values.items():
            gauges[name].set(value)

    return note
