"""Writes one self-contained HTML page, or one Markdown page with pictures beside it. Loads nothing from a network."""

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_gpt_dist.report.picture import Picture
from lit_gpt_dist.report.tables import Table

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;color:#1a1a1a;background:#fff}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #ddd;vertical-align:top}
th{border-bottom:2px solid #333}
th:first-child,td:first-child{text-align:left}
img{max-width:100%;height:auto;display:block;margin:1rem 0}
.note{color:#555;font-size:13px;margin:.3rem 0}
pre{background:#f5f5f5;padding:.8rem;overflow-x:auto;font-size:12px}
""".strip()


def html_page(
    title: str, tables: Sequence[Table], pictures: Sequence[Picture], facts: dict[str, Any], remarks: Sequence[str]
) -> str:
    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts += [f"<p class=note>{html.escape(remark)}</p>" for remark in remarks]
    parts += [table.without_empty_columns().html() for table in tables]
    for picture in pictures:
        data = base64.b64encode(picture.svg()).decode()
        parts.append(
            f'<h2>{html.escape(picture.title)}</h2><img alt="{html.escape(picture.title)}" src="data:image/svg+xml;base64,{data}">'
        )
    if facts:
        parts.append(f"<h2>Environment</h2><pre>{html.escape(_facts_text(facts))}</pre>")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def markdown_page(
    title: str,
    tables: Sequence[Table],
    pictures: Sequence[Picture],
    facts: dict[str, Any],
    remarks: Sequence[str],
    picture_folder: str,
) -> str:
    """The page as Markdown; pictures are named as PNG files under ``picture_folder``, relative to the page."""
    parts = [f"# {title}", "", *(f"{remark}\n" for remark in remarks)]
    parts += [table.without_empty_columns().markdown() for table in tables]
    for picture in pictures:
        parts.append(f"## {picture.title}\n\n![{picture.title}]({picture_folder}/{picture.name}.png)\n")
    if facts:
        parts.append(f"## Environment\n\n```\n{_facts_text(facts)}\n```\n")
    return "\n".join(parts)


def _facts_text(facts: dict[str, Any]) -> str:
    lines = []
    for name, value in facts.items():
        if isinstance(value, list):
            value = "\n".join(map(str, value))
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        indented = "\n    ".join(text.strip().split("\n"))
        lines.append(f"{name}:\n    {indented}" if "\n" in text.strip() else f"{name}: {indented}")
    return "\n".join(lines)


def write_pictures(pictures: Sequence[Picture], folder: Path, formats: Sequence[str]) -> list[Path]:
    """PNG and SVG files of every picture, as asked."""
    written = []
    for picture in pictures:
        for form in formats:
            path = folder / f"{picture.name}.{form}"
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture.png() if form == "png" else picture.svg())
            written.append(path)
    return written


def write_tensorboard(pictures: Sequence[Picture], folder: Path) -> None:
    """The pictures as images of a TensorBoard run in ``folder``."""
    import io

    import numpy as np
    from matplotlib.image import imread
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for picture in pictures:
            pixels = imread(io.BytesIO(picture.png()), format="png")[..., :3]  # (height, width, rgb), 0 to 1
            writer.add_image(f"report/{picture.name}", np.ascontiguousarray(pixels), 0, dataformats="HWC")
