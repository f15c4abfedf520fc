"""Queries of figures, one module per subject; each module ends with its `FIGURES`.

Invariant: a figure runs a bounded number of queries and reads a bounded number of rows, also for long runs and large
clusters. The figure says what was left out.
"""
