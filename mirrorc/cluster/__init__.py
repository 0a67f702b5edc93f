"""The workers that train together, one process each.

`find_place` reads their description: an initialised process group, torchrun's variables, or TF_CONFIG. `join` also
waits for all workers, and returns the `Cluster`.
"""

from __future__ import annotations

from mirrorc.cluster.joining import Cluster, find_place, join
from mirrorc.cluster.membership import Worker
from mirrorc.cluster.place import Place
from mirrorc.cluster.rounds import Round

__all__ = ["Cluster", "Place", "Round", "Worker", "find_place", "join"]
