"""The figures of a run, one module per subject: queries, what is drawn of their rows, and the declarations `FIGURES`.

Invariant: a figure runs a bounded number of queries and reads a bounded number of rows, also for long runs and large
clusters. The figure says what was left out.
"""
