"""Every private API of torch that mirrorc uses, each behind a name of ours; a test calls each and fails when one moves."""

from __future__ import annotations

from mirrorc.torch_internals.allocations import (
    inductor_wrapper,
    num_users,
    peak_allocation,
    storage_key,
    watched_operators,
)
from mirrorc.torch_internals.asserts import CHECKS_OF_TENSORS, assert_true
from mirrorc.torch_internals.checkpoint_tags import checkpoint_tag
from mirrorc.torch_internals.cpp_compiler import kernels_compiled_together, prepare_cpp_compiler
from mirrorc.torch_internals.direct_calls import call_directly
from mirrorc.torch_internals.drawn_numbers import is_drawn, one_of_torchs
from mirrorc.torch_internals.given_results import given_results
from mirrorc.torch_internals.gloo import GlooGroup
from mirrorc.torch_internals.gradient_clipping import observe_clipping
from mirrorc.torch_internals.graph_inputs import (
    ReadVariable,
    outside_tensors,
    outside_variables,
    own_variables,
    read_from_module,
    reading_names,
)
from mirrorc.torch_internals.graph_results import StandIns, give_values, results_with_stand_ins
from mirrorc.torch_internals.graphs import (
    FakeTensor,
    FakeTensorMode,
    add_node,
    lazy_graph_module,
    quiet_fake_tensors,
    traced_on_fake_tensors,
)
from mirrorc.torch_internals.guards import DynamoGuards, GuardsChange
from mirrorc.torch_internals.host_numbers import NumbersGivenUp, attribute_source, is_ordinary
from mirrorc.torch_internals.inductor import compile_with_inductor, has_cpp_compiler, inductor_decompositions
from mirrorc.torch_internals.joint_graph import JointGraph, ToldNumber
from mirrorc.torch_internals.kernel_files import fresh_kernel_files
from mirrorc.torch_internals.made_leaves import made_leaves
from mirrorc.torch_internals.nccl import NcclGroup
from mirrorc.torch_internals.operators import (
    bare_name,
    copy_each,
    is_composite,
    is_operator,
    lazily_negative,
    norms_of_each,
    replaced_operators,
    scale_each,
    schema_of,
    subtract_each,
    with_overload,
    writes_argument,
)
from mirrorc.torch_internals.profiled_threads import is_profiled, seen_by_profiler
from mirrorc.torch_internals.python_effects import PythonCall, PythonWrite
from mirrorc.torch_internals.recurrent_weights import renew_recurrent_weights
from mirrorc.torch_internals.source_words import SourceWords, in_users_words, source_words
from mirrorc.torch_internals.state import (
    UncountedHook,
    bare_step,
    calls_step_hooks,
    dividing_gradients,
    global_hook_tables,
    has_gradient_hooks,
    has_step_hooks,
    has_torchs_step,
    hook_tables,
    is_dense,
    is_plain_thread,
    is_structured_trace_on,
    mark_optimizer_stepped,
    takes_divisor,
    torch_modes,
    trace_artifact,
)
from mirrorc.torch_internals.substituted_calls import asked_for_class, noted_calls, traced_file, traced_instead
from mirrorc.torch_internals.tracing import (
    export_forward_graph,
    export_joint_graph,
    failing_node,
    guards_of,
    is_users_file,
    kept_tracing_state,
    leaf_of_placeholder,
    python_effects_of,
    trace_full_graph,
    traced_frames,
    user_frames,
)
from mirrorc.torch_internals.zeroed_gradients import observe_zero_grad

__all__ = [
    "CHECKS_OF_TENSORS",
    "DynamoGuards",
    "FakeTensor",
    "FakeTensorMode",
    "GlooGroup",
    "GuardsChange",
    "JointGraph",
    "NcclGroup",
    "NumbersGivenUp",
    "PythonCall",
    "PythonWrite",
    "ReadVariable",
    "SourceWords",
    "StandIns",
    "ToldNumber",
    "UncountedHook",
    "add_node",
    "asked_for_class",
    "assert_true",
    "attribute_source",
    "bare_name",
    "bare_step",
    "call_directly",
    "calls_step_hooks",
    "checkpoint_tag",
    "compile_with_inductor",
    "copy_each",
    "dividing_gradients",
    "export_forward_graph",
    "export_joint_graph",
    "failing_node",
    "fresh_kernel_files",
    "give_values",
    "given_results",
    "global_hook_tables",
    "guards_of",
    "has_cpp_compiler",
    "has_gradient_hooks",
    "has_step_hooks",
    "has_torchs_step",
    "hook_tables",
    "in_users_words",
    "inductor_decompositions",
    "inductor_wrapper",
    "is_composite",
    "is_dense",
    "is_drawn",
    "is_operator",
    "is_ordinary",
    "is_plain_thread",
    "is_profiled",
    "is_structured_trace_on",
    "is_users_file",
    "kept_tracing_state",
    "kernels_compiled_together",
    "lazily_negative",
    "lazy_graph_module",
    "leaf_of_placeholder",
    "made_leaves",
    "mark_optimizer_stepped",
    "norms_of_each",
    "noted_calls",
    "num_users",
    "observe_clipping",
    "observe_zero_grad",
    "one_of_torchs",
    "outside_tensors",
    "outside_variables",
    "own_variables",
    "peak_allocation",
    "prepare_cpp_compiler",
    "python_effects_of",
    "quiet_fake_tensors",
    "read_from_module",
    "reading_names",
    "renew_recurrent_weights",
    "replaced_operators",
    "results_with_stand_ins",
    "scale_each",
    "schema_of",
    "seen_by_profiler",
    "source_words",
    "storage_key",
    "subtract_each",
    "takes_divisor",
    "torch_modes",
    "trace_artifact",
    "trace_full_graph",
    "traced_file",
    "traced_frames",
    "traced_instead",
    "traced_on_fake_tensors",
    "user_frames",
    "watched_operators",
    "with_overload",
    "writes_argument",
]
