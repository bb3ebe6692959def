"""What a run says when it starts and when it ends. Rank 0's terminal only."""

import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_gpt_dist.arguments import typed
from lit_gpt_dist.callbacks.device import device_name
from lit_gpt_dist.callbacks.recorder import find_recorder
from lit_gpt_dist.callbacks.results import ResultsWriter
from lit_gpt_dist.model.config import describe_recompute


def start_lines(trainer: Any, module: Any) -> list[str]:
    """Everything that decides the loss curve and the speed, before the first step."""
    config, plan, strategy = module.config, trainer.datamodule.plan, trainer.strategy
    shape = f"{config.layers} layers, {config.heads} heads, width {config.width}, context {config.context}"
    tokens, context = trainer.datamodule.tokens_per_step, trainer.datamodule.context
    ranks = f"{plan.ranks} rank" + ("s" if plan.ranks > 1 else "")
    recomputed = describe_recompute(module.recompute, module.recompute_blocks, config.layers)
    lines = [
        f"model    {module.size}: {count(config.parameters())} parameters ({shape}, vocabulary {config.vocab_size})",
        f"data     {trainer.datamodule.describe_corpus()}",
        f"batch    global {plan.global_batch} = micro {plan.micro_batch} × accumulate {plan.accumulate} × {ranks}; "
        f"{tokens:,} tokens per step" + (f" (windows of {context})" if context != config.context else ""),
        f"machine  {trainer.world_size} × {device_name(module.device)}, {strategy.name}, {trainer.precision}"
        + (f", recompute {recomputed}" if recomputed != "none" else "")
        + (", the model gathered at once" if getattr(strategy, "units", None) == "model" else "")
        + (f", compiled {module.compiled}" if module.compiled != "none" else "")
        + (", steps in a CUDA graph" if module.graph_wanted else ""),
        f"run      {trainer.run_dir}: {trainer.max_steps - trainer.global_step:,} steps"
        + (
            f" from step {trainer.global_step:,} of {module.continued_run or 'an earlier run'}"
            if trainer.global_step
            else ""
        ),
    ]
    return lines


def count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def end_table(trainer: Any) -> Table:
    """Loss, speed and memory of the run, as its results line has them."""
    line = next(callback.line for callback in trainer.callbacks if isinstance(callback, ResultsWriter))
    recorder = find_recorder(trainer)
    assert line is not None
    assert recorder is not None
    table = Table.grid(padding=(0, 3))
    if recorder.losses:
        table.add_row("loss", f"{recorder.losses[-1]:.4f} after {trainer.global_step:,} steps")
    if line["val_loss"] is not None:
        table.add_row("validation", f"{line['val_loss']:.4f} nats per token")
    if line["tok_s"]:
        mfu = f", {line['mfu']:.1%} MFU (PaLM count)" if line["mfu"] else ""
        table.add_row("speed", f"{line['tok_s']:,.0f} tokens/s, {line['step_ms']:.2f} ms a step{mfu}")
    if first := line["start_s"].get("first_step"):
        compiling = line["paused_s"].get("compile", 0.0)
        of_it = f", {compiling:.1f} s of the run compiling" if compiling >= 0.1 else ""
        table.add_row("start", f"{first:.1f} s from the command to the end of the first step{of_it}")
    if line["mem_gib"]:
        table.add_row("memory", f"{line['mem_gib']:.2f} GiB on a device at most")
    else:
        table.add_row("memory", f"{line['host_gib']:.2f} GiB in a process at most")
    return table


