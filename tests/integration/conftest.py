"""What several files of whole runs start from."""

import pytest
from helpers.checkpointing import fit, saver


@pytest.fixture(scope="session")
def whole(tmp_path_factory, text):
    """A run of 12 steps, saved at 4, 8 and 12, validated there too."""
    root = tmp_path_factory.mktemp("whole")
    callback = saver(keep_last=9)
    _, module, losses = fit(root, text, 12, callback)
    return root, module, losses
