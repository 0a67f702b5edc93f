"""OUTLINED to SCHEDULED: replication, packing, reduction and updates in one process."""
