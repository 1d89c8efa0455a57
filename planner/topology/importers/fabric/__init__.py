"""Readers of Slurm's topology files and ibnetdiscover: what joins nodes."""
