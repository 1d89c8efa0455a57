"""Topologies from what machines and schedulers print; ``cluster`` is where to begin."""
