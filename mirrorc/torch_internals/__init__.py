# ruff: noqa: F401
"""Gives torch's private APIs names of mirrorc. A test fails when torch moves an API."""

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mirrorc.torch_internals.aot.joint_graph import JointGraph, NumberInput, checkpoint_tag
from mirrorc.torch_internals.distributed.process_groups import GlooGroup, NcclGroup
from mirrorc.torch_internals.fx.graphs import (
    Decompositions,
    add_node,
    lazy_graph_module,
    quiet_fake_tensors,
    traced_on_fake_tensors,
)
from mirrorc.torch_internals.fx.operators import (
    CHECKS_OF_TENSORS,
    assert_true,
    bare_name,
    copy_each,
    is_composite,
    is_operator,
    lazily_negative,
    norms_of_each,
    recorded_by_autograd,
    replaced_operators,
    scale_each,
    schema_of,
    subtract_each,
    with_overload,
    writes_argument,
)
from mirrorc.torch_internals.hooks.gradient_observers import observe_clipping, observe_zero_grad
from mirrorc.torch_internals.hooks.profiled_threads import is_profiled, seen_by_profiler
from mirrorc.torch_internals.hooks.settings import (
    UncountedHook,
    adagrad_is_fused_on_gpus,
    as_subclass,
    backward_keeps_graph,
    bare_step,
    caches_parametrizations,
    calls_step_hooks,
    current_backward,
    dispatch_modes,
    dividing_gradients,
    global_hook_tables,
    has_gradient_hooks,
    has_hooks_on_saved_tensors,
    has_step_hooks,
    has_torchs_step,
    hook_tables,
    is_dense,
    is_plain_thread,
    is_structured_trace_on,
    mark_optimizer_stepped,
    no_torch_function,
    parametrization_cache,
    runs_transform,
    takes_divisor,
    torch_modes,
    trace_artifact,
    without_dispatch_modes,
)
from mirrorc.torch_internals.hooks.special_modules import (
    ScriptCopy,
    forward_signature,
    is_script_module,
    object_within,
    renew_recurrent_weights,
    weights_for_cudnn,
)
from mirrorc.torch_internals.inductor.allocations import (
    inductor_wrapper,
    num_users,
    peak_allocation,
    storage_key,
    watched_operators,
)
from mirrorc.torch_internals.inductor.cpp_compiler import (
    fresh_kernel_files,
    kernel_folder,
    kernels_compiled_together,
    prepare_cpp_compiler,
)
from mirrorc.torch_internals.inductor.graph_compilation import (
    call_directly,
    compile_with_inductor,
    cpp_compiler,
    has_cpp_compiler,
    inductor_decompositions,
    keep_small_loops_small,
    pools_maxima,
    tells_places_of_maxima,
)
from mirrorc.torch_internals.numbers.drawn_numbers import is_drawn, torch_random
from mirrorc.torch_internals.numbers.number_trace import NumbersGivenUp, attribute_source, is_ordinary
from mirrorc.torch_internals.symbols.symbolic_sizes import (
    SavedSizes,
    SizesGivenUp,
    SizesOfArguments,
    SizeSymbol,
    assume_num_elements,
    dims_marked_by_user,
    environment_of,
    has_symbols,
    is_symbolic,
    knowledge_of,
    mark_symbolic,
    num_bytes_now,
    num_elements_now,
    raw_sizes_allowed,
    raw_symbols,
    size_key,
    size_now,
    size_of_key,
    sizes_key,
    sizes_now,
    storage_bytes_now,
    symbols_dispatched,
    symbols_in,
    symbols_of_environment,
    text_of_size,
    with_sizes_now,
)
from mirrorc.torch_internals.tracing.dynamo_guards import DynamoGuards, GuardsChange
from mirrorc.torch_internals.tracing.graph_interface import (
    ReadVariable,
    StandIns,
    give_values,
    module_variables,
    outside_tensors,
    outside_variables,
    read_from_module,
    reading_names,
    results_with_stand_ins,
)
from mirrorc.torch_internals.tracing.python_effects import PythonCall, PythonWrite
from mirrorc.torch_internals.tracing.source_names import SourceWords, in_users_words, source_words
from mirrorc.torch_internals.tracing.substituted_calls import (
    asked_for_class,
    called_while_traced,
    checked_autograd_functions,
    made_leaves,
    noted_calls,
    returned_out_arguments,
    traced_file,
    traced_instead,
)
from mirrorc.torch_internals.tracing.tracing import (
    export_graph,
    failing_node,
    guards_of,
    is_users_file,
    leaf_of_placeholder,
    python_effects_of,
    restored_tracing_state,
    trace_full_graph,
    traced_frames,
    user_frames,
)
