"""Who is asking, and the service that is asked."""
