"""Topologies from what machines and schedulers print; see ``planner.topology.importers.cluster``."""
