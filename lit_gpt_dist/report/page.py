"""Writes one self-contained HTML page, or one Markdown page with pictures beside it. Loads nothing from a network."""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_gpt_dist.report.picture import Picture
from lit_gpt_dist.report.table import Table

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


@dataclass(frozen=True)
class Page:
    """What a page shows, in this order: remarks, tables, pictures, the environment."""

    title: str
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    facts: dict[str, Any]
    remarks: Sequence[str]

    def html(self) -> str:
        """One file with everything in it."""
        title = html.escape(self.title)
        parts = [f"<h1>{title}</h1>", *(f"<p class=note>{html.escape(remark)}</p>" for remark in self.remarks)]
        parts += [table.without_empty_columns().html() for table in self.tables]
        parts += [_embedded(picture) for picture in self.pictures]
        if self.facts:
            parts.append(f"<h2>Environment</h2><pre>{html.escape(_facts_text(self.facts))}</pre>")
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
        body = "\n".join(parts)
        return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'

    def markdown(self, picture_folder: str) -> str:
        """The same as Markdown; pictures are PNG files in ``picture_folder``, relative to the page."""
        parts = [f"# {self.title}", "", *(f"{remark}\n" for remark in self.remarks)]
        parts += [table.without_empty_columns().markdown() for table in self.tables]
        for p in self.pictures:
            parts.append(f"## {p.title}\n\n![{p.title}]({picture_folder}/{p.name}.png)\n")
            parts += [f"{p.note}\n"] if p.note else []
        if self.facts:
            parts.append(f"## Environment\n\n```\n{_facts_text(self.facts)}\n```\n")
        return "\n".join(parts)


def _embedded(picture: Picture) -> str:
    title, data = html.escape(picture.title), base64.b64encode(picture.svg).decode()
    note = f"<p class=note>{html.escape(picture.note)}</p>" if picture.note else ""
    return f'<h2>{title}</h2><img alt="{title}" src="data:image/svg+xml;base64,{data}">{note}'


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
            path.write_bytes(picture.png() if form == "png" else picture.svg)
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
