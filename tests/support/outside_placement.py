"""A placement that the package does not have."""

from mirrorc.ir.variables import PlacementFacts

CENTRAL = PlacementFacts(
    word="central",
    in_table="central",
    description="one copy of the parameters, which the first device updates",
    owner=lambda replica: 0,
    share=lambda num_elements, replica, num_replicas, owner: (0, 0 if replica else num_elements),
    updates_by_shares=False,
    is_written_last=True,
)
