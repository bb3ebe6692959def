"""Predictions beside a results file: peak memory and step time of each line. Knows nothing of how they are shown."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import PRESETS, GPTConfig, Recompute, describe_recompute, preset
from lit_gpt_dist.planner.calibration import Calibration
from lit_gpt_dist.planner.estimate import Estimate, estimate
from lit_gpt_dist.planner.hardware import GIB, MIB, Link, device_by_name
from lit_gpt_dist.planner.job import Execution, Job, Precision
from lit_gpt_dist.planner.layout import STRATEGIES


@dataclass(frozen=True)
class Comparison:
    """One measured run. A pair is (predicted, measured); None where either side is missing, and ``why`` says what is."""

    tag: str
    mode: str
    size: str
    micro: int
    recompute: str
    recompute_blocks: int | None
    memory_gib: tuple[float, float] | None
    step_ms: tuple[float, float] | None
    why: str = ""

    @property
    def recompute_words(self) -> str:
        return describe_recompute(self.recompute, self.recompute_blocks)


def miss(pair: tuple[float, float] | None) -> float | None:
    """Predicted over measured, minus one."""
    return None if pair is None or not pair[1] else pair[0] / pair[1] - 1


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Objects of a JSON-lines file, and what of it is none, in words.

    Raises:
        UserError: it cannot be read, or nothing in it is an object.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a results.jsonl that `fit` wrote") from error
    lines, skipped = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            found, why = None, f"not JSON ({error})"
        else:
            why = "no object"
        if isinstance(found, dict):
            lines.append(found)
        else:
            skipped.append(f"skipped {path}:{number}: {why}")
    if skipped and not lines:
        raise UserError(
            f"{path} has no line that is a run ({skipped[0].partition(': ')[2]}); give a results.jsonl that `fit` wrote"
        )
    return lines, skipped


KINDS = {name: type(value) for name, value in preset("tiny").to_dict().items()}
SHAPE = ("layers", "heads", "kv_heads", "width", "ff_width", "norm", "positions", "activation", "tied", "bias")


def model_of(line: dict[str, Any]) -> GPTConfig:
    """The shape of a run, checked against ``params``: its preset's, or of a size that is none (custom) all from the line.

    The line's fields come first, then its ``shape``, then options of the recorded command.

    Raises:
        UserError: a shape that the line does not hold, that cannot be built, or that has other parameters.
    """
    size = str(line["size"])
    fields = shape_from_command(str(line.get("command") or ""))
    fields |= {name: value for name, value in (line.get("shape") or {}).items() if name in KINDS}
    fields |= {name: line[name] for name in SHAPE if line.get(name) is not None}
    fields["context"] = line.get("context") or fields.get("context")
    fields["vocab_size"] = line.get("vocab") or fields.get("vocab_size")
    if size not in PRESETS and (missing := [name for name in ("layers", "heads", "width") if name not in fields]):
        raise UserError(f"size {size!r} is no preset, and the line holds no shape ({', '.join(missing)})")
    config = built(size, fields)
    wanted = line.get("params")
    if wanted and config.parameters() != wanted and not line.get("vocab"):
        rest = wanted - config.parameters() + config.vocab_size * config.width * (1 if config.tied else 2)
        rows = rest // (config.width * (1 if config.tied else 2))
        config = built(size, {**fields, "vocab_size": max(1, rows)})
    if wanted and config.parameters() != wanted:
        raise UserError(f"{config.parameters():,} parameters for its shape, but the run says {wanted:,}")
    return config


def built(size: str, fields: dict[str, Any]) -> GPTConfig:
    if size in PRESETS:
        return preset(size, **fields)
    return GPTConfig(**{name: value for name, value in fields.items() if value is not None})


def shape_from_command(command: str) -> dict[str, Any]:
    """`--model.layers 4` and the like, for the fields of a GPTConfig."""
    found: dict[str, Any] = {}
    for name, value in re.findall(r"--model\.(\w+)[= ](\S+)", command):
        if name in KINDS:
            kind = KINDS[name]
            found[name] = value.lower() == "true" if kind is bool else kind(value)
    return found


def job_of(line: dict[str, Any], calibration: Calibration | None, link: Link) -> Job:
    """The job a results line describes. Under a mode this version plans."""
    mode, world = str(line["mode"]), int(line["world"])
    if mode not in STRATEGIES:
        raise UserError(f"mode {mode!r} cannot be planned; {', '.join(STRATEGIES)} can")
    device = device_by_name(str(line.get("device") or "unknown"))
    return Job(
        model_of(line),
        device,
        devices=world,
        link=link,
        global_batch=int(line["global_batch"]),
        micro_batch=int(line["micro"]),
        precision=planned_precision(line),
        autocast=line.get("precision") == "16-mixed",
        recompute=planned_recompute(line),
        recompute_blocks=line.get("recompute_blocks"),
        execution=execution_of(line),
        no_sync=line.get("no_sync") is not False,
        reshard_after_forward=line.get("reshard_after_forward") is not False,
        units="model" if line.get("units") == "model" else "blocks",
        bucket_bytes=float(line.get("bucket_cap_mb") or 0) * MIB or None,
        ddp_overlap=line.get("overlap") is not False,  # older lines say nothing: there was none without
        calibration=calibration,
    )


def execution_of(line: dict[str, Any]) -> Execution:
    """How the run's steps ran, from its fields or else its command; eager where neither says."""
    if line.get("cuda_graph"):
        return "graph"
    asked = re.search(r"--model\.compile[= ](\S+)", str(line.get("command") or ""))
    mode = str(line.get("compile") or (asked and asked[1]) or "none").lower()
    return "eager" if mode in ("none", "false", "auto") else "compiled"


