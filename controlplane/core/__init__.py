"""What the control plane decides: pure, no I/O, no clock."""
