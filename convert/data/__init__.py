"""Tables of the convert package."""