def finish(trainer: Any, options: Any) -> None:
    """After ``fit`` on rank 0: the table, the weights as one file, a sample, and what to type next."""
    if not trainer.is_global_zero:
        return
    console = Console(highlight=False, quiet=options.quiet)
    if not any(callback.line for callback in trainer.callbacks if isinstance(callback, ResultsWriter)):
        if trainer.global_step >= trainer.max_steps:
            text = (
                f"nothing to do: the checkpoint is at step {trainer.global_step:,}, "
                f"and --trainer.max_steps {trainer.max_steps:,} is reached"
            )
            console.print(text, soft_wrap=True)
        return
    console.print(end_table(trainer))
    if trainer.fast_dev_run:
        console.print("fast_dev_run: nothing was written")
        return
    root = Path(trainer.default_root_dir)
    weights = export_weights(trainer) if options.export else None
    if weights is not None and options.sample_tokens and not options.quiet:
        show_sample(console, weights, options, trainer.strategy.root_device)
    console.print(f"\nresults      {root / 'results.jsonl'} (one line a run)", soft_wrap=True)
    if weights is not None:
        console.print(f"weights      {weights}", soft_wrap=True)
    console.print("next         what to type:", soft_wrap=True)
    for command in next_commands(trainer, weights):
        console.print(f"  {command}", soft_wrap=True)


def say_loss(trainer: Any) -> None:
    """After ``validate`` and ``test``: the one figure that was asked for, as it can be read by a script too."""
    if trainer.is_global_zero:
        loss, perplexity = (float(trainer.callback_metrics[f"val/{name}"]) for name in ("loss", "perplexity"))
        weights = trainer.strategy.loaded_from or trainer.lightning_module.init_from
        windows, data = trainer.val_dataloaders or trainer.test_dataloaders, trainer.datamodule
        corpus = data.val_corpus_path or data.corpus.name
        seen = f" ({windows.windows:,} windows)" if hasattr(windows, "windows") else ""
        print(f"loss {loss:.4f} nats per token, perplexity {perplexity:.3f}: {weights} on {corpus}{seen}")


def next_commands(trainer: Any, weights: Path | None) -> list[str]:
    """Commands that work as they stand, from the same folder."""
    commands = [
        f"{typed('tensorboard')} --logdir {shlex.quote(str(trainer.default_root_dir))}   # Custom Scalars is the dashboard"
    ]
    if weights is not None:
        commands.insert(0, f"{typed('lit-gpt-dist')} generate {shlex.quote(str(weights))}")
    saved = last_checkpoint(trainer)
    if saved is not None and trainer.global_step >= trainer.max_steps:  # else how to go on was said already
        # named, not `last`: another run may save under the same root; the schedule stays as it was
        schedule = trainer.lightning_module.schedule_steps
        commands.append(
            f"{typed('lit-gpt-dist')} fit --config {shlex.quote(str(trainer.run_dir / 'config.yaml'))} --ckpt_path {shlex.quote(str(saved))} "
            f"--trainer.max_steps {2 * trainer.max_steps} --optim.schedule_steps {schedule}"
        )
    return commands


def last_checkpoint(trainer: Any) -> Path | None:
    """The checkpoint that this run committed last; on rank 0."""
    from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback

    return next((c.last_path for c in trainer.callbacks if isinstance(c, CheckpointCallback)), None)


def export_weights(trainer: Any) -> Path | None:
    """One safetensors file in the run's folder, from the checkpoint that ``fit`` has just committed."""
    from lit_gpt_dist.checkpoint.export import export_checkpoint
    from lit_gpt_dist.checkpoint.sources import RUN_WEIGHTS_FILE

    saved = last_checkpoint(trainer)
    if saved is None:
        return None
    target = trainer.run_dir / RUN_WEIGHTS_FILE
    export_checkpoint(saved, target, overwrite=True)  # the folder is the run's own, also after a restart
    return target


def show_sample(console: Console, weights: Path, options: Any, device: Any) -> None:
    from lit_gpt_dist.errors import UserError
    from lit_gpt_dist.generate import load_for_generation, stream_text

    model, vocabulary = load_for_generation(str(weights), device)
    console.rule("a sample", align="left")
    try:
        for piece in stream_text(model, vocabulary, options.sample_prompt, options.sample_tokens):
            sys.stdout.write(piece)
    except UserError as mistake:  # a prompt outside the vocabulary must not spoil a finished run
        console.print(f"no sample: {mistake}", soft_wrap=True)
    print()
    console.rule()
