"""What all roles share: configuration, errors, sampling, the wire, the engine, the command line."""

__version__ = "0.1.0"
