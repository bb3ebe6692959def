"""Step-seeded global batches for Lightning's Trainer. Knows nothing of the model but its context, and leaves to
``placement.py`` where tokens lie.

One batch of the loader is one optimizer step: all ``accumulate`` micro-batches of this rank. Seed and step alone select
the global batch, so there is no position to save; what a checkpoint holds of the data says where it came from.
"""

from typing import Any, get_args

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_gpt_dist.data.agreement import compare_settings, compare_windows, raise_together
from lit_gpt_dist.data.corpus import Corpus, load_corpus
from lit_gpt_dist.data.loaders import (
    Draw,
    StepBatch,
    StepLoader,
    StepSource,
    ValBatch,
    ValLoader,
    ValStarts,
    torch_tokens,
)
from lit_gpt_dist.data.placement import Parts, Placement, cut
from lit_gpt_dist.data.provenance import changes_since
from lit_gpt_dist.data.tokenizers import Vocabulary, vocabulary_from_json
from lit_gpt_dist.data.windows import BatchPlan, plan_batch, usual_micro
from lit_gpt_dist.errors import UserError

SMALL_PARAMETERS = 20e6


class GPTDataModule(lightning.LightningDataModule):
    """A corpus, cut into a training and a validation part, as global batches.

    Args:
        corpus: UTF-8 file, folder or glob, or a folder made by `prepare`; default: the Python standard library's sources
        tokenizer: char, char:ru-en, byte, a tokenizer.json or a prepared folder; default: the prepared corpus's own or that of the weights to start from, else byte for the default corpus and char for others
        global_batch: windows per optimizer step; default: micro_batch × accumulate_grad_batches × data ranks
        micro_batch: windows a device forwards at once; default: 64 for models under 20M parameters, else 16, or what divides
        context: tokens a window feeds; default: the model's context
        draw: random windows with replacement, or each window of a shuffled epoch once
        val_fraction: share of the corpus cut off its end for validation, at most 10 million tokens; 0: no validation
        val_corpus: another text or prepared folder to validate on, with the same vocabulary; all of the corpus is then trained on
        val_windows: windows of one validation at most, spread evenly over the validation part
        val_micro_batch: windows a device forwards at once in validation; default: micro_batch
        seed: selects, with the step, the windows of a global batch
        on_device: keep the tokens on the device and gather there; default: where they need at most 512 MiB
        workers: processes that read windows ahead on the host; default: 2 for a corpus not kept on a GPU, else 0
    """

    def __init__(
        self,
        corpus: str | None = None,
        tokenizer: str | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        context: int | None = None,
        draw: Draw = "random",
        val_fraction: float = 0.1,
        val_corpus: str | None = None,
        val_windows: int = 1024,
        val_micro_batch: int | None = None,
        seed: int = 1337,
        on_device: bool | None = None,
        workers: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("context", context),
            ("micro_batch", micro_batch),
            ("val_windows", val_windows),
            ("val_micro_batch", val_micro_batch),
        ):
            if value is not None and value < 1:
                raise UserError(f"{name} {value} is below 1; give a positive number")
        if workers is not None and workers < 0:
            raise UserError(f"workers {workers} is below 0; give 0 to read windows without workers, or leave it out")
        if draw not in get_args(Draw):
            raise UserError(f"draw {draw!r} is not one of {', '.join(get_args(Draw))}")
        if on_device and workers:
            raise UserError(f"workers {workers} have nothing to read when on_device is true; leave one of them out")
        self.corpus_path, self.tokenizer = corpus, tokenizer
        self.global_batch, self.micro_batch, self.val_micro_batch = global_batch, micro_batch, val_micro_batch
        self.context_option, self.draw, self.seed = context, draw, seed
        self.val_fraction, self.val_windows = val_fraction, val_windows
        self.val_corpus_path = val_corpus
        self.on_device, self.workers = on_device, workers
        self._corpus: Corpus | None = None
        self._placement: Placement | None = None
        self._accumulate: int | None = None  # the Trainer's accumulate_grad_batches, once absorbed
        self.data_offset = 0  # step s takes the windows of s + data_offset: more than 0 once bad data were passed over
        self._saved: dict[str, Any] | None = None  # a checkpoint's account of its data that came before setup

    # ---- what others ask for, after setup

    @property
    def corpus(self) -> Corpus:
        if self._corpus is None:
            raise RuntimeError("the data module knows its corpus after setup()")
        return self._corpus

    @property
    def placement(self) -> Placement:
        if self._placement is None:
            raise RuntimeError("the data module knows where its tokens lie after setup()")
        return self._placement

    @property
    def parts(self) -> Parts:
        return self.placement.parts

    @property
    def vocabulary(self) -> Vocabulary:
        return self.corpus.vocabulary

    @property
    def plan(self) -> BatchPlan:
        return self._source.plan

    @property
    def context(self) -> int:
        return self._source.context

    @property
    def tokens_per_step(self) -> int:
        """Tokens all ranks together feed per optimizer step."""
        return self.plan.global_batch * self.context

    def describe(self) -> str:
        """One line about the data and how they are split."""
        return f"{self.describe_corpus()}; {self.plan}; context {self.context}; {self.draw} windows"

    def describe_corpus(self) -> str:
        """One line for the start of a run."""
        return self.parts.describe()

    def global_windows(self, step: int) -> tuple[Tensor, Tensor]:
        """Starts (global_batch,) and tokens (global_batch, context + 1) of a whole step, as all ranks together take it."""
        starts = self._source.global_starts(step + self.data_offset)
        return torch.from_numpy(starts), torch_tokens(self.parts.train.gather(starts, self.context + 1))

    # ---- Lightning's hooks, in the order in which they are called

    def setup(self, stage: str) -> None:
        """Loads the corpus and plans the batches, on every rank alike. Communicates."""
        trainer = self._trainer()
        failure = None
        try:
            self._load(trainer)
            self._allow_no_validation(trainer, stage)
        except Exception as error:  # any: the other ranks must hear of it before this one leaves
            failure = error
        raise_together(trainer.strategy, failure)
        compare_settings(
            trainer.strategy,
            {
                "corpus": self.corpus.digest,
                "vocabulary": self.vocabulary.digest,
                "context": self.context,
                "seed": self.seed,
                "global batch": self.plan.global_batch,
                "micro batch": self.plan.micro_batch,
                "number of data ranks": self.plan.ranks,
                "way to draw": get_args(Draw).index(self.draw),
                "training part": len(self.parts.train),
                "validation part": len(self.parts.validation),
            },
        )
        if self._saved is not None:
            self.check_saved(self._saved)

    def _allow_no_validation(self, trainer: lightning.Trainer, stage: str) -> None:
        if len(self.parts.validation):
            return
        if stage != "fit":
            raise UserError(
                f"val_fraction 0 leaves no windows to {getattr(stage, 'value', stage)} on; use for example --data.val_fraction 0.1"
            )
        trainer.limit_val_batches = 0  # else Lightning warns of an empty loader at every start

    def _trainer(self) -> lightning.Trainer:
        if self.trainer is None:
            raise RuntimeError("the data module is set up by a Trainer")
        return self.trainer

    def _load(self, trainer: lightning.Trainer) -> None:
        if self._corpus is None:
            weights = getattr(trainer.lightning_module, "init_vocabulary", None)  # of the weights to start from
            self._corpus = load_corpus(self.corpus_path, self.tokenizer, weights and vocabulary_from_json(weights))
        context = self._context_beside(getattr(trainer.lightning_module, "context", None))
        parts = cut(self._corpus, self.val_fraction, self.val_corpus_path, context)
        self._placement = Placement(parts, trainer.strategy.root_device, self.on_device, self.workers)
        self._source = self._plan_steps(trainer, context, len(parts.train))

    def _plan_steps(self, trainer: lightning.Trainer, context: int, train_tokens: int) -> StepSource:
        if trainer.accumulate_grad_batches > 1:
            # one batch of the loader is one optimizer step: accumulation happens inside it, not in the Trainer's loop
            self._accumulate, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1
        # ranks of one tensor- or pipeline-parallel group share data; a foreign strategy knows only plain ranks
        data_rank = getattr(trainer.strategy, "data_rank", trainer.global_rank)
        ranks = getattr(trainer.strategy, "data_ranks", trainer.world_size)
        assert 0 <= data_rank < ranks, f"the strategy names data rank {data_rank} of {ranks}"
        micro = self.micro_batch or usual_micro(most_windows(trainer), self.global_batch, self._accumulate, ranks)
        plan = plan_batch(self.global_batch, micro, self._accumulate, ranks)
        return StepSource(plan, self.draw, self.seed, context, train_tokens, data_rank, steps_to_overfit(trainer))

    def _context_beside(self, of_model: int | None) -> int:
        context = self.context_option or of_model
        if context is None:
            raise UserError("the model does not say its context; give --data.context")
        if of_model is not None and context > of_model:
            raise UserError(
                f"data context {context} is beyond the model's {of_model}; leave --data.context out, or give the model as much"
            )
        return context

    def train_dataloader(self) -> StepLoader:
        """Endless steps from the Trainer's current one. Communicates: the ranks compare their first windows."""
        trainer = self._trainer()
        compare_windows(trainer.strategy, self._source, self._position())
        return StepLoader(
            self._source,
            current_step=self._position,
            tokens=self.parts.train if self.placement.reads_ahead else None,
            workers=self.placement.workers,
            pin=trainer.strategy.root_device.type == "cuda",
        )

    def _position(self) -> int:
        """The step whose windows the run takes next."""
        return self._trainer().global_step + self.data_offset

    def val_dataloader(self) -> ValLoader:
        micro = self.val_micro_batch or self.plan.micro_batch
        tokens, rank = len(self.parts.validation), self._source.data_rank
        return ValLoader(tokens, self.context, self.val_windows, micro, rank, self.plan.ranks)

    def test_dataloader(self) -> ValLoader:
        return self.val_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Windows on the device: (accumulate, micro, context + 1) int64 to train, a ``ValBatch`` to validate."""
        if isinstance(batch, ValStarts):
            windows = self.placement.gather(self.parts.validation, batch.starts, self.context + 1, device)
            return ValBatch(windows, batch.weights.to(device, non_blocking=True))
        if not isinstance(batch, StepBatch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        position = self._position()
        if batch.step != position:  # read ahead before a checkpoint told the step
            batch = self._source.batch(position)
        if batch.windows is not None:
            return batch.windows.to(device, non_blocking=True).long()
        return self.placement.gather(self.parts.train, batch.starts, self.context + 1, device)

    def teardown(self, stage: str) -> None:
        if self._placement is not None:
            self._placement.release()

    # ---- where the data came from

    def state_dict(self) -> dict[str, Any]:
        """Provenance, not a position: the step alone says where a run is, but for data that were passed over."""
        if self._corpus is None:
            return {}
        return {
            "corpus": self.corpus.digest,
            "vocabulary": self.vocabulary.digest,
            "vocabulary_kind": self.vocabulary.kind,
            "vocabulary_size": self.vocabulary.size,
            "global_batch": self.plan.global_batch,
            "context": self.context,
            "draw": self.draw,
            "seed": self.seed,
            "data_offset": self.data_offset,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data_offset = int(state_dict.get("data_offset", 0))
        if self._corpus is None:
            self._saved = dict(state_dict)
        else:
            self.check_saved(state_dict)

    def check_saved(self, saved: dict[str, Any]) -> None:
        """Compares a checkpoint's ``state_dict`` with this run's.

        Raises:
            UserError: the tokens mean something else than those the weights were trained on.
        """
        changes = changes_since(saved, self.state_dict(), self.corpus.name)
        if self._trainer().state.fn != "fit":
            return  # nothing is continued
        for change in changes:
            rank_zero_warn(change)


def most_windows(trainer: lightning.Trainer) -> int:
    """Windows that a device forwards at once where nobody says: many of a small model's keep it busy."""
    config = getattr(trainer.lightning_module, "config", None)
    return 64 if config is not None and config.parameters() < SMALL_PARAMETERS else 16


def steps_to_overfit(trainer: Any) -> int:
    """The Trainer's ``overfit_batches``; 0: none. A batch of the loader is a step.

    Raises:
        UserError: a share instead of a number.
    """
    batches = trainer.overfit_batches
    if batches and not isinstance(batches, int):
        raise UserError(
            f"overfit_batches {batches}: the data have no end to take a share of; give a whole number of optimizer steps"
        )
    return int(batches)
