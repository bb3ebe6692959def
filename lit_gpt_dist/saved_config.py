"""The configuration that a run leaves in its folder, whole and with whole paths: it runs again from anywhere."""

from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import SaveConfigCallback


class RunConfig(SaveConfigCallback):
    """Saves the resolved configuration into the run's folder: ``fit --config RUN/config.yaml`` runs it again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"save_to_log_dir": False, "overwrite": True}))

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        trainer.run_dir.mkdir(parents=True, exist_ok=True)
        path = trainer.run_dir / self.config_filename
        self.parser.save(
            from_anywhere(self.config), str(path), skip_none=False, overwrite=True, multifile=self.multifile
        )


def from_anywhere(options: Namespace) -> Namespace:
    """The options with whole paths, and the checkpoint that ``last`` meant: the file must run again from any folder."""
    kept = options.clone()
    kept.trainer.default_root_dir = str(Path(kept.trainer.default_root_dir).resolve())
    for group, name in (("data", "corpus"), ("data", "val_corpus"), ("model", "init_from")):
        value = kept[group].get(name)
        if value and Path(value).exists():
            kept[group][name] = str(Path(value).resolve())
    if kept.get("ckpt_path") and Path(kept.ckpt_path).exists():
        kept.ckpt_path = str(Path(kept.ckpt_path).resolve())
    return kept
