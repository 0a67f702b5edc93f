"""The meetings of replicas in forward and backward: what they make, and that a wait has a bound."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from broken_meetings import meeting_stages, met_by

from mirrorc.errors import CommunicationError
from mirrorc.ir import ops
from mirrorc.runtime.communication.rendezvous import Aborted
from mirrorc.runtime.communication.replica_values import ReplicaValues


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
