"""Capacity: what an engine would take on a device that need not be at hand, by arithmetic and by its compiler."""
