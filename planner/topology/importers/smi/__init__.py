"""Readers of nvidia-smi, rocm-smi and amd-smi: matrices of devices."""
