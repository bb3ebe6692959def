"""The commands ``fit``, ``validate`` and ``test``: one rank of each, and what is left where one ends without a step."""

import contextlib
import logging
import shutil
import warnings

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_gpt_dist.errors import EXIT_OK, UserError
from lit_gpt_dist.runs import run_rank
from lit_gpt_dist.training_cli import TrainingCLI


def quiet_libraries() -> None:
    """Lightning's tips and notices that do not concern a user of this application."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # under recompute selective it asks for what the model keeps: nothing in place within a block
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # one line, without a place in the code
    warnings.filterwarnings("ignore", category=FutureWarning)


def main(argv: list[str]) -> int:
    """One rank of ``fit``, ``validate`` or ``test``; Lightning starts the others by running the same command."""
    quiet_libraries()
    clis: list[TrainingCLI] = []

    def body() -> int:
        try:
            TrainingCLI(argv, clis)
        except MisconfigurationException as mistake:
            discard_unused_run(clis, "failed")
            raise UserError(" ".join(str(mistake).split())) from mistake
        except UserError:
            discard_unused_run(clis, "failed")
            raise
        discard_unused_run(clis, None)
        return EXIT_OK

    return run_rank(body, lambda: started_processes(clis))


def discard_unused_run(clis: list[TrainingCLI], status: str | None) -> None:
    """A training without a step, refused or already finished, leaves no folder. Only one that was new is removed.

    Args:
        status: to tell the loggers; None: Lightning has told them how the run ended.
    """
    folder, trainer = clis[0].new_folder, getattr(clis[0], "trainer", None)
    if folder is None:
        return
    if getattr(getattr(trainer, "lightning_module", None), "step_loss", None) is not None:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only where it is empty: fast_dev_run writes nothing
        return
    for logger in trainer.loggers if trainer is not None and status else ():
        logger.finalize(status)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # only where it is empty


def started_processes(clis: list[TrainingCLI]) -> list:
    trainer = getattr(clis[0], "trainer", None) if clis else None
    launcher = trainer.strategy.launcher if trainer is not None else None
    return getattr(launcher, "procs", [])
