"""The error of machines and clusters that do not suit a command."""


class PlatformError(RuntimeError):
    """A machine or cluster that does not suit a command; the message is one sentence."""
