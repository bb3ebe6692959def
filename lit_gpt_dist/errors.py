"""What a user's mistake becomes, and the exit codes of every command. Knows nothing of training."""

EXIT_OK = 0
EXIT_FAILURE = 1  # something broke: the message names it
EXIT_USER_ERROR = 2  # bad input: one line with value, rule and remedy, nothing was written
EXIT_REQUEUE = (
    75  # stopped by SIGTERM or SIGUSR1 after saving (EX_TEMPFAIL of sysexits.h): start it again with --ckpt_path last
)
EXIT_INTERRUPTED = 130  # Ctrl+C, after saving (128 + SIGINT)


class UserError(ValueError):
    """Input that cannot be used. The message is one line: the value, the rule it breaks, and the remedy.

    The command line prints it without a traceback and exits with ``EXIT_USER_ERROR``.
    """


class RanksMissing(UserError):
    """Ranks that did not come together: unlike other mistakes it is not the same on all of them, and rank 0 may not be there to
    tell it."""


class RunStopped(Exception):
    """Training ended on a signal, after saving, on every rank alike. ``exit_code`` is what the process should end with."""

    def __init__(self, exit_code: int, step: int) -> None:
        super().__init__(f"stopped by a signal after step {step}, which was saved")
        self.exit_code = exit_code
