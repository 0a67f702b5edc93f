"""Former options of `mirrorc.compile`, with what to write now; ``{value}`` stands for the value."""

from __future__ import annotations

from collections.abc import Mapping

FORMER: Mapping[str, str] = {
    "bucket_cap_mb": "give communication=mirrorc.Communication(buckets={value})",
    "first_bucket_mb": "give communication=mirrorc.Communication(buckets=mirrorc.packing.ByBytes(cap_mb, first_mb={value}))",
    "packing": "give communication=mirrorc.Communication(buckets=...), with mirrorc.packing.EqualPacks(n) for a number n",
    "gradient_order": "give communication=mirrorc.Communication(order={value})",
    "all_reduce": "give communication=mirrorc.Communication(algorithm={value})",
    "communication_options": (
        "give communication=mirrorc.Communication(buckets=bytes_per_pack / 2**20, timeout=..., algorithm='ring')"
    ),
    "timeout_seconds": "give communication=mirrorc.Communication(timeout={value})",
    "activation_memory": "give memory=mirrorc.Memory(activations=...), such as '50%', '2GiB' or a number of bytes",
    "add_passes": "give compiler=mirrorc.Compiler(add=...)",
    "disable_passes": "give compiler=mirrorc.Compiler(disable={value})",
    "print_after_all": "give debug=mirrorc.Debug(print_after='all')",
    "record": "the times of the last steps are always recorded; leave it out",
    "example_inputs": "call step.prepare(*batch) after mirrorc.compile()",
    "workers": "give distributed=False, to train in this process alone, or leave it out",
    "world": "call mirrorc.plan(model, batch, world={value}, rank=...), which gives the program of one of its workers",
    "rank": "call mirrorc.plan(model, batch, world=..., rank={value}), which gives the program of one worker",
    "overlap_next_step": "it gained nothing on any machine where it was measured; leave it out",
}
