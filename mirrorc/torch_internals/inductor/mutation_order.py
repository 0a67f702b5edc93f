"""Order of kernels that read a buffer and of those that write it in place."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def keep_mutation_order() -> None:
    """Corrects the order of kernels, in this process and for all who use Inductor.

    A kernel that reads a buffer after a write in place depends on the write, by another name of the buffer, or by a dependency
    added for it. When Inductor computes loops anew to fuse kernels, it takes both from what the loops read, which knows
    neither: the kernel may then run before the write (pytorch#185509, pytorch#177631).
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode

    original = SchedulerNode.recompute_size_and_body

    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
        added = [dependency for dependency in self.read_writes.reads if isinstance(dependency, StarDep | WeakDep)]
        original(self, *args, **kwargs)
        for dependency in added:
            self.add_fake_dep(dependency)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_size_and_body  # type: ignore[method-assign]
