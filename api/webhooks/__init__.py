"""Webhooks: messages to other services about what happens to runs.

- `conditions`: what is noticed by looking at running runs, while ends are noticed where they happen
- `sending`: one message as a signed request, within a limited time
- `deliveries`: the loop that looks, sends, and tries again
"""
