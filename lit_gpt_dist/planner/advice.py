"""Which strategy to take, in words: the first in the order of cost that fits, and why the others were not taken.

The order is single card → accumulation → recomputation → DDP → ZeRO-1 → ZeRO-2 → FSDP2 → HSDP → tensor parallel inside a
node → pipeline across nodes. Each step costs more communication or more code than the one before.
"""

from dataclasses import dataclass, replace
from typing import get_args

from lit_gpt_dist.model.config import Recompute
from lit_gpt_dist.planner.estimate import Estimate, estimate
from lit_gpt_dist.planner.hardware import GIB
from lit_gpt_dist.planner.job import Job
from lit_gpt_dist.planner.layout import NOT_TRAINABLE, SHARDED, layout
from lit_gpt_dist.planner.limits import largest_dividing_micro_batch
from lit_gpt_dist.planner.running import judge_communication

NAMES = {
    "single": "one card",
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "fsdp2": "FSDP2",
    "hsdp": "HSDP",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
}
WORTH_SAYING = 0.10  # below it the order of cost decides alone: the planner's times are not that sharp
LATENCY_BOUND_SECONDS = 0.010  # shorter micro-batches wait for kernels to start, and how long only a calibration knows
ORDER = ("ddp", "zero1", "zero2", "fsdp2", "hsdp", "tp", "pp")


@dataclass(frozen=True)
class Advice:
    """The recommended job and strategy (None: nothing fits, or memory is unknown) and one line for each step looked at."""

    strategy: str | None
    job: Job
    reason: str
    ruled_out: tuple[str, ...]
    notes: tuple[str, ...]
    faster: "Faster | None" = None

    def command(self, model_options: str) -> str | None:
        """The `fit` command that runs it, where this version can; ``model_options`` as they were given to `plan`."""
        return None if self.strategy is None else fit_command(self.job, self.strategy, model_options)


@dataclass(frozen=True)
class Faster:
    """A strategy that costs more than the one advised and takes clearly less time, by the planner's own figures."""

    strategy: str
    job: Job
    step_seconds: float
    advised_seconds: float

    @property
    def gain(self) -> float:
        """Steps more per second, as a share."""
        return self.advised_seconds / self.step_seconds - 1

    def sentence(self, advised: str, model_options: str) -> str:
        return (
            f"faster by {self.gain:.0%}: {NAMES[self.strategy]} with recompute {self.job.recompute_words}, "
            f"{duration(self.step_seconds)} a step against {duration(self.advised_seconds)} of {NAMES[advised]}: "
            f"{fit_command(self.job, self.strategy, model_options)}"
        )


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def fit_command(job: Job, strategy: str, model_options: str) -> str | None:
    if strategy in NOT_TRAINABLE:
        return None
    options = [
        f"lit-gpt-dist fit {model_options} --data.global_batch {job.global_batch} --data.micro_batch {job.micro_batch}",
        f"--trainer.precision {job.precision} --model.recompute {job.recompute}",
    ]
    options += [f"--model.recompute_blocks {job.recompute_blocks}"] if job.recompute_blocks is not None else []
    if strategy != "single":
        own = [] if job.no_sync else ["--trainer.strategy.no_sync false"]
        own += [f"--trainer.strategy.units {job.units}"] if strategy in SHARDED and job.units != "auto" else []
        options.append(" ".join([f"--trainer.strategy {strategy}", *own, f"--trainer.devices {job.devices}"]))
        options += [f"--trainer.num_nodes {job.nodes}"] if job.nodes > 1 else []
    if job.nodes > 1:  # `fit` starts the processes of one machine only
        launcher = f"torchrun --nnodes {job.nodes} --nproc-per-node {job.devices} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        options[0] = options[0].replace("lit-gpt-dist", f"{launcher} -m lit_gpt_dist", 1)
    return " ".join(options)


def gib(value: float | None) -> str:
    return "unknown" if value is None else f"{value / GIB:.1f} GiB"


