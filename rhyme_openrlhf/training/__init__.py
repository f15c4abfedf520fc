"""Training side: OpenRLHF's trainers and model actors subclassed, the weight buffer, the seeding shim."""
