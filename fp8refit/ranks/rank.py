"""One rank in the group of its engine's ranks: a `Target` whose steps all ranks agree on.

Prepare, vote, write, vote, commit. If a step fails on one rank, it fails on every rank with the same error, so that no
rank continues alone: not into a write, a new policy, or a collective operation of the trainer. No message is exchanged
between the last vote and the commit, so losing a driver cannot leave ranks undecided.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fp8refit.config import Job, RefitConfig
from fp8refit.errors import EngineDirtyError, TransportError, UnsupportedEngineError
from fp8refit.fill.fills import Prepared
from fp8refit.ranks.agreement import Agreement
from fp8refit.ranks.scaling import set_kv_scales
from fp8refit.ranks.target import Target
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.sources.source import Source
from fp8refit.transport.error_capture import ErrorCapture
from fp8refit.transport.vote import Group, SoloGroup


class Rank:
    """A `Target` in its group. Every rank of the group makes the same calls in the same order.

    Args:
        target: Writes this rank's model.
        group: All ranks of the engine; None if this is the only one.
    """

    def __init__(self, target: Target, group: Group | None = None) -> None:
        self.target = target
        self.group = group if group is not None else SoloGroup()
        self.witness = ""
        """Digest of values that this rank received, if recorded: equal on all ranks if they were given the same
        policy."""
        self._agreement = Agreement(target, self.group)

    def prepare(
        self,
        make_source: Callable[[], Source],
        job: Job,
        *,
        driver_error: BaseException | None = None,
        is_known: bool = False,
        on_judged: Callable[[], None] = lambda: None,
    ) -> Prepared:
        """Agree that every rank can be refitted, then check the source and agree again.

        The source is not touched before every rank is ready, because reading it may be a collective operation of the
        trainer. If every rank knows the source's layout from the last refit, one vote covers both.

        Args:
            make_source: Makes the policy's source, the same on every rank.
            job: What is done with it. KV scales that the source sends are not set again.
            driver_error: Why the engine's driver objects, if it does.
            is_known: Whether every rank knows the source from the last refit, so that checking it is not a collective
                operation.
            on_judged: Called when this rank accepts the source, before the others are known to. If it raises, no rank
                proceeds.

        Returns:
            What to pass to `write`, or to `Target.begin` and `finish`.

        Raises:
            RefitError: See `Target.prepare`; or `driver_error`; or another rank's error.
            TransportError: The source is no longer known, because an engine rank replaced tensors.
        """
        agreement = self._agreement
        if not is_known:
            agreement.learn_names(agreement.on_ready(job, driver_error), job.config)

        def judge() -> tuple[Prepared, dict[str, Any]]:
            if is_known:
                agreement.check_ready(job, driver_error)
            source, foreign = make_source(), agreement.names.foreign
            prepared = self.target.prepare(source, job.config, is_ready=True, foreign=foreign, compares=job.compares)
            on_judged()
            files = source.files if isinstance(source, SafetensorsSource) else None
            claim = prepared.plan.source_digest if prepared.plan is not None else ""
            return replace(prepared, kv=job.kv), {"claim": claim, "files": files}

        error, judged = agreement.attempt(judge)
        said = judged[1] if judged is not None else {}
        ballots = agreement.vote("prepared", error, job.config, **(agreement.wanted(job) if is_known else {}), **said)
        assert judged is not None, "every rank is ready"
        if is_known and not agreement.names.are_known(ballots):
            self.target.abandon()
            raise TransportError("the ranks of this engine hold different tensors than at the last refit; refit again")
        return judged[0]

    def holds(self, tensors: Mapping[str, Tensor], config: RefitConfig) -> bool:
        """Whether every rank holds what a refit would write from some tensors. See `Target.holds`.

        Raises:
            RefitError: The weights are not mapped, or another rank is at another step.
        """
        agreement = self._agreement
        error, is_held = agreement.attempt(lambda: self.target.holds(tensors, foreign=agreement.names.foreign))
        ballots = agreement.vote("held", error, config, claim=str(is_held))
        return all(ballot.claim == str(True) for ballot in ballots)

    def check_untouched(self, config: RefitConfig, why: str) -> None:
        """Agree that nobody else has written the weights since the last commit; otherwise every rank is dirty.

        Raises:
            UnsupportedEngineError: Somebody has, with `why`.
        """

        def check() -> None:
            if self.target.was_written():
                raise UnsupportedEngineError(why)

        try:
            error, _ = self._agreement.attempt(check)
            self._agreement.vote("untouched", error, config)
        except UnsupportedEngineError:
            self.target.distrust()
            raise

    def check_calibration(self, job: Job, *, driver_error: BaseException | None = None) -> None:
        """Agree that every rank can set KV scales. Changes nothing.

        Args:
            job: What to measure, or which scales to set.
            driver_error: Why the engine's driver objects, if it does.

        Raises:
            EngineDirtyError: No whole policy is served.
            RefitError: See `KvScales.check`; or `driver_error`; or another rank's error.
        """
        if driver_error is None and self.target.is_dirty:
            driver_error = EngineDirtyError("this engine's weights are incomplete; refit it before calibrating")
        self._agreement.on_ready(job, driver_error)

    def calibrate(self, job: Job, *, driver_error: BaseException | None = None) -> KvReport:
        """Set KV scales for the served policy.

        Args:
            job: What to measure, or which scales to set.
            driver_error: Why nothing may be written, such as caches that could not be dropped.

        Raises:
            RefitError: See `check_calibration`, `LiveModel.measure_kv` and `Target.write_kv`.
        """
        self.check_calibration(job, driver_error=driver_error)
        assert job.kv is not None, "a calibration has an order"
        reports = set_kv_scales(self._agreement, job.kv, job.config)
        self.target.commit(self.target.version)
        return KvReport.merge(reports)

    def agree(self, prepared: Prepared, *, driver_error: BaseException | None = None) -> None:
        """Agree to write what was prepared. For ranks with a driver each, any of which may object.

        Args:
            prepared: The result of `prepare`.
            driver_error: Why the engine's driver cannot continue, such as caches that could not be dropped.

        Raises:
            RefitError: `driver_error`, or another rank's. Nothing was written.
        """
        self._agreement.vote("go", driver_error, prepared.config)

    def write(self, prepared: Prepared) -> list[RankReport]:
        """Write what was prepared, agree that it is whole on every rank, and commit it.

        Returns:
            Each rank's report, in rank order.

        Raises:
            RefitError: See `Target.write`; or another rank's error. Every rank is dirty.
        """
        drain = self.group.size > 1
        return self._agree_on_written(lambda: self.target.write(prepared, drain=drain), prepared)

    def finish(
        self,
        prepared: Prepared,
        *,
        version: int = 0,
        error: BaseException | None = None,
        confirm: Callable[[BaseException | None], None] | None = None,
    ) -> list[RankReport]:
        """Complete a write whose source was pushed, agree that it is whole, and commit it. See `write`.

        Args:
            prepared: What was passed to `Target.begin`.
            version: Lowest version of the new policy.
            error: This rank's error so far, if any.
            confirm: Called after the last vote, on every rank, with its error if any. Raises if another engine in the
                same refit failed.
        """

        def complete() -> RankReport:
            if error is not None:
                raise error
            return self.target.finish()

        return self._agree_on_written(complete, prepared, version=version, confirm=confirm)

    def _agree_on_written(
        self,
        write: Callable[[], RankReport],
        prepared: Prepared,
        *,
        version: int = 0,
        confirm: Callable[[BaseException | None], None] | None = None,
    ) -> list[RankReport]:
        reports: list[RankReport] = []
        with ErrorCapture() as failed:
            reports, next_version = self._settle(write, prepared)
        if confirm is not None:
            with ErrorCapture() as refused:
                confirm(failed.error)
            failed.error = failed.error if failed.error is not None else refused.error
        if failed.error is not None:
            self.target.abandon(failed.error)
            raise failed.take()
        if prepared.writes:
            self.target.commit(max(next_version, version))
        return reports

    def _settle(self, write: Callable[[], RankReport], prepared: Prepared) -> tuple[list[RankReport], int]:
        """Do everything before the commit; returns each rank's report, in rank order, and the policy's version."""
        (error, report), order, config = self._agreement.attempt(write), prepared.kv, prepared.config
        claim = report.source_digest + self.witness if report is not None else ""
        ballots = self._agreement.vote("written", error, config, claim=claim, report=report)
        kv = set_kv_scales(self._agreement, order, config) if order is not None else None
        reports = [ballot.report for ballot in ballots if ballot.report is not None]
        version = max(ballot.version for ballot in ballots) + 1
        return [
            report.model_copy(update={"rank": rank, "kv": _both(report.kv, kv[rank]) if kv is not None else report.kv})
            for rank, report in enumerate(reports)
        ], version


def _both(brought: KvReport | None, ordered: KvReport) -> KvReport:
    """Combine the scales sent with the weights and the ordered ones written after them."""
    return ordered.model_copy(update={"scales": {**(brought.scales if brought is not None else {}), **ordered.scales}})
