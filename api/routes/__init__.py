"""HTTP routes, one module per resource: each turns a request into a call, and an exception into a problem."""
