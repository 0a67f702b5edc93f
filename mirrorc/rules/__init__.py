"""The rules that the verifier checks: each is a function of a program that yields what breaks it."""

from mirrorc.rules.collectives import (
    all_replicas_take_part,
    buckets_in_flight_are_not_used,
    collectives_are_waited_for_once,
    collectives_have_one_order,
    collectives_mean_what_runs,
    every_collective_has_a_link,
    no_device_waits_for_ever,
)
from mirrorc.rules.gradients import (
    every_bucket_is_packed_once,
    every_gradient_has_one_slot,
    every_gradient_is_packed_once,
    gradients_are_in_their_own_slots,
    graphs_are_well_formed,
    slots_are_disjoint,
    slots_are_given_for_their_gradients,
)
from mirrorc.rules.updates import (
    every_bucket_is_updated_once,
    reductions_fit_the_placement,
    shared_parameters_are_written_last,
    variables_are_written_after_reads,
)

__all__ = [
    "all_replicas_take_part",
    "buckets_in_flight_are_not_used",
    "collectives_are_waited_for_once",
    "collectives_have_one_order",
    "collectives_mean_what_runs",
    "every_bucket_is_packed_once",
    "every_bucket_is_updated_once",
    "every_collective_has_a_link",
    "every_gradient_has_one_slot",
    "every_gradient_is_packed_once",
    "gradients_are_in_their_own_slots",
    "graphs_are_well_formed",
    "no_device_waits_for_ever",
    "reductions_fit_the_placement",
    "shared_parameters_are_written_last",
    "slots_are_disjoint",
    "slots_are_given_for_their_gradients",
    "variables_are_written_after_reads",
]
