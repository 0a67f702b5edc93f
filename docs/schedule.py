"""Draws one recorded step as schedule.svg, the picture of the README: python docs/schedule.py"""

from __future__ import annotations

import tempfile
from pathlib import Path

import jinja2
import torch
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.report.page import read_report
from mirrorc.report.picture import picture_of

_COLORS = {
    "forward": "#4c8dd6",
    "backward": "#8f6bd1",
    "pack": "#2a9d8f",
    "launch": "#d98a00",
    "update": "#4b9c4b",
    "moving": "#e6a15c",
    "late": "#c8442f",
    "filling": "#bfe0da",
    "idle": "#b9c0c8",
}
_INKS = dict.fromkeys(("filling", "idle", "moving"), "#000")
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="860" height="{{ picture.height + 24 }}" font-family="sans-serif" font-size="11">
<rect width="100%" height="100%" fill="#fff"/>
{% for label in picture.labels if label.text %}<text x="6" y="{{ label.y + label.height // 2 + 4 }}">{{ label.text }}</text>
{% endfor %}<svg x="50" width="800" height="{{ picture.height }}" overflow="visible">
{% for x, text in picture.ticks if x < 95 %}<text x="{{ x }}%" y="12" fill="#5b6570">{{ text }} ms</text>
{% endfor %}
{% for bar in picture.bars %}
<rect x="{{ bar.x }}%" y="{{ bar.y }}" width="{{ bar.width }}%" height="{{ bar.height }}"
fill="{{ colors.get(bar.style, "#98a2ad") }}"><title>{{ bar.title | e }}</title></rect>
{% if bar.width > 5 and bar.text %}
<text x="{{ bar.x }}%" dx="3" y="{{ bar.y + bar.height // 2 + 4 }}"
fill="{{ inks.get(bar.style, "#fff") }}">{{ bar.text | e }}</text>
{% endif %}{% endfor %}
<line x1="{{ commit }}%" x2="{{ commit }}%" y1="18" y2="{{ picture.height }}" stroke="#d6006c" stroke-width="2"/>
<text x="{{ commit }}%" dx="4" y="{{ picture.height + 12 }}" fill="#d6006c">commit</text>
</svg></svg>
"""


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, 1024)
    with (
        tempfile.TemporaryDirectory() as folder,
        mirrorc.compile(
            model,
            ["cpu:0", "cpu:1"],
            optimizer=optimizer,
            loss_fn=F.mse_loss,
            communication=mirrorc.Communication(buckets=4.0),
            compiler=mirrorc.Compiler(backend="eager"),
        ) as step,
    ):
        for _ in range(30):
            step(x, x)
        report = read_report(step.report(Path(folder) / "report.html"))
    picture = picture_of(report)
    assert picture.commit is not None
    template = jinja2.Template(_SVG, trim_blocks=True)
    text = template.render(picture=picture, colors=_COLORS, inks=_INKS, commit=picture.commit[0])
    Path(__file__).with_name("schedule.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
