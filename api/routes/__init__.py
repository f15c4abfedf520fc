"""The HTTP routes, one module a resource: from a request to a call, from an exception to a problem."""