def advise(job: Job) -> Advice:
    if job.usable_bytes is None:
        reason = f"the memory of {job.device.name} is not known, so nothing can be said to fit; give --memory_gib"
        return Advice(None, job, reason, (), ())
    one_card, ruled_out = smallest_change_for_one_card(job)
    if one_card is not None and job.world == 1:
        return Advice("single", one_card, one_card_reason(job, one_card), tuple(ruled_out), notes(one_card, "single"))
    for strategy in order(job) if job.world > 1 else ():
        chosen, why_not = consider(job, strategy)
        if chosen is not None:
            reason, faster = chosen_reason(job, chosen, strategy), faster_than(job, chosen, strategy)
            return Advice(strategy, chosen, reason, tuple(ruled_out), notes(chosen, strategy), faster)
        ruled_out.append(f"{NAMES[strategy]}: {why_not}")
    if one_card is not None:
        return Advice("single", one_card, one_card_reason(job, one_card), tuple(ruled_out), notes(one_card, "single"))
    return Advice(None, job, "no strategy fits on these cards; take more cards, cards with more memory, or a smaller model",
                  tuple(ruled_out), ())  # fmt: skip


def faster_than(job: Job, chosen: Job, strategy: str) -> Faster | None:
    """The fastest of the trainable strategies later in the order of cost, if by more than ``WORTH_SAYING``."""
    current = estimate(chosen, strategy)
    advised = step_seconds(current)
    if advised is None or (not job.rates and advised / current.accumulate < LATENCY_BOUND_SECONDS):
        return None
    found = []
    in_turn = order(job)
    for later in in_turn[in_turn.index(strategy) + 1 :]:
        candidate, _ = consider(job, later)
        seconds = step_seconds(estimate(candidate, later)) if candidate else None
        if candidate and seconds:
            found.append(Faster(later, candidate, seconds, advised))
    best = max(found, key=lambda one: one.gain, default=None)
    return best if best and best.gain > WORTH_SAYING else None


def order(job: Job) -> tuple[str, ...]:
    """Strategies by cost; first FSDP2 where ``fit`` takes it by itself (``trainer.py``), since it is faster there."""
    if not prefers_fsdp2(job):
        return ORDER
    return ("fsdp2", *(strategy for strategy in ORDER if strategy != "fsdp2"))


def prefers_fsdp2(job: Job) -> bool:
    return job.nodes == 1 and job.precision == "bf16-mixed" and not job.autocast and job.link.is_fast


def step_seconds(found: Estimate) -> float | None:
    return found.times.step if found.times else None


def fitting(job: Job, strategy: str) -> tuple[Job, Estimate] | None:
    """The job as given, then with a smaller micro-batch, then both with more recomputation: the first that fits.

    Sharded gradients stay whole while they accumulate, so FSDP2 and HSDP last try a reduction after every micro-batch.
    """
    plan = layout(job, strategy)
    if plan.impossible:
        return None
    reductions = (job.no_sync, False) if strategy in SHARDED else (job.no_sync,)
    for no_sync, more in ((n, m) for n in reductions for m in with_more_recomputation(job)):
        asked = replace(more, no_sync=no_sync)
        smaller = asked.with_micro_batch(largest_dividing_micro_batch(asked, plan) or job.micro_batch)
        for candidate in (asked, smaller):
            found = estimate(candidate, strategy)
            if found.fits and not found.impossible:
                return candidate, found
    return None


def with_more_recomputation(job: Job) -> list[Job]:
    """The job as given, then in all blocks where it was asked for in some, then by each kind that keeps less."""
    kinds: tuple[Recompute, ...] = get_args(Recompute)
    stronger = kinds[kinds.index(job.recompute) + (job.recompute_blocks is None) :]
    return [job, *(replace(job, recompute=kind, recompute_blocks=None) for kind in stronger)]


def smallest_change_for_one_card(job: Job) -> tuple[Job | None, list[str]]:
    """What one card would need, and a line for each change that did not suffice."""
    alone = replace(job, devices=1, nodes=1)
    found = fitting(alone, "single")
    as_asked = estimate(alone, "single")
    lines = []
    if as_asked.impossible:
        lines.append(f"one card: {as_asked.impossible}")
    elif not as_asked.fits:
        lines.append(f"one card as asked: {gib(as_asked.peak_bytes)} of {gib(job.usable_bytes)} usable")
    if found is None:
        smallest = estimate(replace(alone, micro_batch=1, recompute="full", recompute_blocks=None), "single")
        lines.append(f"accumulation and recomputation: one window at a time still needs {gib(smallest.peak_bytes)}")
    elif found[0].recompute_words != job.recompute_words:
        lines.append("accumulation alone: no micro-batch fits without more recomputation")
    if found is not None and job.world > 1:
        lines.append(f"one card: fits, but leaves {job.world - 1} of {job.world} cards idle")
    return (found[0] if found else None), lines


