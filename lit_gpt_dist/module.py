"""The LightningModule around the GPT: loss, optimizer, and one optimizer step per batch of the loader.

Knows which micro-batches make a step; knows nothing of how strategies spread them (``parallel/``).
"""

import hashlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from lit_gpt_dist.checkpoint.initial import load_weights, shape_of_weights
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import PRESETS, Activation, GPTConfig, Norm, Positions, Recompute, preset
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.optim.config import FINE_TUNING_RATE, LEARNING_RATES, OptimConfig
from lit_gpt_dist.optim.groups import make_adamw
from lit_gpt_dist.optim.schedules import HostRates, lr_factor
from lit_gpt_dist.parallel.clip import (
    clip_by_global_norm,
    clip_divisor,
    clip_in_update,
    clips_in_update,
)
from lit_gpt_dist.parallel.compile import Compile, compile_model, eagerly, one_kernel, resolve_compile
from lit_gpt_dist.parallel.graph import decide_graph, recording
from lit_gpt_dist.parallel.recompute import check_recompute, set_recompute
from lit_gpt_dist.recorded import RecordedSteps, mean_loss, step_results


class GPTModule(RecordedSteps):
    """A GPT in training.

    Args:
        size: the preset: tiny, baby, gpt2, big, gpt2-124m or 4b; by default baby with a GPU, tiny without.
        context: tokens a window feeds.
        vocab_size: rows of the embedding; by default the preset's, else as many as the corpus's vocabulary has.
        layers: number of blocks.
        heads: query heads.
        kv_heads: key/value heads (grouped-query attention).
        width: width of the residual stream.
        ff_width: hidden width of the feed-forward.
        norm: layernorm or rmsnorm.
        positions: learned or rope.
        activation: gelu or swiglu.
        tied: the output head shares the embedding's weights.
        bias: biases in linear layers and norms.
        dropout: share of activations dropped in training.
        recompute: what of a block's activations is computed again in backward instead of being kept: selective, all but what
            matrix products and attention left; full, all but its input.
        recompute_blocks: of how many blocks, the first; by default all.
        compile: torch.compile for the whole model, for each block, or not at all; auto: on GPUs.
        cuda_graph: record a whole optimizer step and replay it; by default on GPUs, where it can be.
        optim: AdamW and its schedule.
        seed: of the initial weights and of dropout.
        init_from: fine-tune these weights: a checkpoint, an export, or a Hugging Face folder; they decide the shape.
    """

    def __init__(
        self,
        size: str | None = None,
        context: int | None = None,
        vocab_size: int | None = None,
        layers: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        width: int | None = None,
        ff_width: int | None = None,
        norm: Norm | None = None,
        positions: Positions | None = None,
        activation: Activation | None = None,
        tied: bool | None = None,
        bias: bool | None = None,
        dropout: float | None = None,
        recompute: Recompute = "none",
        recompute_blocks: int | None = None,
        compile: Compile = "auto",
        cuda_graph: bool | None = None,
        optim: OptimConfig | None = None,
        seed: int = 1337,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        self.config: GPTConfig
        self.init_vocabulary: str | None = None  # JSON, of the weights to start from
        self.size = size or ("baby" if torch.cuda.is_available() else "tiny")
        self.shape = dict(
            context=context, vocab_size=vocab_size, layers=layers, heads=heads, kv_heads=kv_heads, width=width,
            ff_width=ff_width, norm=norm, positions=positions, activation=activation, tied=tied, bias=bias, dropout=dropout,
        )  # fmt: skip
        if init_from:
            self.config, self.init_vocabulary = shape_of_weights(init_from, size, self.shape)
            self.size = size or "custom"
        else:
            self.config = preset(self.size, **self.shape)  # the vocabulary may still come from the corpus
        self.recompute: Recompute = recompute
        self.recompute_blocks = recompute_blocks
        self.compile_option: Compile = compile
        self.compiled: str = "none"  # what ``auto`` came to
        self.graph_option = cuda_graph
        self.optim = optim or OptimConfig()
        self.seed = seed
        self.init_from = init_from
        self.model: GPT | None = None
        self.continued_run: str | None = None  # the folder of the run whose checkpoint was loaded
        self.norm_watcher: Callable[[Optimizer, Tensor], None] | None = None  # told each norm before the update
        self.validation_loss = MeanMetric()

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning notes some forty times a step which hook it is in; ``nn.Module`` would look for parameters each time."""
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def context(self) -> int:
        return self.config.context

    # ---- building -------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Builds the model once; what follows from the Trainer's precision and device holds for that Trainer alone."""
        if self.model is None:
            self._build_model()
        assert self.model is not None
        self.model.compute_dtype = self.trainer.strategy.compute_dtype  # type: ignore[attr-defined]
        if self.trainer.precision == "64-true":
            self.validation_loss.set_dtype(torch.float64)
        self.graph_wanted = decide_graph(self.graph_option, self.trainer, self)

    def _build_model(self) -> None:
        """Builds, recomputes, compiles, shards, initialises: in this order, since hooks of sharding must sit outermost."""
        self.config = self._config_for_corpus()
        strategy: Any = self.trainer.strategy
        if not hasattr(strategy, "build_context"):
            raise UserError(
                f"strategy {type(strategy).__name__} is Lightning's, but a GPTModule needs this project's, which know how to place "
                "it; use lit_gpt_dist.trainer.Trainer"
            )
        check_recompute(self.recompute, str(self.trainer.precision), self.recompute_blocks, self.config.layers)
        if self.recompute_blocks == self.config.layers:
            self.recompute_blocks = None  # all: the same setting by another name
        with strategy.build_context():
            self.model = GPT(self.config)
        set_recompute(self.model, self.recompute, self.recompute_blocks)
        strategy.prepare(self.model)
        self.compiled = resolve_compile(self.compile_option, strategy.root_device, strategy.gathers_blocks)
        compile_model(self.model, self.compiled)  # type: ignore[arg-type]
        self._clip_divisor = one_kernel(clip_divisor, self.compiled, strategy.root_device)
        self._step_results = one_kernel(step_results, self.compiled, strategy.root_device)
        strategy.place(self.model, self.seed)
        if self.init_from:
            load_weights(self.model, self.init_from, self.trainer.datamodule.vocabulary, strategy.assign)  # type: ignore[attr-defined]

    def _config_for_corpus(self) -> GPTConfig:
        """The preset with a vocabulary: its own if it has one, and that must hold the corpus's; else the corpus's."""
        needed = self.trainer.datamodule.vocabulary.size  # type: ignore[attr-defined]
        if self.init_from:
            return self.config  # the vocabulary is compared when the weights are loaded
        fixed = self.shape["vocab_size"] or ("vocab_size" in PRESETS[self.size] and self.config.vocab_size)
        if fixed and fixed < needed:
            raise UserError(
                f"the corpus has a vocabulary of {needed}, but the model's is {fixed}; use --model.vocab_size {needed} or more"
            )
        return preset(self.size, **{**self.shape, "vocab_size": fixed or needed})

    def configure_optimizers(self) -> OptimizerLRScheduler:
        assert self.model is not None
        steps, lr = self.schedule_steps, self._peak_lr
        fused = self.optim.fused
        if self.trainer.precision == "16-mixed":
            fused = False  # a fused step unscales gradients by itself, after they were clipped
        optimizer = make_adamw(self.model, lr, self.optim, fused, self.device)
        scheduler = HostRates(optimizer, lambda step: lr_factor(step, self.optim, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def schedule_steps(self) -> int:
        steps = self.optim.schedule_steps or self.trainer.max_steps
        if steps < 0:
            raise UserError(
                f"the learning-rate schedule has no length: max_steps is {steps}; give it, or optim.schedule_steps"
            )
        return steps

    @property
    def _peak_lr(self) -> float:
        return self.optim.lr or LEARNING_RATES.get(self.size, FINE_TUNING_RATE)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["run"] = str(getattr(self.trainer, "run_dir", ""))
        checkpoint["schedule"] = {"steps": self.schedule_steps, "lr": self._peak_lr}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Says what a resumed run does otherwise than the run it continues."""
        self.continued_run = str(checkpoint.get("run") or "") or None
        saved = checkpoint.get("schedule")
        if not saved or self.trainer.state.fn != "fit":
            return
        if saved["steps"] != self.schedule_steps:
            rank_zero_warn(
                f"the learning-rate schedule was laid out over {saved['steps']} steps and is over {self.schedule_steps} "
                f"now, so the rate jumps; --optim.schedule_steps {saved['steps']} keeps it"
            )
        if saved["lr"] != self._peak_lr:
            rank_zero_warn(f"the peak learning rate stays the checkpoint's, {saved['lr']}, not {self._peak_lr}")

    # ---- one optimizer step ---------------------------------------------------------------------------------------

    def forward(self, windows: Tensor, reduction: Literal["mean", "window"] = "mean") -> Tensor:
        """Loss in nats of ``windows`` (batch, context + 1): each token but the last predicts the next."""
        assert self.model is not None
        return self.model(windows[:, :-1], windows[:, 1:], reduction)

    def training_step(self, windows: Tensor, step: int) -> Tensor:
        """Forward and backward of all this rank's micro-batches of one optimizer step, where Lightning goes through it part by
        part; else see ``take_step``.

        Args:
            windows: (accumulate, micro, context + 1).

        Returns:
            The last micro-batch's share of the loss. Lightning runs its backward, the one that synchronises.
        """
        self._clear_gradients(len(windows))
        losses = self._accumulate(windows)
        loss = self._micro_loss(windows, len(windows) - 1)
        self.step_loss = mean_loss([*losses, loss.detach()])
        return share_of(loss, len(windows))

    def _whole_step(self, windows: Tensor) -> tuple[list[Tensor], Tensor]:
        """What Lightning drives hook by hook otherwise: each micro-batch's loss, and the gradient norm before clipping."""
        optimizer, trainer = self.trainer.optimizers[0], self.trainer
        self._clear_gradients(len(windows))
        losses = self._accumulate(windows)
        loss = self._micro_loss(windows, len(windows) - 1)
        self.backward(share_of(loss, len(windows)))
        self.configure_gradient_clipping(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        optimizer.step()
        assert self.gradient_norm is not None
        return [*losses, loss.detach()], self.gradient_norm

    def _clear_gradients(self, accumulate: int) -> None:
        """As zero_grad does, which takes ten times as long to begin.

        Under ddp, gradients of one micro-batch become parts of the buckets when they are sent. Those of several are added up
        before, and beside the buckets, unless they start as zeros within them.
        """
        parameters = parameters_of(self.trainer.optimizers[0])
        if accumulate > 1 and self.trainer.strategy.gradients_in_buckets:  # type: ignore[attr-defined]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if len(gradients) == len(parameters):
                torch._foreach_zero_(gradients)
                return
        for parameter in parameters:
            parameter.grad = None

    def _accumulate(self, windows: Tensor) -> list[Tensor]:
        """Gradients of all micro-batches but the last, kept on this rank; their losses."""
        strategy: Any = self.trainer.strategy
        losses = []
        for index in range(len(windows) - 1):
            with strategy.block_backward_sync():
                loss = self._micro_loss(windows, index)
                strategy.backward(share_of(loss, len(windows)), None)
            losses.append(loss.detach())
        return losses

    def _micro_loss(self, windows: Tensor, index: int) -> Tensor:
        if self.config.dropout > 0 and not recording():
            self._seed_dropout(index, len(windows))
        forward: Any = self.trainer.strategy.model  # this module as the strategy wrapped it
        return forward(windows[index])

    def _seed_dropout(self, index: int, accumulate: int) -> None:
        """Dropout masks follow the micro-batch, not the rank or the past: the same on any layout and after a resume."""
        strategy: Any = self.trainer.strategy
        micro_batch = index * strategy.data_ranks + strategy.data_rank
        key = f"{self.seed}/{self.trainer.global_step}/{micro_batch}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:7], "little"))

    def _before_recorded_step(self) -> None:
        super()._before_recorded_step()
        if self.config.dropout > 0:
            self._seed_dropout(0, 1)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Within Lightning's own, so that ``on_after_backward`` finds gradients as the strategy leaves them."""
        loss.backward(*args, **kwargs)
        self.trainer.strategy.after_backward()  # type: ignore[attr-defined]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Lightning would zero between ``training_step`` and its backward, and lose all micro-batches but the last."""

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        by_value = gradient_clip_algorithm == "value"
        in_update = bool(gradient_clip_val) and not by_value and clips_in_update(optimizer)
        limit = None if by_value or in_update else gradient_clip_val
        self.gradient_norm = clip_by_global_norm(parameters_of(optimizer), limit)
        if in_update:
            clip_in_update(optimizer, self.gradient_norm, gradient_clip_val, self._clip_divisor)  # type: ignore[arg-type]
        if by_value:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        if self.norm_watcher is not None:
            self.norm_watcher(optimizer, self.gradient_norm)

    # ---- validation -----------------------------------------------------------------------------------------------

    def validation_step(self, batch: Any, index: int) -> None:
        """Weighted mean over fixed windows; a window of weight 0 only keeps the ranks in step."""
        with eagerly():
            losses = self(batch.windows, "window")  # (micro,)
        self.validation_loss.update(losses, batch.weights)

    def on_validation_epoch_start(self) -> None:
        """Here, not at the end: after ``validate`` the metric's state would be a tensor of inference mode, which no ``fit`` could
        add to."""
        self.validation_loss.reset()

    def on_validation_epoch_end(self) -> None:
        loss = self.validation_loss.compute()  # torchmetrics sums over the ranks
        # what goes to loggers is what validate() returns; in fit the recorder logs them, at their step
        logger = False if self.trainer.state.fn == "fit" else None
        self.log_dict({"val/loss": loss, "val/perplexity": loss.exp()}, logger=logger, rank_zero_only=False)

    test_step = validation_step
    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end


def share_of(loss: Tensor, accumulate: int) -> Tensor:
    """What a micro-batch adds to the loss of its step. Dividing by 1 would be two more operations, here and in backward."""
    return loss if accumulate == 1 else loss / accumulate


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All that it updates. (A module's ``parameters()`` walks through the module each time: 50 µs for a small one.)"""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
