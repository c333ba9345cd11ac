"""Triton kernels and device functions: no torch import, no tuning numbers."""
