"""The rules that the verifier checks: each is a function of a program that yields what breaks it."""

from mirrorc.verifier.rules.collectives import (
    all_replicas_take_part,
    buckets_in_flight_are_not_used,
    collectives_are_waited_for_once,
    collectives_mean_what_runs,
    every_collective_has_a_link,
    links_join_their_devices,
    nothing_is_written_in_flight,
)
from mirrorc.verifier.rules.dataflow import dataflow_is_kept
from mirrorc.verifier.rules.gradients import (
    every_bucket_is_packed_once,
    every_gradient_has_one_slot,
    every_gradient_is_packed_once,
    factors_are_not_variables,
    gradients_are_in_their_own_slots,
    regions_hold_operators_alone,
    regions_write_only_slots,
    replicas_factor_the_same_gradients,
    slots_are_disjoint,
    slots_are_given_for_their_gradients,
)
from mirrorc.verifier.rules.ordering import collectives_have_one_order, every_send_is_received, no_device_waits_for_ever
from mirrorc.verifier.rules.programs import Violation
from mirrorc.verifier.rules.tables import (
    arguments_are_in_order,
    graphs_are_those_of_the_stage,
    operations_have_their_arguments,
    references_lead_somewhere,
    slots_fit_their_variables,
    tables_are_kept,
)
from mirrorc.verifier.rules.updates import (
    every_bucket_is_updated_once,
    reductions_fit_the_placement,
    shared_parameters_are_written_last,
    variables_are_written_after_reads,
)
from mirrorc.verifier.rules.values import (
    every_operation_is_known,
    graphs_are_well_formed,
    replicas_meet_only_in_collectives,
    results_are_each_replicas_own,
    values_have_their_types,
)

__all__ = [
    "Violation",
    "all_replicas_take_part",
    "arguments_are_in_order",
    "buckets_in_flight_are_not_used",
    "collectives_are_waited_for_once",
    "collectives_have_one_order",
    "collectives_mean_what_runs",
    "dataflow_is_kept",
    "every_bucket_is_packed_once",
    "every_bucket_is_updated_once",
    "every_collective_has_a_link",
    "every_gradient_has_one_slot",
    "every_gradient_is_packed_once",
    "every_operation_is_known",
    "every_send_is_received",
    "factors_are_not_variables",
    "gradients_are_in_their_own_slots",
    "graphs_are_those_of_the_stage",
    "graphs_are_well_formed",
    "links_join_their_devices",
    "no_device_waits_for_ever",
    "nothing_is_written_in_flight",
    "operations_have_their_arguments",
    "reductions_fit_the_placement",
    "references_lead_somewhere",
    "regions_hold_operators_alone",
    "regions_write_only_slots",
    "replicas_factor_the_same_gradients",
    "replicas_meet_only_in_collectives",
    "results_are_each_replicas_own",
    "shared_parameters_are_written_last",
    "slots_are_disjoint",
    "slots_are_given_for_their_gradients",
    "slots_fit_their_variables",
    "tables_are_kept",
    "values_have_their_types",
    "variables_are_written_after_reads",
]
