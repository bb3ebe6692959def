"""Makes any Lightning strategy save and load checkpoint folders. Knows nothing of when to save or what to keep.

``Trainer.save_checkpoint``, ``fit(ckpt_path=…)``, ``validate(ckpt_path=…)`` and Lightning's ``ModelCheckpoint`` come here.
What Lightning collects is split: tensors go to ``torch.distributed.checkpoint``, everything else to ``state.json``.
"""

import json
import platform
import sys
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from lit_gpt_dist.checkpoint import codec, compatible, find, rng
from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.metadata import UnsafeFileError, read_metadata
from lit_gpt_dist.checkpoint.saver import Job, Saver, load_into
from lit_gpt_dist.checkpoint.tensors import OptimizerRestore, module_tensors, optimizer_tensors
from lit_gpt_dist.errors import UserError

STATE = "state."  # tensors that Lightning, callbacks or the data module keep in their states
PENDING = "folder_checkpoint"  # where the loaded checkpoint carries this module's own things
_APART = ("state_dict", "optimizer_states")  # what of Lightning's dictionary does not go into state.json


@dataclass(frozen=True)
class SaveOptions:
    """What may be passed as ``Trainer.save_checkpoint(path, storage_options=…)``."""

    background: bool = False
    val_loss: float | None = None
    after_commit: Callable[[Path], None] | None = None  # called on rank 0 with the folder that was committed


@dataclass(frozen=True)
class Opened:
    """A verified checkpoint whose tensors are still on the disk."""

    folder: Path
    document: dict[str, Any]
    metadata: Metadata


