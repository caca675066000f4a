"""Shared by all kernels: the choice of an implementation, and the folders of compiled code."""
