"""Benchmarks, run by `make bench`. Results that are kept stand in benchmarks/results/."""
