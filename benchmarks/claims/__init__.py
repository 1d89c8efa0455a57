"""Widely repeated claims about distributed training, held against what this planner computes."""
