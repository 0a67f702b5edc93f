"""The workers that train together, one process each.

`join` reads their description (an initialised process group, torchrun's variables, or TF_CONFIG), waits for the others, and
returns this worker's place; `find_place` only reads.
"""

from __future__ import annotations

from mirrorc.cluster.joining import Cluster, find_place, join
from mirrorc.cluster.membership import Worker
from mirrorc.cluster.place import Place
from mirrorc.cluster.rounds import Round

__all__ = ["Cluster", "Place", "Round", "Worker", "find_place", "join"]
