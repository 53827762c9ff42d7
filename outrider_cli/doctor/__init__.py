"""The checks of `outrider doctor`: each returns what it found, and prints nothing."""
