"""MOSS-SoundEffect v1: text to sound effects with the 8.3 B delay-pattern model and the 24 kHz codec."""
