"""Benchmarks of the operators: what `replayssm bench` measures, and how."""