def planned_recompute(line: dict[str, Any]) -> Recompute:
    """
    Raises:
        UserError: what is not one of the kinds that are planned.
    """
    name = str(line.get("recompute") or "none")
    for known in get_args(Recompute):
        if name == known:
            return known
    raise UserError(f"recompute {name} cannot be planned; {', '.join(get_args(Recompute))} can")


def planned_precision(line: dict[str, Any]) -> Precision:
    """Two 16-bit formats need the same bytes; anything else that is not planned is refused."""
    name = str(line.get("precision") or "32-true")
    known: dict[str, Precision] = {
        "32-true": "32-true",
        "bf16-mixed": "bf16-mixed",
        "16-mixed": "bf16-mixed",
        "bf16-true": "bf16-true",
    }
    if name not in known:
        raise UserError(f"precision {name} cannot be planned; {', '.join(known)} can")
    return known[name]


def compare_line(line: dict[str, Any], calibration: Calibration | None, link: Link) -> Comparison:
    fields = {name: line.get(name) for name in ("tag", "mode", "size", "micro", "recompute", "recompute_blocks")}
    head = (
        str(fields["tag"]),
        str(fields["mode"]),
        str(fields["size"]),
        int(fields["micro"] or 0),
        str(fields["recompute"] or "none"),
        fields["recompute_blocks"],
    )
    if (line.get("status") or "ok") != "ok":
        return Comparison(*head, None, None, f"the run ended as {line['status']}")
    try:
        job = job_of(line, calibration, link)
        found = estimate(job, str(line["mode"]))
    except KeyError as error:
        return Comparison(*head, None, None, f"the line has no {error}")
    except (TypeError, ValueError) as error:  # UserError is a ValueError; the others: a field of another kind
        return Comparison(*head, None, None, f"{error}")
    if found.impossible:
        return Comparison(*head, None, None, found.impossible)
    memory = step = None
    if line.get("mem_gib") and found.peak_bytes:
        memory = (found.peak_bytes / GIB, float(line["mem_gib"]))
    if line.get("step_ms") and found.times and found.times.step:
        step = (found.times.step * 1e3, float(line["step_ms"]))
    why = [] if memory else ["memory: the run has no peak of the device (mem_gib), as on a CPU"]
    why += [] if step else [f"step: {why_no_step(line, job, found)}"]
    return Comparison(*head, memory, step, "; ".join(why))


def why_no_step(line: dict[str, Any], job: Job, found: Estimate) -> str:
    """What is missing for a planned step time, or for a measured one."""
    if not line.get("step_ms"):
        return "the run has no time of a step (step_ms)"
    if found.times is None:
        what = f"no rates are known for {job.device.name} in {job.precision}"
        return f"{what}: no calibration matches (`doctor --measure` there makes one) and no peak is listed"
    return f"no link is known between {job.world} ranks; give --link, or --calibration with one measured"