def one_card_reason(job: Job, chosen: Job) -> str:
    if chosen.recompute_words != job.recompute_words:
        cost = "about 30% more time" if chosen.recompute == "full" else "no product twice"
        kind = chosen.recompute if job.recompute_blocks is None else f"{chosen.recompute} in all blocks"
        return f"one card holds it with recompute {kind} ({cost}) and micro-batches of {chosen.micro_batch}"
    if chosen.micro_batch != job.micro_batch:
        return f"one card holds it with accumulation over micro-batches of {chosen.micro_batch}, which costs next to nothing"
    return "one card holds it: nothing to send, nothing to recompute"


def consider(job: Job, strategy: str) -> tuple[Job | None, str]:
    """The job that this strategy should run, or why it should not."""
    plan = layout(job, strategy)
    if plan.impossible:
        return None, plan.impossible
    if strategy == "tp" and job.link.kind != "nvlink":
        why = "4 all-reduces a layer cannot hide behind compute"
        return None, f"not advised over {job.link.name}: {why}; it wants NVLink inside a node"
    found = fitting(job, strategy)
    if found is None:
        return None, why_too_large(job, strategy)
    if strategy in NOT_TRAINABLE:
        return None, "would fit, but `fit` of this version does not run it"
    return found[0], ""


def why_too_large(job: Job, strategy: str) -> str:
    asked = estimate(job, strategy)
    least = estimate(
        replace(
            job, micro_batch=1, recompute="full", recompute_blocks=None, no_sync=job.no_sync and strategy not in SHARDED
        ),
        strategy,
    )
    if least.impossible:
        return least.impossible
    as_asked = "" if asked.impossible else f"{gib(asked.peak_bytes)} as asked, "
    return f"needs {as_asked}{gib(least.peak_bytes)} recomputing one window at a time; {gib(job.usable_bytes)} usable"


def chosen_reason(job: Job, chosen: Job, strategy: str) -> str:
    found = estimate(chosen, strategy)
    why = "the cheapest that fits"
    if strategy == "fsdp2" and prefers_fsdp2(job):
        why = "what `fit` takes by itself over NVLink, where it was the fastest at every size measured on two cards"
    reason = f"{NAMES[strategy]} is {why}: {gib(found.peak_bytes)} of {gib(chosen.usable_bytes)} usable"
    if chosen.recompute != "none":
        reason += f", with recompute {chosen.recompute_words}"
    if chosen.micro_batch != job.micro_batch:
        reason += f", in micro-batches of {chosen.micro_batch}"
    if job.no_sync and not chosen.no_sync:
        reason += ", reducing after every micro-batch, since accumulating with one reduction keeps whole gradients"
    if found.times and found.times.step and found.times.exposed is not None:
        share = found.times.exposed / found.times.step
        reason += f"; exposed communication {share:.0%} of a step, {judge_communication(share)}"
    return reason


def notes(job: Job, strategy: str) -> tuple[str, ...]:
    """What else is worth knowing about the choice."""
    found, lines = estimate(job, strategy), []
    times = found.times
    if times and times.step and times.exposed is not None and times.exposed / times.step > 0.2:
        lines.append("a larger global batch at the same micro-batch accumulates more per reduction and hides more")
    if found.accumulate > 1 and not job.no_sync:
        enough = "where one is enough" if strategy == "ddp" else "where one is enough if whole gradients fit"
        lines.append(f"no_sync is off: {found.accumulate} reductions a step {enough}")
    if job.link.kind == "unknown" and job.world > 1:
        lines.append("no link was given, so communication has no time; give --link")
    if strategy == "fsdp2" and found.accumulate > 1 and job.no_sync:
        whole = 4 * job.model.parameters()
        lines.append(f"accumulating with one reduction keeps whole gradients on each card: {gib(whole)}")
    return tuple(lines)
