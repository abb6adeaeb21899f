"""What routing decides: pure, no I/O, no clock; shared by router and simulator."""
