"""The benchmark of sparse tables compares what it says: rows that are sent beside whole tables."""

import pytest
import sparse_tables

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to


@pytest.mark.slow
@pytest.mark.parametrize("lookups", [20, 200])
def test_rows_are_sent_within_the_bound_of_the_pass_and_beyond(lookups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_tables, "ROWS", 400)
    sent = {}
    for kind in sparse_tables.KINDS:
        with sparse_tables.compiled(kind, "SGD", 2, "eager") as step:
            step(*sparse_tables.batches_of(lookups)[0])
            graphs = [module.graph for module in step.program.device_graphs.values()]
            sent[kind] = {
                target.__name__: sum(1 for graph in graphs for _ in calls_to(graph, target))
                for target in (ops.store_rows, ops.store)
            }
    assert sent == {"rows": {"store_rows": 1, "store": 0}, "whole table": {"store_rows": 0, "store": 1}}
