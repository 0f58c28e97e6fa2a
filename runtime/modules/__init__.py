"""The torch definition of every graph (extra: torch)."""
