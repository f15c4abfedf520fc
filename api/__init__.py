"""The control plane: a FastAPI service with an SQL store that starts, shows and stops runs.

Imports neither vllm, torch, deepspeed nor openrlhf: it runs where none of them is installed.
"""
