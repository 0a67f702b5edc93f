"""Saves programs to files and loads them again.

A file is one JSON object, data only, compressed with gzip if its name ends in ``.gz``::

    {"format": "mirrorc program", "version": 15, "mirrorc": VERSION, "torch": VERSION,
     "program": {FIELD: ...},            the fields of `mirrorc.ir.program.Program`
     "tables": {TABLE: [...]}}           what nodes refer to, see `mirrorc.serialization.graph_data`

The same program gives the same bytes, in every process. Loading runs no code of the file: operators are looked up by name among
registered ones, and values are fake tensors.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from mirrorc.ir.program import Program, Region
from mirrorc.messages.problem import problem
from mirrorc.serialization.graph_data import GraphReader, GraphWriter
from mirrorc.serialization.operator_names import UnknownOperatorError
from mirrorc.serialization.plain_data import DataError, expect, expect_identifier
from mirrorc.serialization.record_data import check_keys, decode_record, encode_record, field_types
from mirrorc.serialization.whole_file import write_whole
from mirrorc.torch_internals import lazy_graph_module

FORMAT = "mirrorc program"
VERSION = 15
"""The format's version; it increases with every change that older readers cannot read."""

_GRAPHS = ("shard_graphs", "graph", "device_graphs", "regions")  # fields of a program that records cannot hold
_GZIP_MAGIC = b"\x1f\x8b"


