"""The meetings of replicas in forward and backward: what they make, and that a wait has a bound."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from broken_meetings import meeting_stages, met_by

from mirrorc.custom_ops.replica_collectives import GATHER, ROWS_OF_SUM, SUM
from mirrorc.errors import CommunicationError, ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.runtime.communication.rendezvous import Aborted
from mirrorc.runtime.communication.replica_values import PlainExchanges, ReplicaValues


def test_each_replica_gets_what_all_values_make() -> None:
    program = meeting_stages(7)["lower-devices"]
    values = ReplicaValues(program, timeout_seconds=60)
    given = [torch.arange(20.0).view(4, 5), torch.arange(15.0).view(3, 5)]
    for kind, left, made in (
        (ops.rows_of_replicas, given, [torch.cat(given)] * 2),
        (ops.own_rows_of_sum, [torch.cat(given)] * 2, [2 * given[0], 2 * given[1]]),
        (ops.sum_over_replicas, [given[0][0], given[1][0]], [given[0][0] + given[1][0]] * 2),
    ):
        nodes = [met_by(program, replica, kind)[0] for replica in (0, 1)]
        for replica, value in enumerate(left):
            kept = value.clone()
            values.arrive(nodes[replica], replica, kept)
            kept.fill_(torch.nan)  # its next region may write there
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(values.leave, nodes, (0, 1)))
        assert all(map(torch.equal, found, made))
        assert found[0].data_ptr() != found[1].data_ptr()


def test_a_replica_waits_no_longer_than_its_bound_and_is_woken_by_a_failure() -> None:
    program = meeting_stages()["lower-devices"]
    node = met_by(program, 0)[0]
    values = ReplicaValues(program, timeout_seconds=0.01)
    values.arrive(node, 0, torch.ones(5))
    with pytest.raises(CommunicationError, match=r"cpu:0 waited 0.01 s in sum_over_replicas 0 of the model for cpu:1"):
        values.leave(node, 0)
    values = ReplicaValues(program, timeout_seconds=60)
    values.arrive(node, 0, torch.ones(5))
    values.abort()
    with pytest.raises(Aborted):
        values.leave(node, 0)


DEVICES = [Device(f"cpu:{number}", torch.device("cpu")) for number in range(3)]


def results(exchanges: PlainExchanges, *arrivals: Any) -> list[torch.Tensor]:
    with ThreadPoolExecutor(2) as threads:
        futures = [
            threads.submit(exchanges.of(replica).meet_at, *arrival)
            for replica, arrival in zip((0, 2), arrivals, strict=True)
        ]
        errors = [future.exception(60) for future in futures]
        assert errors == [None, None] or all(isinstance(error, ExecutionError) for error in errors)
        return [future.result() for future in futures]


def test_each_replica_of_plain_pytorch_gets_what_all_values_make() -> None:
    exchanges = PlainExchanges(DEVICES, (0, 2), timeout_seconds=60)
    first, other = torch.arange(4.0).view(2, 2), torch.arange(6.0).view(3, 2)
    both = torch.cat([first, other])
    assert all(made.equal(both) for made in results(exchanges, ("a", GATHER, first, 0), ("a", GATHER, other, 0)))
    assert all(made.equal(first + 1) for made in results(exchanges, ("b", SUM, first, 0), ("b", SUM, first * 0 + 1, 0)))
    rows = results(exchanges, ("c", ROWS_OF_SUM, both, 2), ("c", ROWS_OF_SUM, both, 3))
    assert all(map(torch.equal, rows, (2 * first, 2 * other)))
    with pytest.raises(ExecutionError, match="cpu:0 came to a line, and cpu:2 to another"):
        results(exchanges, ("a line", SUM, first, 0), ("another", SUM, first, 0))


def test_a_replica_of_plain_pytorch_waits_no_longer_than_its_bound_and_is_woken_by_a_failure() -> None:
    exchanges = PlainExchanges(DEVICES, (0, 2), timeout_seconds=0.01)
    with pytest.raises(CommunicationError, match=r"cpu:0 waited 0.01 s in a line for cpu:2"):
        exchanges.of(0).meet_at("a line", SUM, torch.ones(2), 0)
    exchanges = PlainExchanges(DEVICES, (0, 2), timeout_seconds=60)
    exchanges.abort()
    with pytest.raises(Aborted):
        exchanges.of(0).meet_at("a line", SUM, torch.ones(2), 0)
