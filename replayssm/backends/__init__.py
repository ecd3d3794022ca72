"""Kernels, one folder for each way to run them. Backends know tensors alone and assume valid input."""
