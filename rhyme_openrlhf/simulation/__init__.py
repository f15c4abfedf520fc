"""What a feature would give on a cluster: simulated engines under the policies of `scheduling/` (docs/simulator.md)."""
