"""An operator that torch does not define, and whose result depends on how its argument lies in memory."""

import torch

_LIBRARY = torch.library.Library("mirrorc_tests", "FRAGMENT")
_LIBRARY.define("first_in_memory(Tensor x, int n) -> Tensor")
_LIBRARY.impl("first_in_memory", lambda x, n: torch.as_strided(x, (n,), (1,)).clone(), "CPU")
torch.library.register_fake("mirrorc_tests::first_in_memory", lambda x, n: x.new_empty(n), lib=_LIBRARY)

first_in_memory = torch.ops.mirrorc_tests.first_in_memory.default
"""The first ``n`` elements of a tensor in the order of memory, whatever its strides."""
