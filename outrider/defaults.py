"""What holds where nobody says otherwise. Imports nothing: the command line reads it first."""

NUM_SPECULATIVE_TOKENS = 32  # most draft tokens in a step of any request
