"""The pictures of docs/compiler/all-reduce.md are those of the graphs, and its costs those that are counted."""

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from mirrorc.all_reduce_algorithms import ALGORITHMS, HierarchicalCopy, RoundRobin
from mirrorc.analysis.cost.message_costs import message_costs, messages
from mirrorc.passes.all_reduce.__main__ import NUM_ELEMENTS, main, pictures
from mirrorc.passes.all_reduce.sketch import message_picture, sketched

DOCS = Path(__file__).parents[3] / "docs" / "compiler"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow
def test_the_pictures_are_those_of_the_graphs(tmp_path: Path) -> None:
    """Otherwise run: python -m mirrorc.passes.all_reduce docs/compiler/all-reduce"""
    main(tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == pictures() == {path.name: path.read_text() for path in (DOCS / "all-reduce").iterdir()}
    page = (DOCS / "all-reduce.md").read_text()
    shown = set(re.findall(r"\(all-reduce/([\w-]+\.svg)\)", page))
    assert shown == {*drawn}


def test_a_picture_has_a_lane_for_each_device_and_an_arrow_for_each_message() -> None:
    program = sketched(HierarchicalCopy(), 5, NUM_ELEMENTS)
    picture = ET.fromstring(message_picture(program))
    lines = picture.findall(f"{SVG}line")
    arrows = [line for line in lines if "marker-end" in line.attrib]
    assert len(lines) - len(arrows) == 5 and len(arrows) == len(messages(program)) == 3 + 2 + 3
    texts = [text.text for text in picture.findall(f"{SVG}text")]
    assert texts[:1] == ["cpu:0"] and texts.count("all") == 8 and texts[-1] == "done after the time of 5 buckets"
    assert sum(line.attrib["marker-end"] == "url(#whole)" for line in arrows) == 3


def test_a_picture_of_several_buckets_says_which_an_arrow_moves() -> None:
    picture = ET.fromstring(message_picture(sketched(RoundRobin(), 3, NUM_ELEMENTS, num_buckets=2)))
    ends: dict[str, set[str]] = {"all of 0": set(), "all of 1": set()}
    arrows = [line for line in picture.findall(f"{SVG}line") if "marker-end" in line.attrib]
    texts = [text for text in picture.findall(f"{SVG}text") if text.text in ends]
    for line, text in zip(arrows, texts, strict=True):
        if line.attrib["marker-end"] == "url(#partial)":
            ends[str(text.text)].add(line.attrib["x2"])
    assert [len(own) for own in ends.values()] == [1, 2], (
        "device 0 adds up bucket 0, and device 1, in the middle, bucket 1"
    )


@pytest.mark.slow
def test_the_table_of_costs_is_what_graphs_cost() -> None:
    page = (DOCS / "all-reduce.md").read_text().replace("⌈log₂ N⌉", "L").replace("log₂ N", "L")
    for num_devices in (4, 8):
        found = {}
        for names, *cells in re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE):
            numbers = [_number(cell, num_devices) for cell in cells]
            found |= {name: numbers for name in re.findall(r"`([\w-]+)`", names) if name in ALGORITHMS}
        assert {*found} == {*ALGORITHMS} - {"native", "auto"}
        for name, numbers in found.items():
            costs, size = message_costs(sketched(ALGORITHMS[name](), num_devices, NUM_ELEMENTS)), 4 * NUM_ELEMENTS
            counted = [
                max(costs.bytes_sent) / size, max(costs.num_messages), costs.path_messages, costs.path_bytes / size,
            ]  # fmt: skip
            assert numbers == counted, name


def _number(text: str, num_devices: int) -> float:
    text = text.replace("\N{MINUS SIGN}", "-").removesuffix(" B").replace("2 (", "2*(").replace("2 L", "2*L")
    return float(eval(text, {"N": num_devices, "L": math.ceil(math.log2(num_devices))}))
