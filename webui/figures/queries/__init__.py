"""Queries of figures, one module a subject; each ends with the `FIGURES` that it answers.

Invariant: a figure asks a bounded number of queries and gets a bounded number of rows, however long the run and however
large the cluster; what was left out is said.
"""
