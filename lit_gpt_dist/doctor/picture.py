"""The sweep as a picture: bus bandwidth over size, a panel per backend and number of ranks."""

from collections.abc import Sequence
from pathlib import Path

from lit_gpt_dist.doctor.bandwidth import COLLECTIVES
from lit_gpt_dist.doctor.collectives import Timing


def draw(timings: Sequence[Timing], path: Path) -> None:
    """Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = sorted({(timing.backend, timing.ranks) for timing in timings})
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False)
    for axis, (backend, ranks) in zip(axes[0], panels, strict=True):
        for name in COLLECTIVES:
            points = [
                (timing.size_bytes, timing.busbw / 1e9)
                for timing in timings
                if (timing.backend, timing.ranks, timing.collective) == (backend, ranks, name)
                and timing.busbw is not None
            ]
            if points:
                axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name.replace("_", "-"))
        axis.set(
            xscale="log", xlabel="larger buffer, bytes", ylabel="bus bandwidth, GB/s", title=f"{backend}, {ranks} ranks"
        )
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
