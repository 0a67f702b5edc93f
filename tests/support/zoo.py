"""The zoo of models in tests/zoo: its families, and the table of docs/reference/models.md."""

import importlib
from collections.abc import Iterator

from zoo_models import ZooModel

FAMILIES = {
    "hugging_face_text": "Text (Hugging Face)",
    "hugging_face_vision": "Pictures and films (Hugging Face)",
    "hugging_face_audio": "Sounds (Hugging Face)",
    "hugging_face_multimodal": "Several kinds of input (Hugging Face)",
    "mixtures": "Mixtures of experts",
    "state_spaces": "State spaces, linear attention and hybrids (Hugging Face)",
    "time_series": "Series of numbers (Hugging Face)",
    "recurrent_nets": "Recurrent nets",
    "detectors": "Detectors",
    "custom_nets": "Nets of one's own",
    "image_models": "Models of timm and torchvision",
}
"""From the files of the zoo to the headings of the table."""

BEGIN, END = "<!-- made by python tests/support/zoo_table.py -->", "<!-- end -->"


def models_of(family: str) -> list[ZooModel]:
    found: list[ZooModel] = importlib.import_module(family).MODELS
    return found


def table() -> str:
    """The models and the front end of each, as Markdown."""
    return "\n".join([BEGIN, *_lines(), END])


def _lines() -> Iterator[str]:
    entries = [entry for family in FAMILIES for entry in models_of(family)]
    by_rung = {
        rung: sum(entry.rung == rung for entry in entries) for rung in sorted({e.rung for e in entries}, reverse=True)
    }
    kinds = ", ".join(f"{count} by `{rung}`" for rung, count in by_rung.items())
    yield f"\n{len(entries)} models: {kinds}."
    for family, heading in FAMILIES.items():
        yield from (
            f"\n### {heading}\n",
            "| model | `capture=` | compared with one device | numbers | run by |",
            "|---|---|---|---|---|",
        )
        for entry in models_of(family):
            rung = f"`{entry.rung}`: {entry.why}" if entry.why else f"`{entry.rung}`"
            compared = f"shard by shard: {entry.couples}" if entry.couples else "whole batch"
            numbers = str(entry.dtype).removeprefix("torch.") + (f", {entry.narrow}" if entry.narrow else "")
            yield f"| {entry.name} | {rung} | {compared} | {numbers} | `make {entry.run_by}` |"
    yield ""
