"""Becomes the command it is given, after asking the kernel to end it with its parent.

Run as a file, before anything is imported: a benchmark that is killed outright must not leave a training run on the
cards. Linux only; elsewhere the command simply starts.
"""

import os
import signal
import sys


def main(command: list[str], parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1  # prctl(2); kept across execve
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went before the request was made
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[2:], int(sys.argv[1]))
