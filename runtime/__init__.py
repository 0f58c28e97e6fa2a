"""What a device needs to turn text into speech. Importing this package needs NumPy alone."""
