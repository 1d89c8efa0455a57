"""Readers of NCCL's and hwloc's XML: trees of devices."""
