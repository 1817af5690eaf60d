"""Serving: one engine behind network faces. `service` is what they share; each face is a package of its own."""
