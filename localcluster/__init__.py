"""A whole cluster on this machine, as real processes: for `steelyard up`, demos and tests."""
