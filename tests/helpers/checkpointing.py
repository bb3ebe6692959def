"""Small runs of one process with checkpoints, straight through ``Trainer``."""

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.data.datamodule import GPTDataModule
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.optim.config import OptimConfig
from lit_gpt_dist.trainer import Trainer


class Losses(Callback):
    def __init__(self):
        self.by_step = {}
        self.validated = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.by_step[trainer.global_step] = module.step_loss.item()

    def on_validation_end(self, trainer, module):
        self.validated.append(trainer.global_step)


def make(root, text, steps, *callbacks, fused=None, data=None, **shape):
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        default_root_dir=root,
        callbacks=[losses, *callbacks],
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=-1,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    optim = OptimConfig(schedule_steps=50, fused=fused)
    module = GPTModule(size="tiny", optim=optim, **{"width": 32, "context": 16, **shape})
    options = {"tokenizer": "byte", "global_batch": 4, "micro_batch": 2, "val_windows": 4, **(data or {})}
    return trainer, module, GPTDataModule(str(text), **options), losses


def fit(root, text, steps, *callbacks, ckpt_path=None, **options):
    trainer, module, data, losses = make(root, text, steps, *callbacks, **options)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer, module, losses


def saver(**options):
    return CheckpointCallback(every_n_steps=4, **options)


def changed(module):
    return {name: parameter.clone() for name, parameter in module.model.named_parameters()}