def save_program(program: Program, path: str | os.PathLike[str]) -> None:
    """Writes a whole file or none; see `Program.save`."""
    path = Path(path)
    try:
        data = _encode_program(program)
    except DataError as error:
        raise problem(ValueError, f"MC7101: cannot save the program to {path}", str(error)) from error
    write_whole(path, (json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n").encode("ascii"))


def load_program(path: str | os.PathLike[str]) -> Program:
    """See `Program.load`."""
    path = Path(path)
    data = _read(path)
    try:
        return _decode_program(data)
    except UnknownOperatorError as error:
        raise problem(
            ValueError,
            f"MC7102: cannot load {path}",
            str(error),
            (
                "import the library that registers it first; on the command line, --import MODULE",
                *_other_torch(data["torch"]),
            ),
        ) from error
    except (DataError, RecursionError) as error:
        raise problem(
            ValueError, f"MC7102: cannot load {path}, it is damaged", str(error), "save the program again"
        ) from error


_FIX = "give a file that Program.save has written"


def _other_torch(written_with: str) -> tuple[str, ...]:
    if written_with == str(torch.__version__):
        return ()
    return (f"use torch {_version(written_with)}, which has written the file; this is torch {torch.__version__}",)


def _version(version: Any) -> str:
    return version if type(version) is str and re.fullmatch(r"[\w.+-]{1,40}", version) else f"{version!r:.40}"


def _read(path: Path) -> dict[str, Any]:
    encoded = path.read_bytes()
    if _is_torch_checkpoint(path, encoded):
        raise problem(ValueError, f"MC7102: cannot load {path}: this is a torch checkpoint, not a program", fix=_FIX)
    try:
        if encoded.startswith(_GZIP_MAGIC):
            encoded = _decompressed(encoded)
        data = json.loads(encoded)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise problem(
            ValueError, f"MC7102: cannot load {path}: it is not JSON, or not all of it", str(error), _FIX
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise problem(ValueError, f"MC7102: cannot load {path}: it is JSON, but no mirrorc program", fix=_FIX)
    version = data.get("version")
    if type(version) is int and version > VERSION:
        raise problem(
            ValueError,
            f"MC7102: cannot load {path}: it has version {version} of the format, this mirrorc reads up to {VERSION}",
            fix=f"use mirrorc {_version(data.get('mirrorc'))}, which has written it, or later",
        )
    if type(version) is int and 0 < version < VERSION:
        raise problem(
            ValueError,
            f"MC7102: cannot load {path}: it has version {version} of the format, this mirrorc reads version {VERSION}",
            fix=("save the program again", f"use mirrorc {_version(data.get('mirrorc'))}, which has written it"),
        )
    return data


def _is_torch_checkpoint(path: Path, encoded: bytes) -> bool:
    if not encoded.startswith(b"PK") or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/data.pkl") for name in archive.namelist())


_ALWAYS_READ = 2**24
_MOST_EXPANSION = 100  # programs are compressed to a tenth or so; gzip can make a thousandth of zeros


def _decompressed(encoded: bytes) -> bytes:
    """Bounded, against decompression bombs."""
    most = _ALWAYS_READ + _MOST_EXPANSION * len(encoded)
    with gzip.GzipFile(fileobj=io.BytesIO(encoded)) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(
            f"it decompresses to more than {most >> 20} MiB, which no program of {len(encoded)} bytes does"
        )
    return content


def _encode_program(program: Program) -> dict[str, Any]:
    writer = GraphWriter()
    regions = {name: _encode_region(region, writer) for name, region in program.regions.items()}
    fields: dict[str, Any] = {
        name: encode_record(getattr(program, name), kind, name)
        for name, kind in field_types(Program).items()
        if name not in _GRAPHS
    }
    fields["regions"] = regions
    fields["shard_graphs"] = [writer.encode(graph, f"shard graph {i}") for i, graph in enumerate(program.shard_graphs)]
    fields["graph"] = writer.encode(program.graph, "the mirrored graph") if program.graph is not None else None
    fields["device_graphs"] = {
        name: _encode_module(module, f"the graph of {name}", writer, _regions_in(module, program.regions))
        for name, module in program.device_graphs.items()
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "mirrorc": importlib.metadata.version("mirrorc"),
        "torch": str(torch.__version__),
        "program": fields,
        "tables": writer.tables(),
    }


def _encode_region(region: Region, writer: GraphWriter) -> dict[str, Any]:
    body = _encode_module(region.graph_module, f"region {region.name}", writer)
    return {"name": region.name, "phase": region.phase, **body}


def _encode_module(
    module: fx.GraphModule, where: str, writer: GraphWriter, regions: Collection[str] = ()
) -> dict[str, Any]:
    class_name = expect_identifier(type(module).__name__, f"the class name of {where}")
    return {"class_name": class_name, "nodes": writer.encode(module.graph, where, regions)}


def _regions_in(module: fx.GraphModule, regions: Mapping[str, Region]) -> set[str]:
    return {name for name, m in module.named_children() if name in regions and regions[name].graph_module is m}


def _decode_program(data: dict[str, Any]) -> Program:
    check_keys(data, dict.fromkeys(("format", "version", "mirrorc", "torch", "program", "tables")), "the file")
    for name, kind in (("version", int), ("mirrorc", str), ("torch", str)):
        expect(data[name], kind, name)
    if data["version"] < 1:
        raise DataError(f"there is no version {data['version']}")
    reader = GraphReader(data["tables"])
    kinds, fields = field_types(Program), data["program"]
    check_keys(fields, kinds, "the program")
    regions = {name: _decode_region(item, name, reader) for name, item in _items(fields, "regions")}
    graphs = enumerate(expect(fields["shard_graphs"], list, "shard_graphs"))
    return Program(
        **{name: decode_record(fields[name], kind, name) for name, kind in kinds.items() if name not in _GRAPHS},
        regions=regions,
        shard_graphs=tuple(reader.decode(item, f"shard graph {i}") for i, item in graphs),
        graph=reader.decode(fields["graph"], "the mirrored graph") if fields["graph"] is not None else None,
        device_graphs={
            name: _decode_module(item, f"the graph of {name}", reader, regions)
            for name, item in _items(fields, "device_graphs")
        },
    )


def _items(fields: dict[str, Any], name: str) -> Collection[tuple[str, Any]]:
    items: dict[str, Any] = expect(fields[name], dict, name)
    return items.items()


def _decode_region(data: Any, name: str, reader: GraphReader) -> Region:
    check_keys(data, dict.fromkeys(("name", "phase", "class_name", "nodes")), f"region {name}")
    body = {key: data[key] for key in ("class_name", "nodes")}
    return Region(
        expect(data["name"], str, f"the name of region {name}"),
        expect(data["phase"], str, f"the phase of region {name}"),
        _decode_module(body, f"region {name}", reader, {}),
    )


def _decode_module(data: Any, where: str, reader: GraphReader, regions: Mapping[str, Region]) -> fx.GraphModule:
    check_keys(data, dict.fromkeys(("class_name", "nodes")), where)
    class_name = expect_identifier(data["class_name"], f"the class name of {where}")
    graph = reader.decode(data["nodes"], where, regions)
    root = nn.Module()
    for node in graph.nodes:
        if node.op == "call_module":
            root.add_module(str(node.target), regions[str(node.target)].graph_module)
    try:
        return lazy_graph_module(root, graph, class_name)
    except Exception as error:  # torch.fx turns the graph into Python code, which these nodes may not give
        raise DataError(f"{where} makes no module ({type(error).__name__}: {error})") from error
