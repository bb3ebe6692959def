"""A verdict in words on traced ranks, with the next thing to try. Pure; the bands are those of the project's fact sheet."""

from collections.abc import Sequence

from lit_gpt_dist.trace.overlap import SCATTERS, RankReport

GOOD, ACCEPTABLE = 0.20, 0.40  # communication share of a step: under good, acceptable, over: the bottleneck
WORTH_NAMING = 0.05  # a share of the step from which it is worth a line
NO_OVERLAP = 0.10  # less than this share of communication hidden: there is no overlap
IDLE = 0.20
SKEW = 0.5  # of communication


def verdict(found: Sequence[RankReport]) -> list[str]:
    """Lines: first what communication costs, then what to try, then other gaps."""
    worst = max(found, key=lambda report: report.share(report.exposed))
    lines = [communication_line(worst, len(found))]
    lines += communication_remedies(worst)
    gaps = max(found, key=lambda report: report.share(report.data_gap))
    if gaps.share(gaps.data_gap) >= WORTH_NAMING:
        lines.append(
            f"data: rank {gaps.rank} has nothing to do for {gaps.share(gaps.data_gap):.0%} of the step while its batch is "
            "fetched; try --data.on_device true, or more --data.workers"
        )
    idle = max(found, key=lambda report: report.share(report.idle - report.data_gap))
    if idle.share(idle.idle - idle.data_gap) >= IDLE:
        lines.append(
            f"gaps: rank {idle.rank} is idle for {idle.share(idle.idle - idle.data_gap):.0%} of the step outside data; the host "
            "does not keep up: try a larger --data.micro_batch"
        )
    return lines


def communication_line(report: RankReport, ranks: int) -> str:
    if not report.communication:
        return "communication: none in this trace" + ("; one rank has nobody to talk to" if ranks == 1 else "")
    share = report.share(report.exposed)
    band = "good" if share < GOOD else "acceptable" if share <= ACCEPTABLE else "the bottleneck"
    return (
        f"communication: {share:.0%} of the step is exposed on rank {report.rank} ({band}: under {GOOD:.0%} is good, over "
        f"{ACCEPTABLE:.0%} the bottleneck); {report.hidden_share:.0%} of it hides behind compute"
    )


def communication_remedies(report: RankReport) -> list[str]:
    if report.share(report.communication) < WORTH_NAMING:
        return []
    lines = []
    if report.waited > SKEW * report.communication:
        lines.append(
            f"waiting: {report.waited / report.communication:.0%} of rank {report.rank}'s communication is waiting for a rank "
            "that comes later; find out why that one is slow before anything else"
        )
    sharded = "all-gather" in report.kinds and any(kind in report.kinds for kind in SCATTERS)
    if report.hidden_share < NO_OVERLAP:
        lines.append(no_overlap_line(report, sharded))
    elif report.share(report.exposed) >= GOOD:
        lines.append(
            "try more work between two reductions: a larger --data.global_batch at the same --data.micro_batch (accumulation), "
            + ("or --trainer.strategy ddp if the model fits" if sharded else "or another bucket_cap_mb of the strategy")
        )
    return lines


def no_overlap_line(report: RankReport, sharded: bool) -> str:
    if sharded:
        return (
            "no overlap: gathers and reductions do not run beside compute; the blocks may be too small to hide anything: try "
            "a larger --data.micro_batch, or --trainer.strategy ddp if the model fits"
        )
    if report.buckets <= 1.5:
        return (
            "no overlap: the gradients go out in one piece, after backward has ended (ddp's way on two GPUs joined by NVLink); "
            "elsewhere try --trainer.strategy.overlap true or a smaller bucket_cap_mb, so that the first buckets leave while "
            "backward goes on"
        )
    return (
        f"no overlap although there are {report.buckets:.0f} buckets: something makes compute wait for each reduction (a stream "
        "synchronised, a reduction after backward, as ddp's of a large model without --trainer.strategy.overlap true); look at the "
        "picture for where it begins"
    )