class FolderCheckpoints(Strategy):
    """Mixed into a strategy, in front of Lightning's own: one checkpoint format for all of them."""

    _saver: Saver | None = None
    _run_id: str | None = None
    _rng_to_restore: dict[str, Tensor] | None = None
    loaded_from: Path | None = None  # the folder that was loaded, also where ``last`` was asked for

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # tensors are read straight into the placed model and its optimizers

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def saver(self) -> Saver:
        """Made at the first save or load. Collective then: all ranks come here together."""
        if self._saver is None:
            self._saver = Saver()
        return self._saver

    @property
    def run_id(self) -> str:
        """Names this run in its checkpoints; a resumed run keeps it. Collective at its first use."""
        if self._run_id is None:
            self._run_id = self.saver.ranks.from_first(lambda: uuid.uuid4().hex)
        return self._run_id

    # saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return module_tensors(self.lightning_module)[0]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}  # collected for all optimizers at once, by parameter name, in ``save_checkpoint``

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes the folder ``filepath``. Collective.

        Raises:
            SaveError: it could not be written, or an earlier save in the background could not.
        """
        options = storage_options if storage_options is not None else SaveOptions()
        if not isinstance(options, SaveOptions):
            raise TypeError(f"storage_options is a {type(options).__name__}; it must be SaveOptions or None")
        assert self.lightning_module is not None
        self.saver.wait()  # what is still being written talks through the same group of ranks
        weights, aliases = module_tensors(self.lightning_module)
        kept: dict[str, Tensor] = {}
        document = self._document(aliases)
        document["weights_only"] = "optimizer_states" not in checkpoint
        shared = dict(weights)
        if not document["weights_only"]:
            moments, groups = optimizer_tensors(self.optimizers, weights)
            shared |= moments
            document["optimizers"] = codec.encode(groups, kept, STATE + "optimizers")
        rest = {key: value for key, value in checkpoint.items() if key not in _APART}
        document["lightning"] = codec.encode(rest, kept, STATE + "lightning")
        ranks = self.saver.ranks
        own = rng.collect(ranks.rank, self.root_device) | (kept if ranks.rank == 0 else {})
        job = Job(
            path=Path(filepath),  # rank 0's counts
            step=int(checkpoint["global_step"]),
            run_id=self.run_id,
            state_json=json.dumps(document, indent=1),
            shared=shared,
            own=own,
            val_loss=options.val_loss,
            after_commit=options.after_commit,
        )
        self.saver.save(job, options.background)

    def prepare_background_saves(self) -> None:
        """Begins to make host memory for them beside training: page-locking it takes seconds for large models.

        Call it after a step: before the first one the optimizer has no state. Collective if it is the saver's first use.
        """
        assert self.lightning_module is not None
        weights, _ = module_tensors(self.lightning_module)
        self.saver.prepare(weights | optimizer_tensors(self.optimizers, weights)[0])

    def _document(self, aliases: dict[str, str]) -> dict[str, Any]:
        facts = compatible.facts_of(self.lightning_module.trainer)  # type: ignore[union-attr]
        document = {
            "format": layout.FORMAT,
            "run_id": self.run_id,
            "layout": {"strategy": type(self).__name__, "ranks": self.saver.ranks.size},
            "versions": {
                "torch": torch.__version__,
                "lightning": lightning.__version__,
                "python": platform.python_version(),
            },
            "aliases": aliases,
        }
        return document | {name: codec.encode(value, {}, name) for name, value in facts.items()}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Deletes a checkpoint folder, and only one."""
        path = Path(filepath)
        if self.is_global_zero and (path / layout.MANIFEST_FILE).exists():
            layout.remove(path, self._run_id or "unknown")

    # loading

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Verifies the checkpoint and everything that must fit, and returns what is not a tensor. Changes nothing.

        Raises:
            UserError: damaged, unsafe, or of another model or vocabulary.
        """
        ranks = self.saver.ranks
        self.saver.wait()
        module = self.lightning_module
        assert module is not None
        sieves = compatible.sieves_of(module.trainer)
        folder, passed_over = ranks.from_first(lambda: find.choose(Path(checkpoint_path), sieves))
        if self.is_global_zero:
            for line in passed_over:
                print(f"warning: {line}; {folder} is taken instead", file=sys.stderr)
        self.loaded_from = folder
        opened = _open(folder)
        document = opened.document
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        compatible.check(document, opened.metadata.state_dict_metadata, module.trainer, folder, fitting)
        self._adopt_run(document, folder)
        states = self._read_states(opened)
        checkpoint = codec.decode(document["lightning"], states)
        return {**checkpoint, "state_dict": {}, "optimizer_states": [], PENDING: opened}

    def _read_states(self, opened: Opened) -> dict[str, Tensor]:
        """Tensors out of states, and this rank's random numbers, which are put in place when training starts."""
        stored = opened.metadata.state_dict_metadata
        prefix = f"rng.{self.saver.ranks.rank}."
        names = [name for name in stored if name.startswith((STATE, prefix))]
        tensors = {
            name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype)  # type: ignore[union-attr]
            for name in names
        }
        load_into(tensors, opened.folder, self.saver.ranks)
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        self._rng_to_restore = own or None
        return tensors

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        with torch.no_grad():
            load_into(module_tensors(self.lightning_module)[0], checkpoint[PENDING].folder, self.saver.ranks)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        opened: Opened = checkpoint[PENDING]
        assert self.lightning_module is not None
        weights, _ = module_tensors(self.lightning_module)
        restore = OptimizerRestore(self.optimizers, weights, opened.metadata.state_dict_metadata)  # type: ignore[arg-type]
        load_into(restore.tensors, opened.folder, self.saver.ranks)
        restore.apply(codec.decode(opened.document["optimizers"], {}))

    def on_train_start(self) -> None:
        """Random numbers go on where they stopped; only now, since starting the loaders draws some."""
        super().on_train_start()
        states, self._rng_to_restore = self._rng_to_restore, None
        if states is not None:
            rng.restore(states, self.root_device)

    def _adopt_run(self, document: dict[str, Any], folder: Path) -> None:
        """Goes on as the run that wrote ``folder`` if it lies where this run saves; a copy elsewhere starts a new one."""
        assert self.lightning_module is not None
        here = find.folder_of(Path(self.lightning_module.trainer.default_root_dir))
        if folder.resolve().parent == here.resolve():
            self._run_id = str(document["run_id"])

    # ending

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._saver is not None:
            try:
                self._saver.wait()
            except Exception as error:
                warnings.warn(str(error), stacklevel=1)

    def teardown(self) -> None:
        saver, self._saver = self._saver, None
        try:
            if saver is not None:
                saver.close()
        finally:
            super().teardown()


def _open(folder: Path) -> Opened:
    try:
        document = layout.read_json(folder / layout.STATE_FILE)
        metadata = read_metadata(folder)
    except (layout.DamagedError, UnsafeFileError, OSError) as error:
        raise UserError(f"checkpoint {folder} cannot be used: {error}") from error
    return Opened(folder, document, metadata)
