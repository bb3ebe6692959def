"""The bench's results.jsonl: what is finished, and one more line at a time. Knows nothing of how a line came to be."""

import json
import os
from pathlib import Path
from typing import Any

FINISHED = ("ok", "oom")  # a failure is tried again by the next call


class Ledger:
    """Results by case and round. A line is written at once and whole, so that a kill leaves a file that can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.cut_off = self._drop_cut_off_line()
        self._lines: dict[tuple[str, int], dict[str, Any]] = {}
        for line in self._read():
            self._remember(line)

    def _drop_cut_off_line(self) -> bool:
        """Removes a last line that a power cut left unfinished: that round runs again. Says whether there was one."""
        data = self.path.read_bytes() if self.path.exists() else b""
        if not data or data.endswith(b"\n"):
            return False
        try:
            json.loads(data[data.rfind(b"\n") + 1 :])
        except ValueError:
            kept = data[: data.rfind(b"\n") + 1]
        else:
            kept = data + b"\n"
        replacement = self.path.with_suffix(".tmp")
        replacement.write_bytes(kept)
        os.replace(replacement, self.path)
        return len(kept) < len(data)

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = []
        for text in self.path.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # `report` names damaged lines; here they are rounds that have not been run
                continue
            if isinstance(line, dict):
                lines.append(line)
        return lines

    def _remember(self, line: dict[str, Any]) -> None:
        key, number = line.get("case_hash"), line.get("round")
        if isinstance(key, str) and isinstance(number, int):
            self._lines[key, number] = line

    def finished(self, case_hash: str, number: int) -> dict[str, Any] | None:
        """The line of a round that needs no further run."""
        line = self._lines.get((case_hash, number))
        return line if line and line.get("status") in FINISHED else None

    def out_of_memory(self, case_hash: str) -> bool:
        return any(key == case_hash and line.get("status") == "oom" for (key, _), line in self._lines.items())

    def append(self, line: dict[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._remember(line)
