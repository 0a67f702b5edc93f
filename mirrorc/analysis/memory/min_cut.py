"""Minimum cuts of networks."""

from __future__ import annotations

from collections import deque

UNCUTTABLE = 2**62
"""The capacity of an edge that no cut may contain."""


class Network:
    """A directed graph of numbered nodes with edge capacities; node 0 is the source, node 1 the sink."""

    def __init__(self, num_nodes: int) -> None:
        self._edges_of: list[list[int]] = [[] for _ in range(num_nodes)]
        self._ends: list[int] = []
        self._left: list[int] = []  # remaining capacities; the edge back is the next of each pair

    def join(self, start: int, end: int, capacity: int) -> None:
        self._edges_of[start].append(len(self._ends))
        self._edges_of[end].append(len(self._ends) + 1)
        self._ends += (end, start)
        self._left += (capacity, 0)

    def side_of_source(self) -> set[int]:
        """The source's side of the minimum cut nearest to the source."""
        while True:
            levels = self._levels()
            if levels[1] < 0:
                return {node for node, level in enumerate(levels) if level >= 0}
            self._saturate(levels)

    def _levels(self) -> list[int]:
        levels = [-1] * len(self._edges_of)
        levels[0] = 0
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges_of[node]:
                end = self._ends[edge]
                if self._left[edge] and levels[end] < 0:
                    levels[end] = levels[node] + 1
                    waiting.append(end)
        return levels

    def _saturate(self, levels: list[int]) -> None:
        tried = [0] * len(self._edges_of)
        way: list[int] = []
        node = 0
        while True:
            if node == 1:
                least = min(self._left[edge] for edge in way)
                for edge in way:
                    self._left[edge] -= least
                    self._left[edge ^ 1] += least
                way, node = [], 0
                continue
            onward = self._next_edge(node, levels, tried)
            if onward is not None:
                way.append(onward)
                node = self._ends[onward]
            elif not way:
                return
            else:
                back = way.pop()
                node = self._ends[back ^ 1]
                tried[node] += 1

    def _next_edge(self, node: int, levels: list[int], tried: list[int]) -> int | None:
        edges = self._edges_of[node]
        while tried[node] < len(edges):
            edge = edges[tried[node]]
            if self._left[edge] and levels[self._ends[edge]] == levels[node] + 1:
                return edge
            tried[node] += 1
        return None
