"""Rollout engines: the subclassed vLLM Ray actor, the vLLM plug-ins, weight loading."""
